"""Sends the log of cache events: a PUB socket with sequence numbers, a ROUTER that replays.

Made by main/ when `events_bind` is set; `publish` is called by the core thread through `EventLog`.
The thread here owns both sockets. Format and rules for readers: docs/reference/events.md. Slow or
absent readers never delay the engine: PUB drops messages for them, and a gap in the sequence
numbers tells them so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from urllib.parse import urlsplit

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from foveal_runtime.plan.config import CurveKeys
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire import curve
from foveal_runtime.wire.transport import check_plain

_LOG = logging.getLogger(__name__)
TOPIC = b"foveal.cache.1"
MAX_PENDING_BYTES = 2 * 1024**2
MAX_REPLAY_BYTES = 8 * 1024**2
MESSAGE_BYTES = 160
"""What a message takes beside its payload."""
MAX_UNREAD_MESSAGES = 4096
MAX_REQUESTS_A_TURN = 16
MAX_REQUEST_BYTES = 4096
"""Of a frame that a reader sends: topics to subscribe to, numbers to replay from."""
END_OF_REPLAY = b"\xff" * 8


def replay_endpoint(bind: str) -> str:
    """The replay socket of a stream: the same address, one port up (port 0: any port)."""
    parts = urlsplit(bind)
    if parts.scheme != "tcp":
        return f"{bind}.replay"
    if parts.port is None:
        raise StartupError(f"events_bind {bind!r} names no port: use tcp://HOST:PORT")
    host = bind.rsplit(":", 1)[0]
    return f"{host}:{parts.port + 1 if parts.port else 0}"


class EventStream:
    """The publisher of cache events. `start` binds; `close` ends the thread.

    Args:
        bind: the PUB endpoint.
        topic: the first frame of every message. first: the number of the first batch.
        plain: an address that is not loopback may do without CURVE.

    Attributes:
        endpoint, replay: the bound addresses, once started.
        num_dropped: batches that were not sent because the thread could not keep up.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: CurveKeys | None = None,
        topic: bytes = TOPIC,
        first: int = 1,
        plain: bool = False,
    ) -> None:
        self.endpoint = self.replay = ""
        self.num_dropped = 0
        self._bind = bind
        self._keys = keys or CurveKeys()
        self._pending: deque[tuple[bytes, bytes]] = deque()
        # Two sums, since each has one thread that writes it; what waits is the difference.
        self._queued_bytes = self._taken_bytes = 0
        self._topic, self._first, self._plain = topic, first, plain
        self._seq = 0
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)

    @property
    def num_published(self) -> int:
        return self._seq

    @property
    def held_bytes(self) -> int:
        """Kept for readers, and on their way to the thread that sends."""
        return self._kept_bytes + self._queued_bytes - self._taken_bytes

    # ---- other threads --------------------------------------------------------------------------

    def start(self) -> None:
        """Binds both sockets. Raises StartupError."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def publish(self, batch: msgspec.Struct) -> None:
        """Numbers a batch and queues it. One caller thread; never blocks."""
        self._seq += 1
        payload = self._encoder.encode(batch)
        size = len(payload) + MESSAGE_BYTES
        pending = self._queued_bytes - self._taken_bytes
        if pending and pending + size > MAX_PENDING_BYTES:  # a large one alone is taken
            self.num_dropped += 1  # readers see the gap
            return
        self._queued_bytes += size
        self._pending.append(((self._seq - 1 + self._first).to_bytes(8, "big"), payload))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Sends what is queued and ends."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._stopping = True
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        elif self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # ---- this thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        authenticator: ThreadAuthenticator | None = None
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        try:
            for socket in (pub, router):
                socket.setsockopt(zmq.LINGER, 200)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
                socket.setsockopt(zmq.IPV6, int("[" in self._bind or "//*:" in self._bind))
            pub.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
            router.setsockopt(zmq.SNDHWM, MAX_REPLAY_BYTES // MESSAGE_BYTES)
            if not self._plain:
                check_plain(self._bind, self._keys)
            if curve.is_enabled(self._keys):
                authenticator = curve.guard(context, [pub, router], self._keys)
            self.endpoint = self._bind_one(pub, self._bind)
            self.replay = self._bind_one(router, replay_endpoint(self._bind))
            self._started.set()
            self._serve(pub, router)
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                _LOG.exception("the event stream ended; caches work on without it")
        finally:
            pub.close()
            router.close()
            if authenticator is not None:
                authenticator.stop()
            context.term()
            os.close(self._wake_fd)
            self._wake_fd = -1
            self._started.set()

    def _bind_one(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartupError(f"events_bind: cannot listen on {endpoint}: {error}") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _serve(self, pub: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            stopping = self._stopping
            while self._pending:
                number, payload = self._pending.popleft()
                self._taken_bytes += len(payload) + MESSAGE_BYTES
                self._keep(number, payload)
                pub.send_multipart([self._topic, number, payload])
            if router in ready:
                self._answer(router)
            if stopping:
                return

    def _keep(self, number: bytes, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._kept_bytes += len(payload) + MESSAGE_BYTES
        while self._kept_bytes > MAX_REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1]) + MESSAGE_BYTES

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """[first wanted number] -> every kept message from there on, then the end mark."""
        for _ in range(MAX_REQUESTS_A_TURN):
            try:
                who, *rest = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not rest or len(rest[-1]) != 8:
                continue
            for number, payload in self._kept:
                if number >= rest[-1]:
                    router.send_multipart([who, *rest[:-1], number, payload])
            router.send_multipart([who, *rest[:-1], END_OF_REPLAY, b""])
