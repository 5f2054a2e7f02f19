"""Percentiles of one run, and ratios of paired runs with their spread.

Pure arithmetic. A ratio is always taken within a pair (the same trace and seed, one run right after
the other), and its spread is that of the pairs: machines drift, pairs drift together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours, as most tools do; nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Spread(NamedTuple):
    """The middle of some values and how far they lie apart."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no values."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        if self.num == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Spread of ours / theirs, pair by pair. Pairs without two values, or with nothing to
    divide by, are left out."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0 and a == a]
    return Spread.of(pairs)
