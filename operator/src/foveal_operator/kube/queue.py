"""The work queue: each key once, one worker at a time per key, its own backoff after failures.

QueueCore is the bookkeeping, a pure value that is told the time; WorkQueue puts an event loop
around it. Fed by watches.py and the reconciler, drained by the workers of process/main.py.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from foveal_operator.common.clock import Clock
from foveal_operator.telemetry.series import Telemetry

K = TypeVar("K", bound=Hashable)

BASE_SECONDS = 0.5
MAX_SECONDS = 300.0
JITTER = 0.2


class QueueCore(Generic[K]):
    """What waits, what is due when, what is being worked on.

    A key that is added while it is worked on runs once more afterwards. Adding a key early never
    postpones it; a delayed key that is added plainly runs at once.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._ready: dict[K, float] = {}
        self._working: dict[K, float] = {}
        self._again: dict[K, float] = {}
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        """Keys that are due now, whether or not a worker is free."""
        return len(self._ready) + len(self._again)

    @property
    def num_working(self) -> int:
        return len(self._working)

    def add(self, key: K, now: float) -> bool:
        """Due now. False when it was waiting already."""
        self._due.pop(key, None)
        if key in self._working:
            fresh = key not in self._again
            self._again.setdefault(key, now)
            return fresh
        fresh = key not in self._ready
        self._ready.setdefault(key, now)
        return fresh

    def add_after(self, key: K, seconds: float, now: float) -> bool:
        """Due later, unless it is due earlier anyway. False when nothing changed."""
        if seconds <= 0:
            return self.add(key, now)
        if key in self._ready or key in self._again:
            return False
        due = now + seconds
        if self._due.get(key, float("inf")) <= due:
            return False
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        return True

    def advance(self, now: float) -> None:
        """Moves what has become due to the ready keys."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                self.add(key, due)

    def next_due(self) -> float | None:
        """When the earliest delayed key is due; None when there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> tuple[K, float] | None:
        """The key that has waited longest, and for how long; it counts as being worked on."""
        self.advance(now)
        if not self._ready:
            return None
        key = next(iter(self._ready))
        waited = now - self._ready.pop(key)
        self._working[key] = now
        return key, max(0.0, waited)

    def done(self, key: K, now: float) -> float:
        """The worker is finished with it. Returns for how long it was worked on."""
        started = self._working.pop(key)
        again = self._again.pop(key, None)
        if again is not None:
            self._due.pop(key, None)
            self._ready[key] = again
        return now - started

    def backoff_seconds(self, key: K) -> float:
        """The next delay after a failure; doubles each time, with up to 20 % added by chance."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        plain = min(MAX_SECONDS, BASE_SECONDS * float(2 ** min(failures, 30)))
        return plain * (1.0 + JITTER * self._random())

    def forget(self, key: K) -> None:
        """It went well: the next failure starts from the shortest delay."""
        self._failures.pop(key, None)

    def num_failures(self, key: K) -> int:
        return self._failures.get(key, 0)

    def oldest_start(self) -> float | None:
        """When the longest-running worker took its key."""
        return min(self._working.values(), default=None)

    def check_integrity(self) -> None:
        """No key waits twice, and whatever is to run again is being worked on now."""
        assert not self._ready.keys() & self._working.keys()
        assert self._again.keys() <= self._working.keys()
        assert not self._due.keys() & self._ready.keys()
        assert not self._due.keys() & self._again.keys()
        assert {(due, key) for key, due in self._due.items()} <= {(d, k) for d, _, k in self._heap}


class WorkQueue(Generic[K]):
    """QueueCore with waiting and metrics. For one event loop."""

    def __init__(self, name: str, clock: Clock, telemetry: Telemetry) -> None:
        self.name = name
        self.core: QueueCore[K] = QueueCore(clock.random)
        self._clock = clock
        self._telemetry = telemetry
        self._changed = asyncio.Event()
        self._is_closed = False

    def add(self, key: K) -> None:
        """Due now."""
        if self.core.add(key, self._clock.monotonic()):
            self._telemetry.count("workqueue_adds", name=self.name)
        self._wake()

    def add_after(self, key: K, seconds: float) -> None:
        """Due in so many seconds, unless it is due earlier."""
        if self.core.add_after(key, seconds, self._clock.monotonic()):
            self._telemetry.count("workqueue_adds", name=self.name)
        self._wake()

    def retry(self, key: K, at_least_seconds: float = 0.0) -> float:
        """Due after its own backoff. Returns the delay."""
        seconds = max(at_least_seconds, self.core.backoff_seconds(key))
        self._telemetry.count("workqueue_retries", name=self.name)
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: K) -> None:
        self.core.forget(key)

    async def take(self) -> K | None:
        """The next key, when there is one; None once the queue is closed."""
        while not self._is_closed:
            now = self._clock.monotonic()
            taken = self.core.take(now)
            if taken is not None:
                key, waited = taken
                self._telemetry.observe("workqueue_queue_duration_seconds", waited, name=self.name)
                self._gauge()
                return key
            self._changed.clear()
            due = self.core.next_due()
            if due is None:
                await self._changed.wait()
            else:
                await self._wait(max(0.0, due - now))
        return None

    def done(self, key: K) -> None:
        """Must follow every take, whatever came of it."""
        seconds = self.core.done(key, self._clock.monotonic())
        self._telemetry.observe("workqueue_work_duration_seconds", seconds, name=self.name)
        self._wake()

    def close(self) -> None:
        """No key is handed out any more; those being worked on are finished by their workers."""
        self._is_closed = True
        self._wake()

    def longest_running_seconds(self) -> float:
        started = self.core.oldest_start()
        return 0.0 if started is None else self._clock.monotonic() - started

    async def _wait(self, seconds: float) -> None:
        """Until something changes or the time is over."""
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({sleep, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            changed.cancel()

    def _wake(self) -> None:
        self._gauge()
        self._changed.set()

    def _gauge(self) -> None:
        self._telemetry.set("workqueue_depth", len(self.core), name=self.name)
