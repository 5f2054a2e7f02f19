"""Transports between frontends and engines: what each offers, and the one that processes use.

`testing.inprocess` implements the same seam for tests. A transport moves lists of frames and counts
bytes; it knows no message. It never blocks a sender: what cannot be sent now ends the session,
which is cheap, while waiting would stall every session.

Between processes it is ZMQ: DEALER at the frontend, ROUTER at the engine, CURVE on request. ZMQ
reconnects silently and may lose or deliver late what was queued before a break, so the session
protocol above decides what counts; here everything is bounded and nothing blocks: a full pipe or a
missing peer raises LinkDown at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from foveal_runtime.mirror.messages import MAX_VALUE_BYTES
from foveal_runtime.mirror.store import Buffer
from foveal_runtime.plan.config import CurveKeys
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire import curve

Frames = list[memoryview]


class LinkDown(Exception):
    """The link cannot carry messages now: end the session, open another when it is back.

    Attributes:
        reason: disconnected, full, unreachable, handshake_failed or closed (a metric label).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class ByteCounters:
    """Application bytes of all frames (routing ids, ZMTP and CURVE overhead not counted)."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_received: int = 0

    def count_sent(self, frames: Sequence[Buffer]) -> None:
        self.bytes_sent += sum(len(frame) for frame in frames)

    def count_received(self, frames: Sequence[Buffer]) -> None:
        self.messages_received += 1
        self.bytes_received += sum(len(frame) for frame in frames)


class FrontendTransport(Protocol):
    """One link of a frontend to an engine. Used in one asyncio loop."""

    counters: ByteCounters

    async def connected(self) -> None:
        """Returns when messages can be sent. Wait for it before each HELLO."""
        ...

    def send(self, frames: Sequence[Buffer]) -> None:
        """Hands the message over at once, in order. Raises LinkDown. Buffers must not change
        afterwards."""
        ...

    async def recv(self) -> Frames:
        """The next message. Raises LinkDown, once per break."""
        ...

    def close(self) -> None: ...


class EngineTransport(Protocol):
    """All links of an engine. Used by one thread, except `wake`."""

    counters: ByteCounters
    endpoint: str

    def poll(self, timeout_seconds: float) -> list[tuple[str, Frames]]:
        """Waits for messages or a wake-up; returns (frontend id, frames) in order of arrival,
        maybe none."""
        ...

    def send(self, frontend_id: str, frames: Sequence[Buffer]) -> None:
        """Raises LinkDown when that frontend is gone or does not read."""
        ...

    def wake(self) -> None:
        """Makes `poll` return soon; safe from any thread."""
        ...

    def close(self) -> None: ...


CURVE_BYTES = 1024
"""More than CURVE adds to a frame before the other end compares it with its limit."""
MAX_FRAME_BYTES = MAX_VALUE_BYTES + CURVE_BYTES
HWM_MESSAGES = 4096
MAX_BATCH = 256
HEARTBEAT_MS = 1000
DEAD_AFTER_MS = 3000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 2000
_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _FAILED


def check_plain(endpoint: str, keys: CurveKeys) -> None:
    """Raises StartupError for a TCP endpoint that others could reach without CURVE."""
    parts = urlsplit(endpoint)
    if parts.scheme == "tcp" and not _is_loopback(parts.hostname) and not curve.is_enabled(keys):
        raise StartupError(
            f"endpoint {endpoint} is not on loopback: set the four curve.*_file keys"
        )


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _set_common(
    socket: zmq.Socket[bytes], endpoint: str, max_frame_bytes: int, max_queued: int
) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, max_queued)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint or "//*:" in endpoint))


def _buffers(parts: Sequence[zmq.Frame]) -> Frames:
    return [part.buffer for part in parts]


class ZmqDealer:
    """A frontend's link to one engine (`FrontendTransport`).

    `frontend_id` is the routing id at the engine: unique per frontend process. Make it inside the
    running asyncio loop and close it there.
    """

    def __init__(
        self,
        endpoint: str,
        frontend_id: str,
        *,
        keys: CurveKeys | None = None,
        max_queued: int = HWM_MESSAGES,
    ) -> None:
        keys = keys or CurveKeys()
        check_plain(endpoint, keys)
        self.counters = ByteCounters()
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._received: deque[Frames] = deque()
        self._news = asyncio.Event()
        self._is_connected = asyncio.Event()
        self._break = ""
        self._is_scheduled = False
        self._is_closed = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        _set_common(self._socket, endpoint, MAX_FRAME_BYTES, max_queued)
        self._socket.setsockopt(zmq.ROUTING_ID, frontend_id.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        try:
            if curve.is_enabled(keys):
                self._use_curve(keys)
            self._monitor = self._socket.get_monitor_socket(_WATCHED)
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.close(0)
            raise
        self._loop.add_reader(self._socket.FD, self._drain)
        self._loop.add_reader(self._monitor.FD, self._watch)
        self._schedule()

    def _use_curve(self, keys: CurveKeys) -> None:
        server = curve.read_key(keys.server_public_file, "server_public_file")
        public = curve.read_key(keys.client_public_file, "client_public_file")
        secret = curve.read_key(keys.client_secret_file, "client_secret_file")
        self._socket.curve_serverkey = server
        self._socket.curve_publickey = public
        self._socket.curve_secretkey = secret

    async def connected(self) -> None:
        await self._is_connected.wait()
        if self._is_closed:
            raise LinkDown("closed")

    def send(self, frames: Sequence[Buffer]) -> None:
        if self._is_closed or not self._is_connected.is_set():
            raise LinkDown("closed" if self._is_closed else "disconnected")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise LinkDown("full") from error
        self.counters.count_sent(frames)
        self._schedule()  # the descriptor is edge-triggered: a send may have eaten its edge

    async def recv(self) -> Frames:
        while not self._received:
            if self._break:
                reason, self._break = self._break, ""
                raise LinkDown(reason)
            self._news.clear()
            await self._news.wait()
        frames = self._received.popleft()
        if len(self._received) == HWM_MESSAGES // 2:
            self._schedule()
        return frames

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._received.clear()
        self._broken("closed")
        self._is_connected.set()

    # ---- internals -----------------------------------------------------------------------------
    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_scheduled = False
        self._drain()
        self._watch()

    def _drain(self) -> None:
        for _ in range(MAX_BATCH):
            if self._is_closed or len(self._received) >= HWM_MESSAGES:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = _buffers(parts)
            self.counters.count_received(frames)
            self._received.append(frames)
            self._news.set()
        self._schedule()

    def _watch(self) -> None:
        while not self._is_closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_connected.set()
            elif event == zmq.Event.DISCONNECTED:
                if self._is_connected.is_set():
                    self._drain()  # the goodbye may have come since the last look
                    self._broken("disconnected")
            else:
                self._broken("handshake_failed")

    def _broken(self, reason: str) -> None:
        """`recv` hands over first what came before: an engine's goodbye is its last message."""
        self._is_connected.clear()
        self._break = reason
        self._news.set()


