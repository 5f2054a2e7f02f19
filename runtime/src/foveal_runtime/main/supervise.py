"""Common parts of parent processes: signals that ask them to end, and pauses between starts."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts them from `listening` on.

    A handler runs in the main thread, between any two of its instructions: also inside a wait.
    The queue may be entered again there; an Event may not, and would wait for itself.

    Args:
        repeated: called in the handler at the second signal and each one after it. It must not
            take a lock.
    """

    def __init__(self, repeated: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self._repeated = repeated
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._arrived.put(number)
        if self.count > 1:
            self._repeated()

    def wait(self, seconds: float) -> None:
        """Returns early at the next signal, at once for one that no wait has seen."""
        with contextlib.suppress(queue.Empty):
            self._arrived.get(timeout=seconds)

    @contextmanager
    def listening(self) -> Iterator[StopSignals]:
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


MIN_SECONDS, MAX_SECONDS = 0.5, 30.0
STEADY_SECONDS = 60.0
"""A process that lived so long starts again after the shortest pause."""


class Backoff:
    """`deaths`: in a row, none of them after a steady life."""

    def __init__(self) -> None:
        self.deaths = 0

    def after(self, lived_seconds: float) -> float:
        """The pause before the next start of a process that died after `lived_seconds`."""
        self.deaths = 1 if lived_seconds > STEADY_SECONDS else self.deaths + 1
        return float(min(MIN_SECONDS * 2.0 ** min(self.deaths - 1, 10), MAX_SECONDS))
