"""Answers expressions of observability/boards from a Store, as Prometheus answers them. Pure.

Used by sources.py. A test compares every panel's answers with a real Prometheus'.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from foveal_operator.cli.dashboard.promql.samples import Labels, Line, Series, Store, labels_of
from foveal_operator.cli.dashboard.promql.tree import (
    Aggregate,
    Binary,
    ExpressionError,
    Number,
    Quantile,
    Ranged,
    Relabel,
    Selector,
    Time,
    Tree,
    Vector,
    parse_expression,
)

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


Values = dict[Labels, float]
Answer = float | Values
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": divide,
}  # fmt: skip
_COMPARISON: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_RANGED = {
    "rate": rate, "increase": increase, "deriv": deriv,
}  # fmt: skip


@lru_cache(maxsize=512)
def _parsed(expr: str) -> Tree:
    return parse_expression(expr)


def ask(store: Store, expr: str, times: Sequence[float]) -> list[Line]:
    """One line for each series of the answer, over these times.

    Raises:
        ExpressionError: the expression is not in the known part of PromQL.
    """
    tree = _parsed(expr)
    lines: dict[Labels, list[tuple[float, float]]] = {}
    for time in times:
        answer = _at(store, tree, time)
        values = {(): answer} if isinstance(answer, float) else answer
        for labels, value in values.items():
            lines.setdefault(labels, []).append((time, value))
    return [Line(dict(labels), tuple(points)) for labels, points in sorted(lines.items())]


def _at(store: Store, tree: Tree, now: float) -> Answer:
    match tree:
        case Number(value):
            return value
        case Time():
            return now
        case Vector(of):
            inner = _at(store, of, now)
            if not isinstance(inner, float):
                raise ExpressionError("vector() takes a number")
            return {(): inner}
        case Selector():
            if tree.window_seconds:
                raise ExpressionError(f"{tree.name}[...] needs a function around it")
            found = ((series.labels, series.at(now)) for series in _select(store, tree))
            return {labels: value for labels, value in found if value is not None}
        case Ranged(function, of):
            return _ranged(store, function, of, now)
        case Quantile(q, of):
            return _quantile(q, _vector(_at(store, of, now)))
        case Aggregate(how, by, of):
            return _aggregate(how, by, _vector(_at(store, of, now)))
        case Relabel(of):
            return _relabel(tree, _vector(_at(store, of, now)))
        case Binary("and", left, right, on):
            return _and(on, _vector(_at(store, left, now)), _vector(_at(store, right, now)))
        case Binary(sign, left, right):
            return _binary(sign, _at(store, left, now), _at(store, right, now))


def _vector(answer: Answer) -> Values:
    if isinstance(answer, float):
        raise ExpressionError("a number where series are wanted")
    return answer


def _select(store: Store, selector: Selector) -> Iterable[Series]:
    for series in store.family(selector.name):
        labels = dict(series.labels)
        if all(one.accepts(labels.get(one.label, "")) for one in selector.matchers):
            yield series


def _ranged(store: Store, function: str, of: Selector, now: float) -> Values:
    start = now - of.window_seconds
    found = {
        series.labels: _RANGED[function](series.within(start, now), start, now)
        for series in _select(store, of)
    }
    return {labels: value for labels, value in found.items() if value is not None}


def _quantile(q: float, buckets: Values) -> Values:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        bound = dict(labels).get("le")
        if bound is not None:
            rest = tuple(pair for pair in labels if pair[0] != "le")
            groups.setdefault(rest, []).append((float(bound.replace("Inf", "inf")), value))
    return {rest: histogram_quantile(q, found) for rest, found in groups.items()}


def _relabel(tree: Relabel, values: Values) -> Values:
    found: Values = {}
    for labels, value in values.items():
        names = dict(labels)
        match = re.fullmatch(tree.pattern, names.get(tree.source, ""))
        if match:
            names[tree.label] = match[1]
        found[labels_of(names)] = value
    if len(found) < len(values):
        raise ExpressionError("label_replace() gives several series the same labels")
    return found


def _and(on: tuple[str, ...], left: Values, right: Values) -> Values:
    """Series of the left that the right has with the same values of these labels."""

    def key(labels: Labels) -> Labels:
        return tuple(pair for pair in labels if pair[0] in on)

    known = set(map(key, right))
    return {labels: value for labels, value in left.items() if key(labels) in known}


def _aggregate(how: str, by: tuple[str, ...], values: Values) -> Values:
    groups: dict[Labels, list[float]] = {}
    for labels, value in values.items():
        kept = tuple(pair for pair in labels if pair[0] in by)
        groups.setdefault(kept, []).append(value)
    return {labels: _AGGREGATIONS[how](found) for labels, found in groups.items()}


def _largest(values: list[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _smallest(values: list[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": _largest,
    "min": _smallest,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
}


def _binary(sign: str, left: Answer, right: Answer) -> Answer:
    """Series meet the one with exactly their labels; a comparison keeps the left where it holds."""
    if sign == "or":
        return {**_vector(right), **_vector(left)}
    if isinstance(left, float) and isinstance(right, float):
        if sign in _COMPARISON:
            raise ExpressionError("two numbers are not compared")
        return _ARITHMETIC[sign](left, right)
    if isinstance(left, float):
        pairs = {labels: (left, value) for labels, value in _vector(right).items()}
    elif isinstance(right, float):
        pairs = {labels: (value, right) for labels, value in left.items()}
    else:
        pairs = {labels: (value, right[labels]) for labels, value in left.items()
                 if labels in right}  # fmt: skip
    if sign in _ARITHMETIC:
        return {labels: _ARITHMETIC[sign](*pair) for labels, pair in pairs.items()}
    kept = 1 if isinstance(left, float) else 0
    return {labels: pair[kept] for labels, pair in pairs.items() if _COMPARISON[sign](*pair)}