GOODBYE_MS = 500
"""How long a closing engine may take to send what it has said."""


class ZmqRouter:
    """All links of one engine (`EngineTransport`). Made, polled and closed by one
    thread; `wake` may be called from any.

    With CURVE only clients whose key is in the allow-list get through the handshake.
    `endpoint` is the bound address (with the real port when 0 was asked for).
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: CurveKeys | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_queued: int = HWM_MESSAGES,
    ) -> None:
        keys = keys or CurveKeys()
        check_plain(bind, keys)
        self.counters = ByteCounters()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            _set_common(self._socket, bind, max_frame_bytes, max_queued)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            if curve.is_enabled(keys):
                self._authenticator = curve.guard(self._context, [self._socket], keys)
            self._bind(bind)
        except BaseException:
            self.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def _bind(self, bind: str) -> None:
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            raise StartupError(f"cannot listen on {bind}: {error}") from error

    def poll(self, timeout_seconds: float) -> list[tuple[str, Frames]]:
        ready = dict(self._poller.poll(max(0, int(timeout_seconds * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        received: list[tuple[str, Frames]] = []
        if self._socket not in ready:
            return received
        while len(received) < MAX_BATCH:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            frames = _buffers(parts[1:])
            self.counters.count_received(frames)
            try:
                received.append((str(parts[0].buffer, "utf-8"), frames))
            except UnicodeDecodeError:
                continue  # no frontend of ours: its routing id is no name
        return received

    def send(self, frontend_id: str, frames: Sequence[Buffer]) -> None:
        try:
            self._socket.send_multipart(
                [frontend_id.encode(), *frames], zmq.NOBLOCK, copy=False
            )  # fmt: skip
        except zmq.Again as error:
            raise LinkDown("full") from error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise LinkDown("unreachable") from error
            raise
        self.counters.count_sent(frames)

    def wake(self) -> None:
        with self._wake_lock:  # whoever wakes may come when the polling thread has just closed
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        if self._wake_fd < 0:
            return
        # What was said last is the goodbye that tells frontends to go on elsewhere: it may leave.
        self._socket.close(GOODBYE_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
