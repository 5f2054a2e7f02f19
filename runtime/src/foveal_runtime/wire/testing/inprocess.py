"""A transport without sockets, for tests and simulation: same seam, faults at the test's will.

`InProcessHub` is an engine's side, `hub.connect(...)` a frontend's link to it. Both may live in one
thread or in two. Messages keep their order; a test may hold, drop or cut them (`link.faults`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foveal_runtime.mirror.store import Buffer
from foveal_runtime.wire.transport import ByteCounters, Frames, LinkDown


def _copy(frames: Sequence[Buffer]) -> Frames:
    """Read-only views: a reader must not be able to change the writer's buffers."""
    return [memoryview(frame).toreadonly() for frame in frames]


@dataclass(slots=True)
class Faults:
    """What goes wrong on a link. `drop_up`/`drop_down` see each message and say whether it is
    lost; while `hold_up`/`hold_down` is set, messages wait (in order) until `release()`."""

    drop_up: Callable[[Frames], bool] | None = None
    drop_down: Callable[[Frames], bool] | None = None
    hold_up: bool = False
    hold_down: bool = False


class InProcessLink:
    """`wire.transport.FrontendTransport` towards one hub."""

    def __init__(self, hub: InProcessHub, frontend_id: str) -> None:
        self.counters = ByteCounters()
        self.faults = Faults()
        self.frontend_id = frontend_id
        self._hub = hub
        self._held_up: deque[Frames] = deque()
        self._held_down: deque[Frames] = deque()
        self._received: deque[Frames] = deque()
        self._break = ""
        self._is_closed = False
        self._is_cut = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # ---- the frontend's side -------------------------------------------------------------------
    async def connected(self) -> None:
        await self._wait(lambda: self._is_closed or not self._is_cut)
        if self._is_closed:
            raise LinkDown("closed")

    def send(self, frames: Sequence[Buffer]) -> None:
        with self._hub.lock:
            if self._is_closed or self._is_cut:
                raise LinkDown("closed" if self._is_closed else "disconnected")
            self.counters.count_sent(frames)
            copied = _copy(frames)
            if self.faults.drop_up is not None and self.faults.drop_up(copied):
                return
            if self.faults.hold_up:
                self._held_up.append(copied)
            else:
                self._hub.take_in(self.frontend_id, copied)

    async def recv(self) -> Frames:
        await self._wait(lambda: bool(self._received or self._break))
        frames = self.try_recv()
        assert frames is not None
        return frames

    def try_recv(self) -> Frames | None:
        """The next message, or None; for tests without a loop. Raises LinkDown."""
        with self._hub.lock:
            if self._received:
                frames = self._received.popleft()
                self.counters.count_received(frames)
                return frames
            if self._break:
                reason, self._break = self._break, ""
                raise LinkDown(reason)
            return None

    def close(self) -> None:
        with self._hub.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._hub.forget(self.frontend_id, self)
            self._end("closed")

    # ---- the test's side -----------------------------------------------------------------------
    def cut(self, *, lose_held: bool = True) -> None:
        """Breaks the connection; sends fail until `heal`."""
        with self._hub.lock:
            self._is_cut = True
            if lose_held:
                self._held_up.clear()
                self._held_down.clear()
            self._end("disconnected")

    def heal(self) -> None:
        with self._hub.lock:
            self._is_cut = False
            self._notify()

    def release(self) -> None:
        """Stops holding; what was held goes its way in order."""
        with self._hub.lock:
            self.faults.hold_up = self.faults.hold_down = False
            while self._held_up:
                self._hub.take_in(self.frontend_id, self._held_up.popleft())
            while self._held_down:
                self._received.append(self._held_down.popleft())
            self._notify()

    # ---- the hub's side (lock held) ------------------------------------------------------------
    def deliver(self, frames: Frames) -> bool:
        """False: nobody is there."""
        if self._is_cut or self._is_closed:
            return False
        if self.faults.drop_down is not None and self.faults.drop_down(frames):
            return True
        if self.faults.hold_down:
            self._held_down.append(frames)
        else:
            self._received.append(frames)
            self._notify()
        return True

    def hub_closed(self) -> None:
        self._is_cut = True
        self._end("disconnected")

    # ---- internals -----------------------------------------------------------------------------
    def _end(self, reason: str) -> None:
        self._received.clear()
        self._break = reason
        self._notify()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        while True:
            with self._hub.lock:
                if condition():
                    return
                event = asyncio.Event()
                self._waiters.append((asyncio.get_running_loop(), event))
            await event.wait()


class InProcessHub:
    """`wire.transport.EngineTransport` of one engine."""

    endpoint = "inprocess"

    def __init__(self) -> None:
        self.counters = ByteCounters()
        self.lock = threading.RLock()
        self._news = threading.Condition(self.lock)
        self._links: dict[str, InProcessLink] = {}
        self._inbox: deque[tuple[str, Frames]] = deque()
        self._is_woken = False

    def connect(self, frontend_id: str) -> InProcessLink:
        """A new link; one of the same name is replaced, as a restarted frontend replaces its
        old connection."""
        with self.lock:
            former = self._links.pop(frontend_id, None)
            if former is not None:
                former.hub_closed()
            link = self._links[frontend_id] = InProcessLink(self, frontend_id)
            return link

    def poll(self, timeout_seconds: float) -> list[tuple[str, Frames]]:
        with self._news:
            self._news.wait_for(lambda: self._inbox or self._is_woken, timeout_seconds)
            self._is_woken = False
            received, self._inbox = list(self._inbox), deque()
            for _, frames in received:
                self.counters.count_received(frames)
            return received

    def send(self, frontend_id: str, frames: Sequence[Buffer]) -> None:
        with self.lock:
            link = self._links.get(frontend_id)
            if link is None or not link.deliver(_copy(frames)):
                raise LinkDown("unreachable")
            self.counters.count_sent(frames)

    def wake(self) -> None:
        with self._news:
            self._is_woken = True
            self._news.notify_all()

    def close(self) -> None:
        with self.lock:
            for link in self._links.values():
                link.hub_closed()
            self._links.clear()
            self._inbox.clear()

    # ---- the links' side (lock held) -----------------------------------------------------------
    def take_in(self, frontend_id: str, frames: Frames) -> None:
        self._inbox.append((frontend_id, frames))
        self._news.notify_all()

    def forget(self, frontend_id: str, link: InProcessLink) -> None:
        if self._links.get(frontend_id) is link:
            del self._links[frontend_id]
