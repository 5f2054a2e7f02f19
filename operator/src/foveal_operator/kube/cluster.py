"""The API server: the only calls there are, behind one function that stamps and classifies them.

`Cluster` is the seam; KubeCluster speaks HTTP (raw objects, no typed models; http.py carries them),
FakeCluster (testing/fake_cluster.py) lives in memory. The only file that imports `kubernetes`,
which loads the configuration, and only once it is used. Never caches, never decides what is
written.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import msgspec

from foveal_operator.common.clock import Clock
from foveal_operator.kube.errors import (
    ApiError,
    Conflict,
    NotFound,
    NotLeader,
    Transient,
    classify,
)
from foveal_operator.kube.kinds import FIELD_MANAGER, LEASE, Kind, kind_of
from foveal_operator.kube.types import Obj
from foveal_operator.telemetry.series import Telemetry

MAX_IN_FLIGHT = 16
TIMEOUT_SECONDS = 15.0
MAX_TRIES = 2
MAX_PAUSE_SECONDS = 5.0
PAGE = 100
NO_VERSION = "1"
"""A resourceVersion that no object has: the revision of an empty etcd."""
_APPLY = "application/apply-patch+yaml"
_JSON = "application/json"


class ClusterReader(Protocol):
    """Reads are live, never from a cache. Every call may raise the errors of kube/errors.py."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj | None:
        """None when it is not there."""

    async def list_all(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        """All objects with these labels and fields, a quorum read. Raises NotFound when the
        cluster lacks the API."""

    def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Obj]]:
        """The same, some at a time: thousands of objects need not be in memory at once."""

    async def serves(self, kind: Kind) -> bool:
        """Whether the cluster has the API."""


