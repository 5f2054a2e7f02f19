"""Samples of series over time, bounded, as a Prometheus would keep them. Pure.

Filled by sources.py with one scrape at a time, read by evaluate.py.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
"""Sorted, without the name of the family."""

LOOKBACK_SECONDS = 300.0
"""How old the newest sample of a series may be for it to count as its value."""
MAX_SERIES = 50_000
MAX_SCRAPES = 600
_GONE = math.nan


class TooManySeriesError(ValueError):
    """An answer has more series than this program keeps."""


def labels_of(pairs: Mapping[str, str]) -> Labels:
    """Empty values are left out: to PromQL a label without value is no label."""
    return tuple(sorted((key, value) for key, value in pairs.items() if value))


class Line(msgspec.Struct, frozen=True):
    """One line of an answer: its labels, and (seconds since the epoch, value), oldest first."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    def newest(self, end: float) -> float:
        """The value at the page's last time; NaN when the line has ended before."""
        return self.points[-1][1] if self.points and self.points[-1][0] >= end else math.nan


class Series:
    """One series. A value of NaN at the end of its samples says that it is gone."""

    __slots__ = ("labels", "times", "values")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.times = array("d")
        self.values = array("d")

    def add(self, now: float, value: float) -> None:
        assert not self.times or now > self.times[-1], "scrapes are in order of time"
        self.times.append(now)
        self.values.append(value)

    def at(self, now: float) -> float | None:
        """The newest value that is not too old; None = the series is not there."""
        index = bisect_right(self.times, now) - 1
        if index < 0 or now - self.times[index] > LOOKBACK_SECONDS:
            return None
        value = self.values[index]
        return None if math.isnan(value) else value

    def within(self, after: float, until: float) -> list[tuple[float, float]]:
        """Samples in (after, until]."""
        first, last = bisect_right(self.times, after), bisect_right(self.times, until)
        found = zip(self.times[first:last], self.values[first:last], strict=True)
        return [(time, value) for time, value in found if not math.isnan(value)]

    def forget_before(self, time: float) -> None:
        index = bisect_right(self.times, time)
        del self.times[:index]
        del self.values[:index]


class Store:
    """All series of all targets by family name, for the last `max_scrapes` scrapes."""

    def __init__(self, max_scrapes: int = MAX_SCRAPES) -> None:
        self._families: dict[str, dict[Labels, Series]] = {}
        self._seen: set[tuple[str, Labels]] = set()
        self._max_scrapes = max_scrapes
        self._num_series = 0
        self.times: deque[float] = deque()

    def add(self, now: float, samples: Iterable[tuple[str, Labels, float]]) -> None:
        """One scrape of all targets. A series that was there before and is not now is gone; of two
        samples of one series the first counts.

        Raises:
            TooManySeriesError
        """
        self.times.append(now)
        found: set[tuple[str, Labels]] = set()
        for name, labels, value in samples:
            if (name, labels) not in found:
                found.add((name, labels))
                self._series(name, labels).add(now, value)
        for name, labels in self._seen - found:
            self._families[name][labels].add(now, _GONE)
        self._seen = found
        if len(self.times) > self._max_scrapes:
            self._forget(self.times.popleft())

    def _series(self, name: str, labels: Labels) -> Series:
        family = self._families.setdefault(name, {})
        found = family.get(labels)
        if found is None:
            if self._num_series >= MAX_SERIES:
                raise TooManySeriesError(f"more than {MAX_SERIES} series")
            found = family[labels] = Series(labels)
            self._num_series += 1
        return found

    def _forget(self, time: float) -> None:
        for family in self._families.values():
            for labels in list(family):
                family[labels].forget_before(time)
                if not family[labels].times:
                    del family[labels]
                    self._num_series -= 1

    def family(self, name: str) -> Iterator[Series]:
        yield from self._families.get(name, {}).values()


def parse(text: str, more: Mapping[str, str]) -> list[tuple[str, Labels, float]]:
    """Samples of an exposition in the text format; `more` are the target's labels, which give way
    to the series' own.

    Raises:
        ValueError: it is not in that format.
    """
    return [
        (sample.name, labels_of({**more, **sample.labels}), float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
