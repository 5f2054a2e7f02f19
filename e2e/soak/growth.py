"""How much of a process's growth its books explain: arithmetic on series of samples.

Used by leak. A book is what a process remembers besides its caches (the plan's FRONTEND_BOOKS and
ENGINE_BOOKS): so many entries at most, so many bytes each. What grows beyond the books that fill
is a leak. Times are seconds, memory is MiB.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MIB = 1024**2
Samples = Sequence[tuple[float, float]]
Books = Mapping[str, tuple[int, int]]
"""Most entries and bytes of each, by name."""


class Growth(NamedTuple):
    """MiB an hour: all of it, what filling books explain at most, and the rest."""

    total: float
    books: float

    @property
    def unexplained(self) -> float:
        return self.total - self.books


def slope(samples: Samples) -> float:
    """Units an hour by Theil and Sen: steps and outliers do not bend it. 0 for too few samples."""
    apart = max(1, len(samples) // 4)
    pairs = [
        (b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(samples) for b in samples[i + apart :]
    ]
    return statistics.median(pairs) * 3600 if pairs else 0.0


def since(samples: Samples, start: float) -> Samples:
    """The samples from `start` on."""
    return [sample for sample in samples if sample[0] >= start]


def bytes_of(entries: Mapping[str, Samples], books: Books) -> Samples:
    """MiB of all books together at each time; each book has a sample of every time."""
    each = [[(at, held * books[name][1] / MIB) for at, held in entries[name]] for name in entries]
    return [(rows[0][0], sum(held for _, held in rows)) for rows in zip(*each, strict=True)]


def growth(memory: Samples, entries: Mapping[str, Samples], books: Books, start: float) -> Growth:
    """Of the samples from `start` on. `entries`: of each book, none for a process without any."""
    return Growth(
        slope(since(memory, start)), max(0.0, slope(since(bytes_of(entries, books), start)))
    )


def over_bound(entries: Mapping[str, Samples], books: Books) -> list[str]:
    """Books that held more than the plan says."""
    return [name for name, held in entries.items() if max(v for _, v in held) > books[name][0]]


def still_filling(entries: Mapping[str, Samples], books: Books, seconds: float) -> list[str]:
    """Books that are not full and grew by more than 1 % of their bound in the last `seconds`; all
    of them before that much time has passed."""
    found = []
    for name, held in entries.items():
        bound = books[name][0]
        now, last = held[-1]
        before = [value for at, value in held if at <= now - seconds]
        is_full = last >= 0.99 * bound
        if not is_full and (not before or last - before[-1] > 0.01 * bound):
            found.append(name)
    return found
