"""Sharing, lazy freeing, eviction and the host tier of encoder outputs."""

from dataclasses import dataclass

import pytest

from foveal_runtime.engine.caches.encoder_cache import EncoderCacheManager
from foveal_runtime.engine.caches.host_tier import HostTier
from foveal_runtime.engine.process.assemble import LoadedEngine, scheduler_limits
from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FakeRunner
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig


@dataclass
class User:
    request_id: str
    mm_inputs: tuple
    mm_embeds: tuple


def user(request_id, *items):
    """items: (name, embeddings)."""
    inputs, at = [], 0
    for name, length in items:
        inputs.append(image(name, at, length)[0])
        at += length
    return User(request_id, tuple(inputs), tuple(length for _, length in items))


def key(name):
    return image(name, 0, 1)[0].mm_hash


def put(cache, *users):
    """Each user takes all its items and lets them go."""
    for entry in users:
        for index in range(len(entry.mm_inputs)):
            cache.allocate(entry, index)
        cache.free(entry)
    return cache.take_moves()


def test_an_output_is_shared_by_content_and_counted_once():
    cache = EncoderCacheManager(10)
    one, two = user("1", ("A", 6)), user("2", ("A", 6))
    assert cache.lookup(one.mm_inputs[0].mm_hash) != "device"
    assert cache.fits(one.mm_embeds[0])
    assert cache.allocate(one, 0) == ("absent", [])
    assert cache.lookup(two.mm_inputs[0].mm_hash) == "device"
    assert cache.allocate(two, 0) == ("device", [])
    assert cache.num_used_embeds == 6
    assert cache.get_cached_input_ids(two) == {0}
    cache.free(one)
    assert cache.num_used_embeds == 6
    cache.free(two)
    assert (cache.num_used_embeds, cache.num_idle_embeds, cache.num_free_embeds) == (0, 6, 4)
    cache.check_integrity([])
    assert (cache.queries, cache.hits) == ({0: 2}, {(0, "device"): 1})


def test_freeing_is_lazy_and_ids_are_reported_when_room_was_needed():
    cache = EncoderCacheManager(10)
    put(cache, user("1", ("A", 6)), user("2", ("B", 4)))
    assert cache.get_freed_ids() == []
    assert len(cache) == 2
    big = user("3", ("C", 5))
    assert cache.fits(big.mm_embeds[0])
    assert cache.allocate(big, 0) == ("absent", [key("A")])
    assert cache.get_freed_ids() == [key("A")]
    assert cache.get_freed_ids() == []
    cache.check_integrity([big])


def test_questions_change_nothing():
    cache = EncoderCacheManager(10)
    put(cache, user("1", ("A", 10)))
    big = user("2", ("B", 10))
    for _ in range(3):
        assert cache.fits(big.mm_embeds[0])
        assert cache.lookup(big.mm_inputs[0].mm_hash) != "device"
        assert cache.lookup(key("A")) == "device"
    assert cache.take_moves() == ([], [], [], [], [])
    assert len(cache) == 1


def test_reserve_evicts_the_longest_released_and_says_so():
    cache = EncoderCacheManager(12)
    a, b, c = (user(n, (n, 4)) for n in "ABC")
    put(cache, a, b, c)
    cache.allocate(a, 0)
    cache.free(a)  # a was released last now
    assert cache.reserve(5) == [key("B"), key("C")]
    assert cache.take_moves().free == [key("B"), key("C")]
    cache.check_integrity([])


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_what_is_held_is_never_evicted(eviction):
    cache = EncoderCacheManager(10, eviction=eviction)
    a, b = user("1", ("A", 6)), user("2", ("B", 4))
    put(cache, a, b)
    cache.allocate(a, 0)  # was the next to go, and is in use again
    assert not cache.fits(5)
    assert cache.fits(4)
    assert cache.reserve(4) == [key("B")]
    cache.check_integrity([a])


def test_a_reference_ends_with_the_last_occurrence():
    cache = EncoderCacheManager(10)
    twice = user("1", ("A", 4), ("A", 4))
    cache.allocate(twice, 0)
    cache.allocate(twice, 1)
    assert cache.num_used_embeds == 4
    cache.free_encoder_input(twice, 0)
    assert cache.num_used_embeds == 4
    cache.free_encoder_input(twice, 0)  # already freed: nothing happens
    assert cache.num_used_embeds == 4
    cache.free_encoder_input(twice, 1)
    assert cache.num_idle_embeds == 4
    cache.check_integrity([])


def test_evicted_and_wanted_again_in_one_pass_needs_no_encoding():
    cache = EncoderCacheManager(10)
    a, b = user("1", ("A", 6)), user("2", ("B", 6))
    put(cache, a)
    cache.allocate(b, 0)
    cache.free(b)
    assert cache.lookup(key("A")) == "reclaim"
    assert cache.allocate(a, 0) == ("reclaim", [key("B")])
    moves = cache.take_moves()
    assert moves == ([], [], [], [], []), "B never reached the runner, A never left it"
    cache.check_integrity([a])


def test_freed_ids_lack_those_allocated_again():
    cache = EncoderCacheManager(10)
    a, b = user("1", ("A", 5)), user("2", ("B", 5))
    put(cache, a, b)
    cache.reserve(10)
    cache.allocate(b, 0)
    assert cache.get_freed_ids() == [key("A")]


