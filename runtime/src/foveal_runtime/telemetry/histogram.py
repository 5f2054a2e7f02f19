"""A histogram as plain numbers, for packages that count without a metric library.

Written on hot paths; `Metrics.set_histogram` copies it into the declared series at scrape time.
"""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """`counts[i]` observations of at most `bounds[i]` (the last one is +Inf); `total` their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> int:
        """Returns the index of the bucket that counted it."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        return bucket
