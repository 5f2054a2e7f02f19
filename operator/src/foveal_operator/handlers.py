"""kopf as watch engine, and nothing else of kopf: the only file that imports it.

Runs in a thread with an event loop of its own, so that its tasks, signals and shutdown are its own
matter; every event is handed to our loop. Only `on.event` handlers: kopf then writes nothing, no
annotation, no finalizer, no Event. Never decides anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from foveal_operator.cluster import Credentials, Obj
from foveal_operator.kinds import Kind
from foveal_operator.watch import selector_of

log = logging.getLogger(__name__)

Sink = Callable[[Kind, str | None, Obj], None]
MAX_BACKOFF_SECONDS = 15.0
TOKEN_SECONDS = 2400


class EndlessBackoff:
    """1, 2, 4, 8, 15, 15, ... without end: an outage never ends the watches."""

    def __iter__(self) -> Iterator[float]:
        seconds = 1.0
        while True:
            yield seconds
            seconds = min(MAX_BACKOFF_SECONDS, 2 * seconds)


class WatchEngine:
    """One life of kopf's watches over a set of kinds; make a new one for another set.

    Args:
        login: asked at the start and whenever credentials have expired or were refused.
        sink: called in `loop` for every event.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        *,
        login: Callable[[], Awaitable[Credentials]],
        sink: Sink,
        loop: asyncio.AbstractEventLoop,
        identity: str,
    ) -> None:
        self._kinds = tuple(kinds)
        self._namespaces = tuple(namespaces)
        self._login = login
        self._sink = sink
        self._loop = loop
        self._identity = identity
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self._kinds

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end; it does not matter to anyone when."""
        self._stop.set()

    def join(self, timeout_seconds: float) -> None:
        """For tests: a process simply exits."""
        self._thread.join(timeout_seconds)

    def registry(self) -> kopf.OperatorRegistry:
        """The handlers: one event handler for each kind, one login."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._on_login)
        for kind in self._kinds:
            handler = self._handler(kind)
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(
                handler
            )
        return registry

    def settings(self) -> kopf.OperatorSettings:
        """Standalone, silent, patient."""
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.scanning.disabled = True
        settings.networking.error_backoffs = EndlessBackoff()
        settings.networking.connect_timeout = 10.0
        settings.networking.request_timeout = 60.0
        settings.watching.connect_timeout = 10.0
        settings.watching.chunk_size = 500
        settings.queueing.exit_timeout = 0.5
        for kind in self._kinds:
            selector = selector_of(kind)
            if selector:
                key = (kind.group, kind.version, kind.plural)
                settings.watching.label_selectors[key] = selector
        return settings

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def on_event(type: str | None, event: dict[str, Any], **_: Any) -> None:
            body = {**event["object"], "apiVersion": kind.api_version, "kind": kind.name}
            try:
                self._loop.call_soon_threadsafe(self._sink, kind, type, body)
            except RuntimeError:
                # Our loop is closed: the process is about to end.
                self._stop.set()

        return on_event

    async def _on_login(self, **_: Any) -> kopf.ConnectionInfo:
        found = await self._login()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path or None,
            insecure=found.is_insecure,
            token=found.token or None,
            scheme="Bearer" if found.token else None,
            certificate_path=found.certificate_path or None,
            private_key_path=found.key_path or None,
            expiration=(
                datetime.now(UTC) + timedelta(seconds=TOKEN_SECONDS) if found.token else None
            ),
        )

    def _run(self) -> None:
        try:
            asyncio.run(
                kopf.operator(
                    registry=self.registry(),
                    settings=self.settings(),
                    # Given, so that kopf need not ask the system for a user name it may lack.
                    identity=self._identity,
                    standalone=True,
                    clusterwide=not self._namespaces,
                    namespaces=self._namespaces,
                    stop_flag=self._stop,
                )
            )
        except Exception:
            log.exception("the watches ended")
        finally:
            if not self._stop.is_set():
                log.error("the watches ended by themselves")