class Cluster(ClusterReader, Protocol):
    """Reads and writes."""

    async def apply(self, body: Obj) -> Obj:
        """Server-side apply with force. uid or resourceVersion in it are preconditions: Conflict
        when the object is another one, or gone."""

    async def apply_new(self, body: Obj) -> Obj | None:
        """Server-side apply that only creates: None, and nothing written, when an object of that
        name exists, whosever it is."""

    async def apply_status(self, body: Obj) -> Obj:
        """The same for the status. Raises NotFound: it never creates."""

    async def create(self, body: Obj, *, dry_run: bool = False) -> Obj | None:
        """None when it is there already. A dry run only says whether it is."""

    async def update(self, body: Obj) -> Obj:
        """Replaces; Conflict unless its resourceVersion is the present one."""

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, version: str = ""
    ) -> bool:
        """Only this very object, and with `version` only as it was then. False when it is gone,
        has changed, or another has its name."""

    async def close(self) -> None: ...


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the API server, for the watch engine. Paths, or "" where there is none."""

    server: str
    ca_path: str = ""
    token: str = ""
    certificate_path: str = ""
    key_path: str = ""
    is_insecure: bool = False


async def load_configuration(kubeconfig: str = "", context: str = "") -> Any:
    """The client's configuration: the given kubeconfig, else the pod's, else the user's.

    Raises ApiError saying what was tried.
    """
    from kubernetes.aio import client, config

    found = client.Configuration()
    try:
        if kubeconfig or context:
            await config.load_kube_config(
                config_file=kubeconfig or None, context=context or None, client_configuration=found
            )
            return found
        try:
            config.load_incluster_config(client_configuration=found)
        except config.ConfigException:
            await config.load_kube_config(client_configuration=found)
    except (config.ConfigException, OSError) as error:
        raise ApiError(
            f"no cluster: {error}; give --kubeconfig, or run in a pod with a service account"
        ) from error
    return found


async def credentials(configuration: Any) -> Credentials:
    """What a second client needs to be the same user. Reads a rotated token anew."""
    header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    return Credentials(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or "",
        token=header.partition(" ")[2],
        certificate_path=configuration.cert_file or "",
        key_path=configuration.key_file or "",
        is_insecure=not configuration.verify_ssl,
    )


class KubeCluster:
    """The real one.

    Args:
        configuration: of `load_configuration`.
        may_write: asked before every write but the Lease's; False raises NotLeader.
    """

    def __init__(
        self,
        configuration: Any,
        telemetry: Telemetry,
        *,
        clock: Clock | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        from foveal_operator.kube.http import Exchange

        self._exchange = Exchange(
            configuration, num_connections=2 * MAX_IN_FLIGHT, timeout_seconds=TIMEOUT_SECONDS
        )
        self._telemetry = telemetry
        self._clock = clock or Clock()
        self._may_write = may_write
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.last_answer_seconds = float("-inf")

    async def close(self) -> None:
        await self._exchange.close()

    # --- reads ------------------------------------------------------------------------------
    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj | None:
        try:
            return await self._call("GET", kind.path(namespace, name), is_urgent=kind is LEASE)
        except NotFound:
            return None

    async def list_all(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        found: list[Obj] = []
        async for page in self.pages(kind, namespace, selector, fields):
            found += page
        return found

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Obj]]:
        query = {"limit": str(PAGE)}
        if selector:
            query["labelSelector"] = selector
        if fields:
            query["fieldSelector"] = fields
        verb = "LIST"
        while True:
            page = await self._call("GET", kind.path(namespace), query=query, verb=verb)
            items = page.pop("items", None) or ()
            named = {"apiVersion": kind.api_version, "kind": kind.name}
            yield [{**item, **named} for item in items]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return
            verb, query = "CONTINUE", {**query, "continue": token}

    async def serves(self, kind: Kind) -> bool:
        try:
            listed = await self._call("GET", kind.root)
        except NotFound:
            return False
        return any(entry.get("name") == kind.plural for entry in listed.get("resources") or ())

    # --- writes -----------------------------------------------------------------------------
    async def apply(self, body: Obj) -> Obj:
        kind, metadata = kind_of(body), body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._write("PATCH", kind, path, body, content=_APPLY, verb="APPLY")

    async def apply_new(self, body: Obj) -> Obj | None:
        # A create would leave its fields with a second manager, for updates, whose fields no later
        # apply removes. No object has this version, and one that does not exist is not asked.
        new = {**body, "metadata": {**body["metadata"], "resourceVersion": NO_VERSION}}
        try:
            return await self.apply(new)
        except Conflict:
            return None

    async def apply_status(self, body: Obj) -> Obj:
        kind, metadata = kind_of(body), body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], "status")
        return await self._write("PATCH", kind, path, body, content=_APPLY, verb="APPLY")

    async def create(self, body: Obj, *, dry_run: bool = False) -> Obj | None:
        kind = kind_of(body)
        path = kind.path(body["metadata"].get("namespace"))
        try:
            return await self._write("POST", kind, path, body, dry_run=dry_run)
        except Conflict:
            return None

    async def update(self, body: Obj) -> Obj:
        kind, metadata = kind_of(body), body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._write("PUT", kind, path, body)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, version: str = ""
    ) -> bool:
        assert uid, "a delete names the very object"
        preconditions = {"uid": uid, "resourceVersion": version} if version else {"uid": uid}
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": preconditions,
            "propagationPolicy": "Background",
        }
        try:
            await self._write("DELETE", kind, kind.path(namespace, name), body)
        except (NotFound, Conflict):
            return False
        return True

    async def _write(
        self,
        method: str,
        kind: Kind,
        path: str,
        body: Obj,
        *,
        content: str = _JSON,
        verb: str = "",
        dry_run: bool = False,
    ) -> Obj:
        """Every write passes here: manager, strictness, and the right to write at all."""
        if kind is not LEASE and not self._may_write():
            raise NotLeader("this replica does not hold the lease")
        query: dict[str, str] = {}
        if method != "DELETE":
            query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        if content == _APPLY:
            query["force"] = "true"
        if dry_run:
            query["dryRun"] = "All"
        # Lease calls are timed and repeated by the elector alone.
        is_lease = kind is LEASE
        answer = await self._call(
            method,
            path,
            query=query,
            body=body,
            content=content,
            verb=verb,
            tries=1 if is_lease else MAX_TRIES,
            is_urgent=is_lease,
        )
        if not dry_run:
            self._telemetry.count("foveal_operator_writes", kind=kind.name, verb=verb or method)
        return answer

    # --- one request ------------------------------------------------------------------------
    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Obj | None = None,
        content: str = _JSON,
        verb: str = "",
        tries: int = MAX_TRIES,
        is_urgent: bool = False,
    ) -> Obj:
        """Sends; once more when there was no answer, or the answer was "in a moment". Anything
        longer is the queue's to wait for: a worker must not stand still for one resource. Every
        call may be repeated: applies are idempotent, and creates and deletes have an answer of
        their own for the second time. An urgent call does not wait for slow ones to end: behind
        them, a renewal of the Lease would come too late."""
        turn = contextlib.nullcontext() if is_urgent else self._in_flight
        for attempt in range(1, tries + 1):
            try:
                async with turn:
                    return await self._once(method, path, query, body, content, verb or method)
            except Transient as error:
                is_brief = error.status == 0 or 0 < error.retry_after_seconds <= MAX_PAUSE_SECONDS
                if attempt == tries or not is_brief:
                    raise
                pause = error.retry_after_seconds or 0.2
                await self._clock.sleep(pause * (1.0 + 0.2 * self._clock.random()))
                if method != "GET" and not self._may_write():
                    raise NotLeader("the lease was lost between two tries") from error
        raise AssertionError("unreachable")

    async def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Obj | None,
        content: str,
        verb: str,
    ) -> Obj:
        started = self._clock.monotonic()
        code = "<error>"
        try:
            target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
            posted = None if body is None else msgspec.json.encode(body)
            status, headers, data = await self._exchange.send(method, target, posted, content)
            code = str(status)
            self.last_answer_seconds = self._clock.monotonic()
        finally:
            seconds = self._clock.monotonic() - started
            self._telemetry.count("rest_client_requests", verb=verb, code=code)
            self._telemetry.observe("rest_client_request_duration_seconds", seconds, verb=verb)
        try:
            parsed = msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError:
            parsed = {"message": data[:200].decode("utf-8", "replace")}
        found: Obj = parsed if isinstance(parsed, dict) else {}
        if 200 <= status < 300:
            return found
        raise classify(status, found, headers.get("Retry-After", ""))
