"""An HTTP proxy in front of the API server that fails on purpose and watches every write.

A test adds faults (faults.py makes them), starts the operator with a kubeconfig that names the
proxy, and reads `calls`, `writes` and `audit.violations` afterwards. Each client (an operator
replica, say) gets an address of its own, so the proxy knows who calls. Runs on a thread with its
own event loop; never decides anything about the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.api_server.audit import Audit
from tests.support.api_server.calls import Call, parse_body, parse_path, verb_of
from tests.support.api_server.programs import Cluster

T = TypeVar("T")
_NOT_PASSED_ON = {"host", "content-length", "accept-encoding", "connection", "transfer-encoding"}


@dataclass
class Answer:
    """Of the API server, or made up by a fault."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def obj(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            value = json.loads(self.body)
            if isinstance(value, dict):
                return value
        return {}


Forward = Callable[[], Awaitable[Answer]]
Event = dict[str, Any]


@dataclass
class Fault:
    """What to do with calls that match: `times` of them, or all of them until it is removed."""

    when: Callable[[Call], bool]
    act: Callable[[Call, Forward], Awaitable[Answer]]
    times: int | None = 1


@dataclass
class EventFault:
    """What to do with watch events that match: act's events are delivered, None ends the watch."""

    when: Callable[[Call, Event], bool]
    act: Callable[[Event], list[Event] | None]
    times: int | None = 1


class FaultProxy:
    """Use it in a with statement; `url(client)` makes an address for a client."""

    def __init__(self, cluster: Cluster, audit: Audit | None = None) -> None:
        self._cluster = cluster
        self.audit = audit or Audit()
        self.faults: list[Fault] = []
        self.event_faults: list[EventFault] = []
        self.calls: list[Call] = []
        self.writes: list[tuple[Call, int]] = []  # with the status the API server gave
        self.num_events = 0
        self._clients: dict[int, str] = {}
        self._doors: dict[int, web.SockSite] = {}
        self._open: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._num_attempts = 0

    # --- life --------------------------------------------------------------------------------
    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._wait(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait(self, work: Awaitable[T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]
        return future.result(20)

    async def _start(self) -> None:
        context = ssl.create_default_context(cafile=str(self._cluster.ca_file))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        # Calls in a black hole never end by themselves.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def url(self, client: str) -> str:
        """A new address; calls that come in there are `client`'s."""

        sock = socket.create_server(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
        self._clients[port] = client
        self._wait(self._open_door(port, sock))
        return f"http://127.0.0.1:{port}"

    async def _open_door(self, port: int, sock: socket.socket) -> None:
        self._doors[port] = web.SockSite(self._runner, sock)
        await self._doors[port].start()

    def close_doors(self) -> None:
        """Connections are cut, new ones refused, until `open_doors`."""
        self._wait(self._close_doors())

    async def _close_doors(self) -> None:
        for door in self._doors.values():
            await door.stop()
        for transport in list(self._open):
            transport.abort()
        self._open.clear()

    def open_doors(self) -> None:
        """At the same addresses."""
        for port in list(self._doors):
            self._wait(self._open_door(port, socket.create_server(("127.0.0.1", port))))

    def clear(self) -> None:
        self.faults.clear()
        self.event_faults.clear()

    # --- what the tests ask ------------------------------------------------------------------
    @property
    def num_writes(self) -> int:
        return len(self.writes)

    def writes_of(self, resource: str) -> list[Call]:
        return [call for call, _ in self.writes if call.target.resource == resource]

    # --- requests ----------------------------------------------------------------------------
    async def _serve(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._open.add(request.transport)
        data = await request.read()
        call = self._call(request, data)
        self.audit.before(call)
        if call.verb == "watch":
            return await self._watch(request, call)
        committed: list[Answer] = []

        async def forward() -> Answer:
            answer = await self._ask(request, data)
            committed.append(answer)
            if call.is_write:
                self.writes.append((call, answer.status))
                self.audit.after(call, answer.status, answer.obj)
            return answer

        fault = self._matching(self.faults, lambda f: f.when(call))
        answer = await (fault.act(call, forward) if fault else forward())
        if answer not in committed:
            self.audit.unanswered(call)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    def _call(self, request: web.Request, data: bytes) -> Call:
        target, query = parse_path(request.path), dict(request.query)
        verb = verb_of(request.method, target, query, request.content_type)
        assert request.transport is not None
        port = request.transport.get_extra_info("sockname")[1]
        draft = Call(0, 0, self._clients[port], verb, target, query)
        counts = draft.is_write and not draft.is_lease
        self._num_attempts += counts
        number, write_number = len(self.calls) + 1, self._num_attempts if counts else 0
        call = Call(number, write_number, draft.client, verb, target, query, parse_body(data))
        self.calls.append(call)
        return call

    def _matching(self, faults: list[Any], matches: Callable[[Any], bool]) -> Any:
        for fault in list(faults):
            if fault.times != 0 and matches(fault):
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def _upstream(self, request: web.Request, data: bytes) -> Any:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        headers["Accept-Encoding"] = "identity"
        url = URL(self._cluster.url + request.rel_url.raw_path_qs, encoded=True)
        # Nothing is added: a GET with aiohttp's own Content-Type is answered by 415.
        return self._session.request(
            request.method,
            url,
            data=data or None,
            headers=headers,
            skip_auto_headers=("Content-Type", "Accept", "User-Agent"),
        )

    async def _ask(self, request: web.Request, data: bytes) -> Answer:
        async with self._upstream(request, data) as reply:
            kept = {k: v for k, v in reply.headers.items() if k in ("Content-Type", "Retry-After")}
            return Answer(reply.status, await reply.read(), kept)

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        fault = self._matching(self.faults, lambda f: f.when(call))
        if fault:  # a watch that is refused or never answered
            answer = await fault.act(call, lambda: self._ask(request, b""))
            return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        async with self._upstream(request, b"") as reply:
            out = web.StreamResponse(status=reply.status)
            out.content_type = "application/json"
            await out.prepare(request)
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._relay(call, reply, out)
            return out

    async def _relay(
        self, call: Call, reply: aiohttp.ClientResponse, out: web.StreamResponse
    ) -> None:
        pending = b""
        async for chunk in reply.content.iter_any():
            *lines, pending = (pending + chunk).split(b"\n")
            for line in filter(None, lines):
                delivered = self._events(call, line)
                if delivered is None:
                    return
                for event in delivered:
                    await out.write(event + b"\n")

    def _events(self, call: Call, line: bytes) -> list[bytes] | None:
        if not self.event_faults:
            self.num_events += 1
            return [line]
        event = json.loads(line)
        self.num_events += event["type"] != "BOOKMARK"
        fault = self._matching(self.event_faults, lambda f: f.when(call, event))
        if fault is None:
            return [line]
        delivered = fault.act(event)
        return None if delivered is None else [json.dumps(e).encode() for e in delivered]