def test_by_cost_the_cheap_go_first_but_the_dear_do_not_stay_for_ever():
    cache = EncoderCacheManager(12, eviction="cost")
    dear, cheap = user("1", ("D", 4)), user("2", ("C", 4))
    for entry, seconds in ((dear, 4.0), (cheap, 0.4)):
        cache.allocate(entry, 0)
        cache.note_cost(entry.mm_inputs[0].mm_hash, seconds)
        cache.free(entry)
    assert cache.reserve(8) == [key("C")]
    cache.check_integrity([])
    for turn in range(40):
        other = user(f"u{turn}", (f"x{turn}", 8))
        cache.allocate(other, 0)
        cache.note_cost(other.mm_inputs[0].mm_hash, 0.8)
        cache.free(other)
        cache.check_integrity([])
        if cache.lookup(dear.mm_inputs[0].mm_hash) != "device":
            break
    assert cache.lookup(dear.mm_inputs[0].mm_hash) != "device"
    assert turn > 3


def test_the_host_tier_catches_what_is_evicted_and_gives_it_back():
    cache = EncoderCacheManager(8, host=HostTier(100, 2))
    a, b = user("1", ("A", 6)), user("2", ("B", 6))
    put(cache, a)
    moves = put(cache, b)
    assert (moves.store, moves.free, moves.encode) == ([key("A")], [key("A")], [key("B")])
    assert cache.lookup(key("A")) == "host"
    assert cache.allocate(a, 0) == ("host", [key("B")])
    moves = cache.take_moves()
    assert (moves.load, moves.encode, moves.store) == ([key("A")], [], [key("B")])
    assert cache.hits[0, "host"] == 1
    cache.check_integrity([a])


def test_the_host_tier_is_bounded_in_bytes_and_drops_the_oldest():
    cache = EncoderCacheManager(6, host=HostTier(24, 2))
    names = ("A", "B", "C", "D")
    moves = [put(cache, user(name, (name, 6))) for name in names]
    assert [entry.store for entry in moves] == [[], [key("A")], [key("B")], [key("C")]]
    assert [entry.drop_host for entry in moves] == [[], [], [], [key("A")]]
    assert cache.host.used_bytes == 24
    too_big = EncoderCacheManager(6, host=HostTier(10, 2))
    put(too_big, user("A", ("A", 6)))
    assert put(too_big, user("B", ("B", 6))).store == []


def test_a_host_copy_that_is_being_loaded_is_not_dropped():
    cache = EncoderCacheManager(6, host=HostTier(12, 2))
    a, b = user("1", ("A", 6)), user("2", ("B", 6))
    put(cache, a)
    put(cache, b)  # A in the host tier, which is full with it
    cache.allocate(a, 0)  # evicts B, which finds no room in the host tier
    moves = cache.take_moves()
    assert (moves.load, moves.store, moves.drop_host) == ([key("A")], [], [])
    cache.check_integrity([a])


def test_reset_frees_what_nobody_holds_in_both_tiers():
    cache = EncoderCacheManager(12, host=HostTier(100, 2))
    a, b, c = (user(n, (n, 6)) for n in "ABC")
    put(cache, a, b)
    cache.allocate(c, 0)
    cache.take_moves()
    assert cache.reset() == 1
    moves = cache.take_moves()
    assert (moves.free, moves.drop_host) == ([key("B")], [key("A")])
    assert cache.lookup(c.mm_inputs[0].mm_hash) == "device"
    cache.check_integrity([c])


class PricedRunner(FakeRunner):
    """Encoding takes as many seconds as the item's name says."""

    def execute(self, plan):
        result = super().execute(plan)
        result.encode_seconds = float(sum(int(e.value.split()[-1]) for e in plan.encode))
        return result


@pytest.mark.parametrize(("eviction", "kept"), [("lru", "125"), ("cost", "925")])
def test_the_policy_of_the_document_decides_who_stays(eviction, kept):
    """9 is dear and old, 1 and 2 are cheap and newer; 5 needs the place of one. Regression: an
    item consumed in the step that encodes it was ranked before its cost was known."""
    caches = EngineCaches() if eviction == "lru" else EngineCaches(encoder_eviction=eviction)
    config = EngineConfig(model=ModelConfig(path="/m"), caches=caches)
    loaded = LoadedEngine(
        runner=FakeRunner(num_blocks=64, block_size=4), num_blocks=64, max_model_len=100, largest={}
    )
    drive = Drive(
        encoder_cache_embeds=12,
        prefix_caching=False,
        encoder_eviction=scheduler_limits(config, loaded).encoder_eviction,
    )
    drive.runner = PricedRunner(num_blocks=65, block_size=4, encoder_cache_embeds=12)
    for name in "9125":
        drive.add(name, range(10, 17), [image(name, 0, 4)])
        drive.run()
    assert {name for name in "9125" if key(name) in drive.runner.device} == set(kept)
    drive.assert_done()


def test_a_discarded_output_is_found_by_nobody_and_goes_with_its_last_user():
    cache = EncoderCacheManager(20, host=HostTier(100, 1))
    held, idle = user("1", ("A", 5)), user("2", ("B", 5))
    for one in (held, idle):
        cache.allocate(one, 0)
    cache.free(idle)
    cache.take_moves()
    for one in (held, idle):
        cache.discard(one.mm_inputs[0].mm_hash)
    assert cache.lookup(idle.mm_inputs[0].mm_hash) == "absent"
    assert cache.take_moves().free == [idle.mm_inputs[0].mm_hash]
    cache.free(held)
    assert cache.lookup(held.mm_inputs[0].mm_hash) == "absent"
    assert cache.num_free_embeds == 20
    cache.check_integrity([])


def test_a_discarded_output_leaves_the_host_tier_too():
    cache = EncoderCacheManager(6, host=HostTier(100, 1))
    for name in "AB":
        put(cache, user(name, (name, 6)))
    assert cache.lookup(key("A")) == "host"
    cache.discard(key("A"))
    assert cache.lookup(key("A")) == "absent"
    assert cache.take_moves().drop_host == [key("A")]
    cache.check_integrity([])
