"""Estimated hit ratios against exact LRUs of those sizes on the same trace."""

import random
from collections import OrderedDict

import pytest
from blake3 import blake3

from foveal_runtime.telemetry.ghosts import FACTORS, GhostLists

SEED = 7


def zipf(num_keys, alpha, num_queries, rng):
    weights = [1 / (rank + 1) ** alpha for rank in range(num_keys)]
    return rng.choices(range(num_keys), weights, k=num_queries)


def exact(trace, sizes, capacity):
    """Hit ratio of an LRU of that capacity."""
    held, used, hits = OrderedDict(), 0, 0
    for key in trace:
        if key in held:
            hits += 1
            held.move_to_end(key)
            continue
        if sizes[key] > capacity:
            continue
        held[key] = sizes[key]
        used += sizes[key]
        while used > capacity:
            used -= held.popitem(last=False)[1]
    return hits / len(trace)


def key_of(number):
    return blake3(str(number).encode()).digest()


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.2])
@pytest.mark.parametrize("max_entries", [1 << 20, 1024], ids=["all keys", "sampled"])
@pytest.mark.parametrize("fixed", [True, False], ids=["one size", "sizes"])
def test_equals_an_exact_simulation(alpha, max_entries, fixed):
    print("seed", SEED)
    rng = random.Random(SEED)
    num_keys = 12_000
    sizes = [100 if fixed else rng.choice([20, 60, 100, 220]) for _ in range(num_keys)]
    trace = zipf(num_keys, alpha, 40_000, rng)
    capacity = 1000 * 100
    ghosts = GhostLists(capacity, max_entries=max_entries, window=1 << 20)
    keys = [key_of(number) for number in range(num_keys)]
    for number in trace:
        ghosts.query(keys[number], sizes[number])
    ghosts.check_integrity()
    for factor, ratio in ghosts.ratios().items():
        truth = exact(trace, sizes, capacity * factor)
        allowed = 1e-9 if max_entries > num_keys else 0.04
        assert abs(ratio - truth) <= allowed, (factor, ratio, truth)


def test_more_room_is_never_estimated_worse_and_one_is_the_present():
    rng = random.Random(SEED)
    ghosts = GhostLists(300, window=1 << 20)
    trace = zipf(2000, 0.9, 20_000, rng)
    for number in trace:
        ghosts.query(key_of(number), 1)
    ratios = ghosts.ratios()
    assert [ratios[factor] for factor in FACTORS] == sorted(ratios.values())
    assert ratios[1.0] == pytest.approx(exact(trace, [1] * 2000, 300))
    assert ratios[4.0] > ratios[0.5] + 0.1


def test_a_miss_enters_when_the_cache_takes_it():
    """The processor cache: what an engine's mirror knows is never processed here."""
    ghosts = GhostLists(10)
    ghosts.query(key_of(1))
    ghosts.query(key_of(1))
    assert set(ghosts.ratios().values()) == {0.0}
    ghosts.insert(key_of(1), 8)
    ghosts.query(key_of(1), 8)
    assert ghosts.ratios() == {0.5: 0.0, 1.0: 1 / 3, 2.0: 1 / 3, 4.0: 1 / 3}


def test_the_recent_past_counts():
    ghosts = GhostLists(100, window=1000)
    for _ in range(5000):
        ghosts.query(key_of("hot"), 1)
    assert ghosts.ratios()[1.0] > 0.99
    for number in range(3000):
        ghosts.query(key_of(number), 1)
    assert ghosts.ratios()[4.0] < 0.1
    ghosts.check_integrity()


def test_off_resized_and_reset():
    off = GhostLists(0)
    off.query(key_of(1), 1)
    assert off.ratios() == {}
    ghosts = GhostLists(4)
    for number in range(8):
        ghosts.query(key_of(number), 1)
    ghosts.resize(1)
    ghosts.check_integrity()
    ghosts.query(key_of(7), 1)
    assert ghosts.ratios()[1.0] == pytest.approx(1 / 9)
    ghosts.reset()
    ghosts.query(key_of(7), 1)
    assert ghosts.ratios()[1.0] == pytest.approx(1 / 10)
