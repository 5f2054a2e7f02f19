"""What caches say beyond hits: age at eviction, what came back too late, how long it waited."""

import asyncio

import pytest

from foveal_runtime.engine.testing.drive import Drive, FakeClock, image
from foveal_runtime.frontend.common.stats import watch_loop
from foveal_runtime.frontend.engines.routing import Candidate, Router
from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.http.monitoring.request_stats import RequestStats
from foveal_runtime.frontend.items.processor_cache import ENTRY_BYTES, ProcessorCache
from foveal_runtime.mirror.store import Store, Value
from foveal_runtime.plan.metrics.metric import STAGE_BUCKETS
from foveal_runtime.telemetry.ages import EvictionAges
from foveal_runtime.telemetry.histogram import Histogram
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.startup import StartPhases, process_age_seconds
from foveal_runtime.wire.messages import FirstOutput


def key(number):
    return number.to_bytes(32, "big")


def test_a_histogram_counts_as_prometheus_does():
    """A bucket holds what is at most its bound."""
    seen = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 9.0):
        seen.observe(value)
    assert (seen.counts, seen.total) == ([1, 2, 1], 13.5)


def test_the_processor_cache_measures_from_the_last_use():
    clock = FakeClock()
    cache = ProcessorCache(2 * (10 + ENTRY_BYTES), clock=clock)
    cache.commit(key(1), bytes(10))
    clock.now += 5
    assert cache.get(key(1)) is not None
    cache.commit(key(2), bytes(10))
    clock.now += 7
    cache.commit(key(3), bytes(10))  # evicts 1, asked for 7 s ago
    assert cache.ages.seen.total == 7
    cache.release(key(2))
    cache.check_integrity()
    cache.reset()
    cache.check_integrity()
    assert sum(cache.ages.seen.counts) == 1


def test_the_value_pool_tells_who_watches_it():
    clock = FakeClock()
    store = Store(30)
    store.watch = ages = EvictionAges(clock)
    for number in (1, 2, 3):
        store.insert_idle(key(number), 10, Value(bytes(10)))
    store.pin(key(1))
    clock.now += 3
    store.unpin(key(1))
    clock.now += 4
    store.make_room(20)  # 2 and 3: 7 s old; 1 was used 4 s ago
    assert (sum(ages.seen.counts), ages.seen.total) == (2, 14)
    store.doom(30)
    store.make_room(30)  # out of limbo
    assert (sum(ages.seen.counts), ages.seen.total) == (3, 18)
    store.insert_idle(key(4), 10, Value(bytes(10)))
    store.reset()
    assert sum(ages.seen.counts) == 3
    assert len(ages) == 0


def test_a_doomed_value_leaves_without_an_age():
    store = Store(30)
    store.watch = ages = EvictionAges(FakeClock())
    store.insert_idle(key(1), 10, Value(bytes(10)))
    store.pin(key(1))
    store.reset()
    store.unpin(key(1))
    assert (sum(ages.seen.counts), len(ages)) == (0, 0)


def test_encoder_outputs_and_blocks_have_ages_and_what_comes_back_is_counted():
    drive = Drive(encoder_cache_embeds=16, num_blocks=8)
    for name in ("A", "B", "A"):  # 12 of 16 embeddings each: every one evicts the other
        drive.add(name + str(len(drive.requests)), range(20, 34), [image(name, 1, 12)])
        drive.run()
        drive.clock.now += 60
    encoder, pool = drive.scheduler.encoder, drive.scheduler.pool
    assert encoder.num_evictions == 2
    assert 100 < encoder.ages.seen.total < 140
    assert encoder.num_encoded_again == 1
    assert pool.num_evictions == sum(pool.ages.seen.counts) > 0
    assert pool.ages.seen.total > 30


def test_a_request_that_must_wait_for_the_encoder_says_how_long():
    drive = Drive(encoder_cache_embeds=16, max_num_batched_tokens=64)
    drive.add("one", range(20, 34), [image("A", 1, 12)], max_tokens=8)
    drive.add("two", range(20, 34), [image("B", 1, 12)], max_tokens=2)
    drive.run()
    waits = drive.scheduler.stats.observed.encoder_wait_seconds
    assert waits.counts[0] == 1
    assert sum(waits.counts) == 2
    assert waits.total > 0


def test_prefix_hits_are_told_apart_by_what_they_stand_for():
    drive = Drive()
    for name in ("one", "two"):
        drive.add(name, range(20, 40), [image("A", 2, 10)], max_tokens=1)
        drive.run()
    stats = drive.scheduler.stats
    assert stats.prefix_media_query_tokens == {0: 20}
    assert stats.prefix_media_hit_tokens == {0: 10}
    assert stats.num_prefix_hit_tokens > 10


def test_the_router_gives_its_reason():
    router = Router()
    held, idle = Candidate("a", 1, held_bytes=9), Candidate("b", 0)
    assert router.choose([held], []) == ("a", "only")
    assert router.choose([held, idle], []) == ("a", "held")
    assert router.choose([idle, Candidate("c", 1)], []) == ("b", "load")
    router.commit("c", [b"k"])
    assert router.choose([idle, Candidate("c", 1)], [b"k"]) == ("c", "remembered")
    assert router.choose([], []) is None


@pytest.mark.parametrize(
    ("items", "hits", "media"), [(0, 0, "text"), (2, 2, "hit"), (2, 1, "miss")]
)
def test_the_first_token_is_counted_by_what_became_of_the_media(items, hits, media):
    metrics = Metrics("frontend", model_name="m", process="f")
    stats = RequestStats(metrics, started=0.0, num_sequences=1, num_choices=1, max_tokens=[4],
                         clock=lambda: 3.0)  # fmt: skip
    stats.prepared()
    first = FirstOutput(10, 0, items, hits, 0, 0.0, 0.0)
    stats.add(0, Delta("a", num_tokens=1, first=first))
    text = metrics.exposition().decode()
    sums = {
        one.rpartition(" ")[2]
        for one in text.splitlines()
        if one.startswith("foveal_first_token_seconds_sum") and f'media="{media}"' in one
    }
    assert sums == {"3.0"}
    assert text.count("foveal_first_token_seconds_sum{") == 3, "the others begin at zero"


def test_phases_of_a_start_add_up():
    clock = FakeClock()
    phases = StartPhases(age_seconds=lambda: 0.75, clock=clock)
    clock.now += 0.25
    phases.done("imports")
    clock.now += 2
    phases.done("load")
    assert phases.seconds == {"imports": 1.0, "load": 2.0}
    metrics = Metrics("engine", model_name="m", process="e", engine="e")
    metrics.add_source(phases.collect)
    assert b'phase="load",process="e"} 2.0' in metrics.exposition()


def test_an_engine_that_loads_tells_its_version():
    """Engines never did, though the family is declared for them: boards offered no engine's pod."""
    metrics = Metrics("engine", model_name="m", process="e", engine="e")
    metrics.add_source(StartPhases().collect)
    assert b'foveal_build_info{model_name="m",process="e",version="' in metrics.exposition()


def test_this_process_has_an_age():
    assert 0 < process_age_seconds() < 24 * 3600


async def test_a_late_loop_is_seen():
    now = iter([0.0, 1.5, 1.5, 1.6])
    lags = Histogram(STAGE_BUCKETS)
    with pytest.raises((StopIteration, RuntimeError)):
        await asyncio.wait_for(watch_loop(lags, interval_seconds=0, clock=lambda: next(now)), 10)
    assert lags.total == pytest.approx(1.6)
