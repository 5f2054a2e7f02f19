"""A TCP relay that can be cut: the link between a frontend and an engine, in the test's hands."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Relay:
    """Forwards 127.0.0.1:`port` to `target`; `cut()` drops every open connection at once."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.cut_wanted = threading.Event()
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
            self.selector.register(one, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        if end not in self.pairs:
            return
        try:
            data = end.recv(1 << 18)
            if not data:
                raise ConnectionResetError
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
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(one)
            with contextlib.suppress(OSError):
                one.close()
