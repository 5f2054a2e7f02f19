"""Single flight, the processor cache, placeholder matching, stages."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from foveal_runtime.frontend.common.single_flight import SingleFlight
from foveal_runtime.frontend.common.stats import StageTimes
from foveal_runtime.frontend.engines.routing import (
    Candidate,
    Router,
    affinity_keys,
    estimate_load,
    load_bound,
)
from foveal_runtime.frontend.items.placement import complete_prompt, match_placeholders
from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.items.processor_cache import ENTRY_BYTES, ProcessorCache
from foveal_runtime.frontend.media.protocol import PlaceholderInfo, ProcessorInfo
from foveal_runtime.plan.errors import InvalidRequest, MediaInvalid
from foveal_runtime.plan.metrics.metric import STAGE_BUCKETS
from foveal_runtime.plan.sampling import SamplingParams


# ---- single flight ----
class Work:
    def __init__(self) -> None:
        self.starts = 0
        self.cancels = 0
        self.gate = asyncio.Event()
        self.death = asyncio.Event()
        self.death.set()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.starts += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancels += 1
            await self.death.wait()
            raise
        if self.error is not None:
            raise self.error
        return "done"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_is_done_once_and_shared():
    flights, work = SingleFlight(), Work()
    tasks = [asyncio.create_task(flights.run("k", work)) for _ in range(4)]
    await settle()
    work.gate.set()
    assert await asyncio.gather(*tasks) == ["done"] * 4
    assert work.starts == 1
    assert flights.joins == 3
    assert len(flights) == 0


async def test_a_cancelled_caller_does_not_cancel_the_others():
    flights, work = SingleFlight(), Work()
    first, second = (asyncio.create_task(flights.run("k", work)) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    work.gate.set()
    assert await second == "done"
    assert work.cancels == 0


async def test_the_last_one_out_cancels_and_a_newcomer_starts_afresh():
    flights, work = SingleFlight(), Work()
    work.death.clear()
    task = asyncio.create_task(flights.run("k", work))
    await settle()
    task.cancel()
    await settle()
    assert work.cancels == 1
    newcomer = asyncio.create_task(flights.run("k", work))
    await settle()
    work.death.set()  # only now the first work is over
    await settle()
    assert len(flights) == 1
    work.gate.set()
    assert await newcomer == "done"
    assert work.starts == 2


async def test_errors_reach_everybody_and_are_not_kept():
    flights, work = SingleFlight(), Work()
    work.error = ValueError("no")
    tasks = [asyncio.create_task(flights.run("k", work)) for _ in range(2)]
    await settle()
    work.gate.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, ValueError) for end in ends)
    work.error = None
    assert await flights.run("k", work) == "done"


# ---- processor cache ----
@given(st.lists(st.tuples(st.sampled_from("cgpr"), st.integers(0, 9), st.integers(1, 900))))
def test_the_cache_is_bounded_whatever_happens(steps):
    cache = ProcessorCache(3 * ENTRY_BYTES + 1000)
    for action, key, size in steps:
        name = bytes([key])
        if action == "c":
            cache.commit(name, b"x" * size)
        elif action == "g":
            cache.get(name)
        elif action == "p":
            before = cache.queries, cache.hits
            cache.peek(name)
            cache.is_cached(name)
            assert (cache.queries, cache.hits) == before
        else:
            cache.release(name)
        cache.check_integrity()


def test_least_recently_used_goes_first_and_the_first_value_stays():
    cache = ProcessorCache(2 * (ENTRY_BYTES + 10))
    cache.commit(b"a", b"1" * 10)
    cache.commit(b"b", b"2" * 10)
    cache.commit(b"a", b"9" * 10)
    cache.commit(b"c", b"3" * 10)
    assert cache.peek(b"a") == b"1" * 10
    assert not cache.is_cached(b"b")
    assert cache.evictions == 1


def test_size_zero_and_oversize_values_cost_nothing():
    off, small = ProcessorCache(0), ProcessorCache(ENTRY_BYTES + 10)
    assert not off.commit(b"a", b"1")
    small.commit(b"a", b"1")
    assert not small.commit(b"b", b"2" * 100)
    assert small.is_cached(b"a")
    assert (off.refused, small.refused) == (0, 1)


# ---- placeholders ----
def info(rule: str = "inline") -> ProcessorInfo:
    image = PlaceholderInfo(0, "<i>", 4, 4, "<i>", "offsets")
    audio = PlaceholderInfo(2, "<a>", 5, 5, "<a>", "offsets")
    return ProcessorInfo(b"", (image, audio), rule, (1,), (9,))


def part(modality: str, index: int = 0) -> MediaPart:
    return MediaPart(modality=modality, url="data:,", path=f"messages[0].content[{index}]")


def test_placeholders_match_by_modality_and_order():
    parts = [part("audio", 0), part("image", 1), part("image", 2)]
    assert match_placeholders(info(), [7, 4, 5, 8, 4], parts) == [(1, 1), (2, 0), (4, 2)]


@pytest.mark.parametrize(("ids", "word"), [([4, 4], "more"), ([7], "dropped")])
def test_smuggled_and_dropped_placeholders_are_refused(ids, word):
    with pytest.raises(InvalidRequest, match=word):
        match_placeholders(info(), ids, [part("image")])


def test_prefix_models_get_their_own_order():
    parts = [part("image"), part("image")]
    assert complete_prompt(info("prefix"), [1, 4, 7, 4, 8], parts) == [4, 4, 1, 7, 8, 9]
    assert complete_prompt(info("prefix"), [4, 4, 1, 7, 8, 9], parts) == [4, 4, 1, 7, 8, 9]
    assert complete_prompt(info(), [1, 4, 7, 4], parts) == [1, 4, 7, 4]


def test_each_kind_of_item_is_counted_by_itself():
    numbers = {4: ((20,), (21, 22)), 5: ((30,), (31,))}
    marks = [replace(one, numbers=numbers[one.token_id]) for one in info().placeholders]
    numbered = replace(info(), placeholders=tuple(marks))
    parts = [part("image"), part("audio"), part("image")]
    found = complete_prompt(numbered, [1, 4, 5, 4, 2], parts)
    assert found == [1, 20, 4, 30, 5, 21, 22, 4, 2]
    more = complete_prompt(numbered, [4, 4, 4], parts)  # which is refused by their count
    assert more == [20, 4, 21, 22, 4, 4]


# ---- routing ----
def chosen(router: Router, *facts) -> str | None:
    pick = router.choose(*facts)
    return None if pick is None else pick.name


def test_bytes_held_decide_within_the_load_bound():
    router = Router()
    holder = Candidate("a", load=2, held_bytes=100)
    assert chosen(router, [holder, Candidate("b", 1)], []) == "a"
    busy = holder._replace(load=19)
    assert chosen(router, [busy, Candidate("b", 1)], []) == "b"


def test_the_bound_lets_chance_have_its_way():
    """Regression: a bound of 1.25 shares took 10 of 16 requests for too many. Whatever came next
    was stored on a second engine and pushed out what only that one held: 3.3 points of hits."""
    assert load_bound([0, 0]) == 2
    assert load_bound([9, 6]) == 13
    assert load_bound([400, 600]) == 648
    assert load_bound([50]) > 50


def test_an_item_nobody_holds_has_the_same_home_for_every_frontend():
    """Whatever the prompts about it say, as long as neither load nor memory tell engines apart."""
    idle = [Candidate(name, 3) for name in "abc"]
    for index in range(20):
        home = bytes([index]) * 32
        names = {
            chosen(Router(), idle, affinity_keys([text] * 40, [home]), home) for text in range(5)
        }
        assert len(names) == 1
    homes = {chosen(Router(), idle, [], bytes([index]) * 32) for index in range(20)}
    assert homes == set("abc")


def test_a_home_does_not_outweigh_load():
    loads = [Candidate("a", 3), Candidate("b", 2), Candidate("c", 3)]
    assert {chosen(Router(), loads, [], bytes([index]) * 32) for index in range(20)} == {"b"}


def test_the_only_holder_of_unrepeatable_media_is_chosen_however_busy():
    busy = Candidate("a", load=50, held_bytes=100)
    assert chosen(Router(), [busy, Candidate("b", 0, has_all_sources=False)], []) == "a"
    assert chosen(Router(), [Candidate("b", 0, has_all_sources=False)], []) is None
    assert chosen(Router(), [], []) is None


def test_prompts_return_to_the_engine_that_has_their_prefix():
    router = Router(max_entries=64)
    ids = list(range(300))
    router.commit("b", affinity_keys(ids, []))
    two = [Candidate("a", 0), Candidate("b", 1)]
    assert chosen(router, two, affinity_keys([*ids, 5], [])) == "b"
    assert chosen(router, two, affinity_keys([9] * 300, [])) == "a"
    router.forget("b")
    assert chosen(router, two, affinity_keys(ids, [])) == "a"
    for index in range(100):
        router.commit("a", affinity_keys([index] * 40, []))
    assert len(router) <= 64


def test_different_pictures_are_different_prefixes():
    ids = [4] * 100
    assert not set(affinity_keys(ids, [b"x" * 32])) & set(affinity_keys(ids, [b"y" * 32]))


def test_the_beginnings_of_long_prompts_and_four_items_are_remembered():
    hashes = [bytes([number]) * 32 for number in range(9)]
    assert affinity_keys([70_000] * 31, []) == []
    assert len(affinity_keys([70_000] * 256, hashes)) == 4 + 2


def test_the_prompt_met_longest_ago_is_forgotten_first():
    router = Router(max_entries=2)
    for key in (b"a", b"b", b"a", b"c"):
        router.commit("x", [key])
    two = [Candidate("x", 0), Candidate("y", 0)]
    reasons = [router.choose(two, [key]).why for key in (b"a", b"b", b"c")]
    assert reasons == ["remembered", "load", "remembered"]


def test_cold_requests_spread():
    router, loads = Router(), {"a": 0, "b": 0, "c": 0}
    for index in range(30):
        keys = affinity_keys([index] * 40, [])
        name = chosen(router, [Candidate(n, load) for n, load in loads.items()], keys)
        router.commit(name, keys)
        loads[name] += 1
    assert set(loads.values()) == {10}


def test_requests_of_others_count_as_at_the_last_report():
    assert estimate_load(own=0, reported=1, own_at_report=1) == 0
    assert estimate_load(own=1, reported=40, own_at_report=10) == 31


def test_stage_times_fall_into_their_buckets():
    stages = StageTimes()
    for seconds in (0.0, STAGE_BUCKETS[0], STAGE_BUCKETS[-1], 1e9):
        stages.observe("hash", seconds)
    counts = stages["hash"].counts
    assert counts[0] == 2
    assert counts[-1] == 1
    assert sum(counts) == 4


async def test_who_joins_work_that_fails_is_told_of_its_own_part(start_input):
    """All who waited shared one error, and so the path of the one that was first."""
    inputs = await start_input()
    go = asyncio.Event()

    async def fail(*arguments):
        await go.wait()
        raise MediaInvalid("it is broken")

    inputs.workers.process = fail
    options = PrepareOptions(request_id="r", sampling=SamplingParams(max_tokens=5))
    tasks = [
        asyncio.create_task(
            inputs.prepare([4], [MediaPart(modality="image", path=path, data=b"x")], options)
        )
        for path in ("messages[0].content[1]", "messages[7].content[0]")
    ]
    while inputs.processing.joins == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    go.set()
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first.param, first.message) == (
        "messages[0].content[1]",
        "messages[0].content[1]: it is broken",
    )
    assert (second.param, str(second)) == (
        "messages[7].content[0]",
        "messages[7].content[0]: it is broken",
    )
