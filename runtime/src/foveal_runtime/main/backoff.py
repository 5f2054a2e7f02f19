"""Growing pauses between the starts of one process that dies."""

from __future__ import annotations

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
