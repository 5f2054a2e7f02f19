"""The mathematics of PromQL's functions, with Prometheus' answers. Pure.

Used by evaluate.py. A test asks a real Prometheus the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Samples = Sequence[tuple[float, float]]
"""(seconds, value), oldest first."""


def increase(samples: Samples, start: float, end: float) -> float | None:
    """How much a counter grew in [start, end]; None with fewer than two samples.

    A value below the one before it means that the process began anew at zero. What lies between
    the window's ends and the outer samples is extrapolated: by at most half the mean distance of
    samples where they are far from an end, and never to below zero.
    """
    if len(samples) < 2:
        return None
    (first_time, first), (last_time, last) = samples[0], samples[-1]
    grown, before = last - first, first
    for _, value in samples[1:]:
        if value < before:
            grown += before
        before = value
    sampled = last_time - first_time
    mean_gap = sampled / (len(samples) - 1)
    to_start, to_end = first_time - start, end - last_time
    if to_start >= mean_gap * 1.1:
        to_start = mean_gap / 2
    if grown > 0 and first >= 0:
        to_start = min(to_start, sampled * (first / grown))
    if to_end >= mean_gap * 1.1:
        to_end = mean_gap / 2
    return grown * (sampled + to_start + to_end) / sampled


def rate(samples: Samples, start: float, end: float) -> float | None:
    """The increase per second of the window."""
    grown = increase(samples, start, end)
    return None if grown is None else grown / (end - start)


def deriv(samples: Samples, start: float, end: float) -> float | None:
    """The slope of the line of least squares, per second."""
    if len(samples) < 2:
        return None
    origin = samples[0][0]
    count = len(samples)
    sum_x = math.fsum(time - origin for time, _ in samples)
    sum_y = math.fsum(value for _, value in samples)
    sum_xy = math.fsum((time - origin) * value for time, value in samples)
    sum_xx = math.fsum((time - origin) ** 2 for time, _ in samples)
    return (sum_xy - sum_x * sum_y / count) / (sum_xx - sum_x * sum_x / count)


def histogram_quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float:
    """`buckets`: (upper bound, cumulative count or rate), in any order; the last bound must be
    +Inf. Linear inside a bucket; the highest finite bound when the quantile lies above it."""
    if math.isnan(q) or q < 0:
        return math.nan if math.isnan(q) else -math.inf
    if q > 1:
        return math.inf
    merged: dict[float, float] = {}
    for bound, count in buckets:
        merged[bound] = merged.get(bound, 0.0) + count
    bounds = sorted(merged)
    if len(bounds) < 2 or bounds[-1] != math.inf:
        return math.nan
    counts: list[float] = []
    for bound in bounds:  # rates of single buckets may be slightly out of step
        counts.append(max(merged[bound], counts[-1] if counts else merged[bound]))
    if counts[-1] == 0 or math.isnan(counts[-1]):
        return math.nan
    rank = q * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= rank or i == len(counts) - 1)
    if index == len(bounds) - 1:
        return bounds[-2]
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    low, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    inside = counts[index] - below
    return low + (bounds[index] - low) * ((rank - below) / inside) if inside else bounds[index]


def divide(top: float, bottom: float) -> float:
    """As floating point has it: no error at zero."""
    if bottom == 0:
        return math.nan if top == 0 or math.isnan(top) else math.copysign(math.inf, top)
    return top / bottom
