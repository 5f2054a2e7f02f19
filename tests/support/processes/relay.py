"""A TCP relay that can be cut and counts: the link between a frontend and an engine, in the test's
hands."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from foveal_runtime.plan.config import EngineAddress

GREETING_BYTES = 64  # of ZMTP 3
HEARTBEAT_TAGS = (7, 36)  # of mirror.messages, as array elements


class Counter:
    """Reads one direction of a ZMTP 3 stream; counts the bytes of messages as they are on the
    socket, framing included, and leaves out what flows without any request: the transport's
    commands (handshake, ping, pong) and the protocol's own heartbeats."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self.count = count
        self.buffer = bytearray()
        self.to_skip = GREETING_BYTES
        self.message_bytes = 0
        self.is_heartbeat = False

    def feed(self, data: bytes) -> None:
        self.buffer += data
        if self.to_skip:
            num = min(self.to_skip, len(self.buffer))
            del self.buffer[:num]
            self.to_skip -= num
        while (header := self._header()) is not None:
            start, size, flags = header
            if len(self.buffer) < start + size:
                return
            self._on_frame(flags, start + size, bytes(self.buffer[start : start + 2]))
            del self.buffer[: start + size]

    def _header(self) -> tuple[int, int, int] | None:
        """(where the frame's body starts, its size, its flags), once they are here."""
        if self.to_skip or len(self.buffer) < 2:
            return None
        flags = self.buffer[0]
        if not flags & 2:
            return 2, self.buffer[1], flags
        if len(self.buffer) < 9:
            return None
        return 9, int.from_bytes(self.buffer[1:9], "big"), flags

    def _on_frame(self, flags: int, size: int, begin: bytes) -> None:
        if flags & 4:  # a command
            return
        if not self.message_bytes:
            self.is_heartbeat = begin[0] & 0xF0 == 0x90 and begin[1] in HEARTBEAT_TAGS
        self.message_bytes += size
        if not flags & 1:  # the last frame of a message
            if not self.is_heartbeat:
                self.count(self.message_bytes)
            self.message_bytes = 0


class Relay:
    """Forwards 127.0.0.1:`port` to `target`. `cut()` drops every open connection at once; while
    `held` nothing moves, as when packets are lost, and then what was sent meanwhile arrives late.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.counters: dict[socket.socket, Counter] = {}
        self.num_bytes = 0  # both directions, see Counter
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.cut_wanted = threading.Event()
        self.held = threading.Event()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def cut(self) -> None:
        self.cut_wanted.set()

    def close(self) -> None:
        self.stopped.set()
        self.thread.join(5)

    def _run(self) -> None:
        while not self.stopped.is_set():
            if self.held.is_set():
                self.stopped.wait(0.05)
                continue
            for key, _ in self.selector.select(0.05):
                if key.fileobj is self.listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._forward(key.fileobj)
            if self.cut_wanted.is_set():
                self.cut_wanted.clear()
                for end in list(self.pairs):
                    self._drop(end)
        for end in list(self.pairs):
            self._drop(end)
        self.listener.close()

    def _accept(self) -> None:
        near, _ = self.listener.accept()
        try:
            far = socket.create_connection(self.target, timeout=2)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self.pairs[one] = other
            self.counters[one] = Counter(self._count)
            self.selector.register(one, selectors.EVENT_READ)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _forward(self, end: socket.socket) -> None:
        if end not in self.pairs:
            return
        try:
            data = end.recv(1 << 18)
            if not data:
                raise ConnectionResetError
            self.counters[end].feed(data)
            self.pairs[end].settimeout(2)
            self.pairs[end].sendall(data)
        except OSError:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        other = self.pairs.pop(end, None)
        if other is None:
            return
        self.pairs.pop(other, None)
        for one in (end, other):
            self.counters.pop(one, None)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(one)
            with contextlib.suppress(OSError):
                one.close()


def through_relays(relays: list[Relay]) -> Callable[[list[Any], list[Any]], Any]:
    """A change of a deployment's documents that puts a relay of its own into every link."""

    def change(engines: list[Any], frontends: list[Any]) -> tuple[list[Any], list[Any]]:
        changed = []
        for frontend in frontends:
            addresses = []
            for address in frontend.engines:
                port = urlsplit(address.endpoint).port
                relays.append(Relay(("127.0.0.1", port)))
                addresses.append(
                    EngineAddress(endpoint=f"tcp://127.0.0.1:{relays[-1].port}", http=address.http)
                )
            changed.append(msgspec.structs.replace(frontend, engines=tuple(addresses)))
        return engines, changed

    return change
