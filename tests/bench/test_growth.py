"""What the soak says of series whose growth is known."""

from __future__ import annotations

import math
import random

import pytest

from e2e.soak import growth

HOUR = 3600.0
BOOKS = {"urls": (16_384, 320), "routes": (8_192, 160)}


def times(hours: float = 2.0) -> list[float]:
    return [10.0 * i for i in range(int(hours * 360))]


def noisy(mib: float, rng: random.Random) -> float:
    """As allocators do it: steps of 128 KiB, and now and then a MiB that goes again."""
    spike = 1.0 if rng.random() < 0.02 else 0.0
    return math.floor((100 + mib + rng.uniform(-0.1, 0.1)) * 8) / 8 + spike


def entries(rate: float, bound: int) -> list[tuple[float, float]]:
    """A book that takes in `rate` entries an hour until it is full."""
    return [(at, min(bound, rate * at / HOUR)) for at in times()]


@pytest.mark.parametrize("leak", [2.0, 8.0])
@pytest.mark.parametrize("fill", [0.0, 6_000.0])
def test_a_leak_is_found_beside_books_that_fill(leak: float, fill: float) -> None:
    rng = random.Random(1)
    held = {"urls": entries(fill, 16_384), "routes": entries(2 * fill, 8_192)}
    memory = [
        (at, noisy(leak * at / HOUR + mib, rng))
        for (at, mib) in growth.bytes_of(held, BOOKS)
    ]  # fmt: skip
    found = growth.growth(memory, held, BOOKS, HOUR)
    assert found.unexplained == pytest.approx(leak, abs=0.5)
    assert found.unexplained > 1.0


@pytest.mark.parametrize("fill", [0.0, 3_000.0, 1_000_000.0])
def test_books_that_fill_are_no_leak(fill: float) -> None:
    rng = random.Random(2)
    held = {"urls": entries(fill, 16_384)}
    memory = [(at, noisy(mib, rng)) for at, mib in growth.bytes_of(held, BOOKS)]
    found = growth.growth(memory, held, BOOKS, HOUR)
    assert found.unexplained == pytest.approx(0.0, abs=0.5)
    assert growth.slope(growth.since(memory, HOUR)) == pytest.approx(found.books, abs=0.5)


def test_books_that_shrink_explain_no_growth() -> None:
    held = {"urls": [(at, 16_384 - at) for at in times()]}
    memory = [(at, 100 + 2 * at / HOUR) for at in times()]
    found = growth.growth(memory, held, BOOKS, 0.0)
    assert (found.books, found.unexplained) == (0.0, pytest.approx(2.0))


def test_a_process_without_books_and_a_short_run() -> None:
    memory = [(at, 100 + 3 * at / HOUR) for at in times()]
    assert growth.growth(memory, {}, {}, HOUR) == pytest.approx((3.0, 0.0))
    assert growth.growth(memory[:1], {}, {}, 0.0) == (0.0, 0.0)


def test_a_book_beyond_its_bound_is_named() -> None:
    held = {"urls": [(0.0, 16_384.0), (10.0, 16_385.0)], "routes": [(0.0, 1.0), (10.0, 8_192.0)]}
    assert growth.over_bound(held, BOOKS) == ["urls"]


def test_the_warm_up_waits_for_books_that_fill() -> None:
    early = {"urls": [(0.0, 0.0), (10.0, 0.0)], "routes": [(0.0, 0.0), (10.0, 8_192.0)]}
    assert growth.still_filling(early, BOOKS, 60.0) == ["urls"]
    late = {"urls": [(0.0, 0.0), (60.0, 0.0)], "routes": [(0.0, 0.0), (60.0, 600.0)]}
    assert growth.still_filling(late, BOOKS, 60.0) == ["routes"]
