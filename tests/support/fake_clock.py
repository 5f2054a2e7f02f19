"""Time under the test's control: sleepers wake in order when the test says that time passes."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from datetime import UTC, datetime, timedelta

from foveal_operator.common.clock import Clock

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeTime:
    """`clock` is what the code under test gets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._count = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self.clock = Clock(
            monotonic=lambda: self.now,
            wall=lambda: START + timedelta(seconds=self.now - 1000.0),
            sleep=self._sleep,
            random=lambda: 0.5,
        )

    async def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._count), future))
        await future

    async def settle(self) -> None:
        """Lets everything run that can run without time passing."""
        for _ in range(40):
            await asyncio.sleep(0)

    async def pass_(self, seconds: float) -> None:
        """Time passes; whoever sleeps wakes at his own moment."""
        end = self.now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, future = heapq.heappop(self._sleepers)
            self.now = max(self.now, due)
            if not future.done():
                future.set_result(None)
                await self.settle()
        self.now = end
        await self.settle()

    def freeze(self, seconds: float) -> None:
        """The process stands still (SIGSTOP) while time passes: nobody wakes meanwhile."""
        self.now += seconds
