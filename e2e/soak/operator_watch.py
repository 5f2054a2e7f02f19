"""When objects arrive: watches of all kinds on threads, for the latencies of operator_scale.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

import httpx
import msgspec

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.sandbox import KIND

INSTANCE = "app.kubernetes.io/instance"
WAIT_SECONDS = 60.0
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Arrivals:
    """Use it in a with statement. Times are of time.monotonic()."""

    def __init__(self, api: Api, namespace: str, kinds: Sequence[str]) -> None:
        self._api, self._namespace, self._kinds = api, namespace, kinds
        self._changed = threading.Condition()
        self._children: dict[str, dict[str, float]] = {}
        self._statuses: dict[str, list[tuple[float, Obj]]] = {}
        self._replies: list[httpx.Response] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    def __enter__(self) -> Arrivals:
        for kind in self._kinds:
            listed = self._api.request("GET", self._api.path(kind, self._namespace), limit=1)
            version = listed.must()["metadata"]["resourceVersion"]
            thread = threading.Thread(target=self._watch, args=(kind, version), name=kind)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _watch(self, kind: str, version: str) -> None:
        path = self._api.path(kind, self._namespace)
        while not self._stop.is_set():
            query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3600"}
            timeout = httpx.Timeout(10.0, read=5.0)
            # Little is sent and read, so that the times are not those of this process.
            accept = "application/json" if kind == KIND else _METADATA
            try:
                with self._api.stream("GET", path, query, timeout, accept) as reply:
                    for line in reply.iter_lines():
                        event = msgspec.json.decode(line)
                        version = event["object"]["metadata"]["resourceVersion"]
                        self._arrived(kind, event)
                        if self._stop.is_set():
                            return
            except httpx.ReadTimeout:
                continue

    def _arrived(self, kind: str, event: Obj) -> None:
        now, body = time.monotonic(), event["object"]
        metadata = body["metadata"]
        with self._changed:
            if kind == KIND:
                status = body.get("status", {})
                self._statuses.setdefault(metadata["name"], []).append((now, status))
            elif event["type"] == "ADDED" and INSTANCE in metadata.get("labels", {}):
                name = metadata["labels"][INSTANCE]
                self._children.setdefault(name, {})[f"{kind}/{metadata['name']}"] = now
            self._changed.notify_all()

    def _wait(self, what: str, find: Callable[[], float | None]) -> float:
        with self._changed:
            found = self._changed.wait_for(lambda: find(), WAIT_SECONDS)
            if not found:
                raise TimeoutError(f"{what} did not come; {self._told()}")
            return float(found)

    def _told(self) -> str:
        return json.dumps({k: sorted(v) for k, v in list(self._children.items())[-1:]})

    def wait_children(self, name: str, num: int) -> float:
        """When the last of so many children came."""

        def find() -> float | None:
            times = sorted(self._children.get(name, {}).values())
            return times[num - 1] if len(times) >= num else None

        return self._wait(f"{num} children of {name}", find)

    def wait_status(self, name: str) -> float:
        """When the first status came."""
        return self._wait(
            f"status of {name}",
            lambda: next((t for t, s in self._statuses.get(name, ()) if s.get("conditions")), None),
        )

    def wait_engines(self, name: str, field: str, value: int) -> float:
        """When status.engine.FIELD first had this value."""
        return self._wait(
            f"engine.{field} of {name}",
            lambda: next(
                (
                    t
                    for t, s in self._statuses.get(name, ())
                    if s.get("engine", {}).get(field) == value
                ),
                None,
            ),
        )
