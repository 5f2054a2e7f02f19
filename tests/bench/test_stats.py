"""Percentiles, paired ratios and the order of runs."""

import math

import pytest

from foveal_runtime.bench.runs import BenchLoad, schedule, split_kind
from foveal_runtime.bench.stats import Spread, paired_ratio, percentile


def test_percentiles_lie_between_neighbours():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(range(101), 99) == 99
    assert percentile([5], 90) == 5
    assert math.isnan(percentile([], 50))


def test_a_ratio_is_taken_within_pairs():
    """The machine became four times slower after the first round: the ratio did not change."""
    assert paired_ratio([8, 2], [4, 1]) == Spread(2, 2, 2, 2)


def test_a_ratio_shows_its_spread():
    spread = paired_ratio([1, 2, 6], [1, 1, 2])
    assert spread == Spread(2, 1, 3, 3)
    assert str(spread) == "2.00 (1.00 to 3.00)"


def test_pairs_without_a_divisor_are_left_out():
    assert paired_ratio([1, 2], [0, 2]) == Spread(1, 1, 1, 1)
    assert paired_ratio([1], [0]) is None


def test_unequal_numbers_of_runs_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1, 2], [1])


def test_runs_alternate():
    """Every trace is run on every server before the next trace, in turned order every round."""
    steps = schedule(["a", "b"], 2, 3, seed=10)
    assert [s.server for s in steps] == [0, 1, 2] * 2 + [2, 1, 0] * 2
    assert [s.kind for s in steps[:6]] == ["a"] * 3 + ["b"] * 3
    assert {(s.round, s.seed) for s in steps} == {(0, 10), (1, 11)}


def test_a_trace_with_its_own_concurrency_is_a_stranger_to_the_others():
    load = BenchLoad(("text", "text@32"), num_requests=10)
    plain, wide = load.trace("text", 1), load.trace("text@32", 1)
    assert (plain.name, wide.name) == ("text", "text@32")
    assert (plain.num_requests, wide.num_requests) == (10, 64)
    texts = [{turn.text for turns in t.conversations for turn in turns} for t in (plain, wide)]
    assert not texts[0] & texts[1]
    usual = BenchLoad(("text@64",), num_requests=0).trace("text@64", 1)
    assert usual.num_requests == 128


@pytest.mark.parametrize("kind", ["text@0", "text@-1", "text@many"])
def test_a_concurrency_that_is_none_is_refused(kind):
    with pytest.raises(ValueError, match=r"concurrency|invalid literal"):
        split_kind(kind)
