"""Virtual time: an asyncio loop whose clock jumps to the next timer, and cores shared by tasks.

The product's coroutines run on it unchanged. Nothing may wait for a socket, a thread or a process.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Waiting takes no time: the clock is put where the loop wanted to wake up."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another: the simulated system stands still")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def _write_to_self(self) -> None:
        """Nobody else is there to be woken."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """`main` in virtual time, which `time.monotonic` tells, too, meanwhile."""
    loop = VirtualLoop()
    with patch.object(time, "monotonic", loop.time), asyncio.Runner(loop_factory=lambda: loop) as r:
        return r.run(main)


class Cores:
    """Processor sharing: `count` cores, divided equally among the tasks that want one each.

    Args:
        alone_speed: how many times faster a task is while it is the only one. Cores that are
            threads of one, or that share its memory, slow each other down; costs are counted as
            they are when all cores are busy.
    """

    def __init__(self, count: float = math.inf, alone_speed: float = 1.0) -> None:
        self._count, self._alone_speed = count, alone_speed
        self._done = 0.0  # seconds of work that each task has been given since the start
        self._at = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None
        self.used_seconds = 0.0

    async def work(self, seconds: float) -> None:
        """Returns when so much work is done."""
        if seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        self._serial += 1
        self.used_seconds += seconds
        end: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._ends, (self._done + seconds, self._serial, end))
        self._plan(loop)
        await end

    @property
    def _speed(self) -> float:
        """Of each task."""
        if len(self._ends) == 1:
            return max(self._alone_speed, 1.0)
        return min(1.0, self._count / max(len(self._ends), 1))

    def _advance(self, now: float) -> None:
        if self._ends:
            self._done += (now - self._at) * self._speed
        self._at = now

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left = max(self._ends[0][0] - self._done, 0.0)
            self._timer = loop.call_at(loop.time() + left / self._speed, self._finish)

    def _finish(self) -> None:
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        self._timer = None
        while self._ends and self._ends[0][0] <= self._done + 1e-9:
            _, _, end = heapq.heappop(self._ends)
            if not end.done():
                end.set_result(None)
        self._plan(loop)


class Thread:
    """Does one thing at a time, in order, on one of the cores."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._turn = asyncio.Lock()

    async def work(self, seconds: float) -> None:
        if seconds > 0:
            async with self._turn:
                await self._cores.work(seconds)
