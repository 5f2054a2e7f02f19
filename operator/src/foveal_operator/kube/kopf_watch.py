"""kopf as watch engine, and nothing else of kopf: the only file that imports it.

Runs in a thread with an event loop of its own, so that its tasks, signals and shutdown are its own
matter; every event is handed to our loop. Only `on.event` handlers: kopf then writes nothing, no
annotation, no finalizer, no Event. Never decides anything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import kopf

from foveal_operator.kube.cluster import Credentials
from foveal_operator.kube.kinds import Kind
from foveal_operator.kube.types import Obj
from foveal_operator.kube.watches import selector_of

log = logging.getLogger(__name__)

Sink = Callable[[Kind, str | None, Obj], None]
MAX_BACKOFF_SECONDS = 15.0
TOKEN_SECONDS = 2400
LOGIN_PAUSE_SECONDS = 5.0
# The API server ends each watch after this long, so that every watch has to be asked for again and
# again: an answer to that is the sign of its life.
WATCH_SECONDS = 120
# Room for one watch, kopf's 70 s without a bookmark and a backoff.
SILENT_SECONDS = 240.0
# For kopf's own end, which takes five when a watch hangs.
END_SECONDS = 10.0
# Objects in memory at once while a watch begins.
LIST_CHUNK = 50
HANDED_AT_ONCE = 50


class _NoEssence(kopf.DiffBaseStorage):  # type: ignore[misc]
    """kopf compares nothing for us: by default it copies every object of every event twice."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> None:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Nothing is ever stored."""


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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds = tuple(kinds)
        self._namespaces = tuple(namespaces)
        self._login = login
        self._sink = sink
        self._loop = loop
        self._identity = identity
        self._monotonic = monotonic
        # By path of a list: when its watch was last answered. Written by the thread only.
        self._answered: dict[str, float] = {}
        self._is_refused = False
        self._next_login = 0.0
        # Events on their way into our loop, which is woken once for all of them.
        self._heard: deque[tuple[Kind, str | None, Obj]] = deque()
        self._is_told = False
        self.failure = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self._kinds

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stop.is_set()

    def lookup_silent(self) -> tuple[str, ...]:
        """Plurals of the kinds that no watch is known to follow, in any namespace of ours."""
        since = self._monotonic() - SILENT_SECONDS
        return tuple(
            kind.plural
            for kind in self._kinds
            if any(
                self._answered.get(kind.path(namespace), -math.inf) < since
                for namespace in self._namespaces or (None,)
            )
        )

    def was_refused(self) -> bool:
        """Whether we lacked a right since the last call."""
        was, self._is_refused = self._is_refused, False
        return was

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
        settings.watching.chunk_size = LIST_CHUNK
        settings.watching.server_timeout = WATCH_SECONDS
        # Else kopf kills the whole process when its own end takes long.
        settings.process.ultimate_exiting_timeout = None
        settings.queueing.exit_timeout = 0.5
        # A task for each object that has just changed: not for longer than it takes.
        settings.queueing.idle_timeout = 0.1
        settings.persistence.diffbase_storage = _NoEssence()
        settings.persistence.progress_storage = kopf.MultiProgressStorage([])  # events have none
        for kind in self._kinds:
            selector = selector_of(kind)
            if selector:
                key = (kind.group, kind.version, kind.plural)
                settings.watching.label_selectors[key] = selector
        return settings

    def _hand_over(self) -> None:
        """In our loop: what has come since it was woken, some at a time."""
        # Before looking: whatever comes from now on wakes it again.
        self._is_told = False
        for _ in range(HANDED_AT_ONCE):
            if not self._heard:
                return
            kind, change, body = self._heard.popleft()
            try:
                self._sink(kind, change, body)
            except Exception:
                log.exception("an event of %s", kind.plural)
        self._loop.call_soon(self._hand_over)

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def on_event(type: str | None, event: dict[str, Any], **_: Any) -> None:
            body = {**event["object"], "apiVersion": kind.api_version, "kind": kind.name}
            self._heard.append((kind, type, body))
            if not self._is_told:
                self._is_told = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_over)
                except RuntimeError:
                    # Our loop is closed: the process is about to end.
                    self._stop.set()

        return on_event

    async def _on_login(self, **_: Any) -> kopf.AiohttpSession:
        """A session of ours, so that we see which watches are answered.

        Refused credentials are asked for without end, but not faster than every few seconds: they
        may be replaced in their file, and an API server that starts refuses good ones.
        """
        now = self._monotonic()
        await asyncio.sleep(max(0.0, self._next_login - now))
        self._next_login = max(now, self._next_login) + LOGIN_PAUSE_SECONDS
        found = await self._login()
        info = kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path or None,
            insecure=found.is_insecure,
            token=found.token or None,
            scheme="Bearer" if found.token else None,
            certificate_path=found.certificate_path or None,
            private_key_path=found.key_path or None,
        )
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._on_answer)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            trace_configs=[trace],
        )
        return kopf.AiohttpSession(
            server=found.server,
            aiohttp_session=session,
            expiration=(
                datetime.now(UTC) + timedelta(seconds=TOKEN_SECONDS) if found.token else None
            ),
        )

    async def _on_answer(self, session: Any, context: Any, params: Any) -> None:
        """The head of an answer is there: of a watch, it says that the stream is open."""
        url = params.url
        self._is_refused |= params.response.status == 403
        if url.query.get("watch") != "true" or params.response.status != 200:
            return
        for kind in self._kinds:
            for namespace in self._namespaces or (None,):
                if url.path.endswith(path := kind.path(namespace)):
                    self._answered[path] = self._monotonic()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as error:
            self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        """From now on nothing is watched, however long kopf takes to end."""
        if error is not None and not self._stop.is_set():
            # The API server's words; what follows in kopf's errors repeats them with the headers.
            text = str(error.args[0] if error.args else "") or type(error).__name__
            asked = getattr(error.__cause__, "request_info", None)
            self.failure = f"{asked.real_url.path}: {text}" if asked else text
            log.debug("the watches have ended", exc_info=error)
        # kopf waits for the flag in a thread of its own, and asyncio.run for that thread.
        self._stop.set()

    async def _watch(self) -> None:
        # kopf's callbacks fail when a request ends that waits for its answer; its tasks end anyway.
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: log.debug(
                "%s", context["message"], exc_info=context.get("exception")
            )
        )
        before = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=self.registry(),
            settings=self.settings(),
            # Given, so that kopf need not ask the system for a user name it may lack.
            identity=self._identity,
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )
        ending = asyncio.create_task(kopf.run_tasks(tasks, ignored=before))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        found = (task.exception() for task in done if not task.cancelled())
        self._ended(next((error for error in found if error), None))
        # A watch may outlive its cancellation: it waits for credentials that nobody fetches now.
        await asyncio.wait({ending}, timeout=END_SECONDS)
        while others := asyncio.all_tasks() - before:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1.0)
