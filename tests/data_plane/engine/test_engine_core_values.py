"""Early release of media values: unpinned once encoded, fetched again after preemption."""

import sys

import pytest

from foveal_runtime.engine.testing.fake_frontend import FakeItem
from foveal_runtime.plan.config import EngineCaches, SchedulerConfig
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import RequestBody, SamplingParams
from tests.support.engine_core_rig import A, B, C, Engine, early_release

A_TOKENS = 6


def wrong_a() -> FakeItem:
    """Other bytes under A's hash."""
    item = FakeItem("A", A_TOKENS)
    item.value = FakeItem("not A", A_TOKENS).value
    return item


def crowded():
    """Two requests, encoded, in an engine that must preempt one of them before both end."""
    engine = early_release(num_blocks=17)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3], max_tokens=40))
    engine.up(frontend, frontend.request(("s", 0), [2, C, 4], max_tokens=40))
    engine.step()
    return engine, frontend


def damage(core, *items):
    """The stored values of items change in memory; nothing made from the right ones is left."""
    for item in items:
        entry = core.receiver.store.lookup(item.mm_hash)
        bad = bytearray(entry.value.data)
        bad[-1] ^= 1
        entry.value = entry.value._replace(data=memoryview(bytes(bad)))
    core.scheduler.reset_encoder_cache()
    core.scheduler.reset_prefix_cache()


def test_values_are_unpinned_once_their_items_are_encoded():
    engine = early_release()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 2, B, 3], max_tokens=20))
    assert engine.core.receiver.store.pinned_bytes == len(A.value) + len(B.value)
    engine.step()
    assert engine.core.num_unfinished == 1
    assert engine.core.receiver.store.pinned_bytes == 0
    [request] = engine.core.scheduler.running
    assert request.values == (b"", b""), "no view keeps the memory"
    engine.run()
    assert frontend.finish["r", 0] == "length"
    engine.check(frontend, ("r", 0))
    engine.assert_clean()


def test_an_item_that_is_not_encoded_yet_keeps_its_value():
    engine = early_release()
    frontend = engine.connect()
    # 32 tokens a step: the second item is out of the first step's reach.
    engine.up(frontend, frontend.request(("r", 0), [A, *range(20, 50), B], max_tokens=8))
    engine.step()
    assert engine.core.receiver.store.pinned_bytes == len(B.value)
    engine.run()
    engine.check(frontend, ("r", 0))
    engine.assert_clean()


def test_a_preempted_request_gets_its_released_values_back():
    """Two requests that do not fit side by side once they have grown; the value cache holds one
    request's values, so those of the preempted one are gone and must be sent again."""
    ipc_bytes = len(A.value) + len(B.value) + len(C.value)
    engine = early_release(ipc_bytes, num_blocks=17)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, B, 3], max_tokens=30))
    engine.up(frontend, frontend.request(("s", 0), [2, C, 4], max_tokens=30))
    engine.step()
    fresh = [FakeItem(f"other{i}", 4) for i in range(3)]
    for number, item in enumerate(fresh):  # takes the room of all that is not pinned
        engine.up(frontend, frontend.request((f"t{number}", 0), [5, item], max_tokens=1))
    engine.run()
    assert engine.core.stats.num_preemptions > 0
    assert frontend.num_needs > 0
    for rid in frontend.bodies:
        assert frontend.finish[rid] == "length"
        engine.check(frontend, rid)
    queries = engine.core.receiver.stats.num_queries
    assert queries == 6, "who comes back for a value is no second query"
    engine.assert_clean()


def test_who_waits_for_released_values_can_be_aborted():
    engine, frontend = crowded()
    engine.core.receiver.reset()  # nobody pins a value: all are gone
    frontend.answers = False
    while not engine.core.scheduler.away:
        engine.step()
    [away] = engine.core.scheduler.away.values()
    engine.up(frontend, frontend.sender.abort(away.rid))
    engine.run()
    [other] = {("r", 0), ("s", 0)} - {away.rid}
    assert frontend.finish == {other: "length"}
    engine.check(frontend, other)
    # The answer that never came keeps its room until the session ends.
    engine.core.end_session("f1", "over")
    engine.run()
    engine.assert_clean()


def test_released_values_that_nobody_has_any_more_end_their_request():
    engine, frontend = crowded()
    engine.core.receiver.reset()
    frontend.items.clear()  # as for media that came by uuid alone
    engine.run()
    assert sorted(frontend.finish.values()) == ["length", "rejected"]
    [(rid, error)] = frontend.errors.items()
    assert error[0] == "mm_source_lost"
    [other] = frontend.bodies.keys() - {rid}
    engine.check(frontend, other)
    engine.assert_clean()


@pytest.mark.parametrize("unpin_at", ["finish", "encoded"])
def test_requests_larger_than_every_cache_take_turns(unpin_at):
    """Six requests of four items: together more than the value cache (each goes past it), more
    than the encoder cache, and two at a time more than the KV cache; one value is common."""
    shared = FakeItem("shared", 12, num_bytes=400)
    size = len(shared.value)
    engine = Engine(
        caches=EngineCaches(
            ipc_bytes=3 * size, ipc_staging_bytes=10 * size, block_size=4, unpin_at=unpin_at,
            encoder_embeds=24,
        ),
        num_blocks=23, max_len=80,
    )  # fmt: skip
    frontends = [engine.connect(f"f{number}") for number in range(2)]
    for number in range(6):
        items = [FakeItem(f"{number}.{item}", 12, num_bytes=400) for item in range(3)]
        frontend = frontends[number % 2]
        engine.up(frontend, frontend.request((f"r{number}", 0), [1, *items, shared], max_tokens=20))
    engine.run()
    assert engine.core.receiver.stats.num_bypass_requests >= 6
    assert engine.core.stats.num_no_progress == 0
    for frontend in frontends:
        for rid in frontend.bodies:
            assert frontend.finish[rid] == "length", frontend.errors
            engine.check(frontend, rid)
    engine.assert_clean()


def test_a_value_that_changed_in_memory_poisons_no_later_request():
    """The first value was used for as long as frontends believed in it, whatever had become of its
    bytes, and so was all that was made from it."""
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 2, 3, 4], max_tokens=2))
    engine.run()
    core = engine.core
    damage(core, A)
    for number in range(2):  # the first one finds out, the second has the new value
        rid = (f"s{number}", 0)
        engine.up(frontend, frontend.request(rid, [1, A, 2, 3, 4], max_tokens=2))
        engine.run()
        assert frontend.finish[rid] == "length"
        engine.check(frontend, rid)
    assert frontend.num_needs == 1
    assert core.receiver.stats.num_damaged_values == 1
    assert bytes(core.receiver.store.lookup(A.mm_hash).value.data) == A.value
    engine.assert_clean()


def test_a_changed_value_is_found_by_who_brings_a_copy_too():
    """The copy has the digest of the stored one and is dropped; that one was not checked."""
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 2, 3, 4], max_tokens=2))
    engine.run()
    damage(engine.core, A)
    frontend.sender.reset()
    engine.up(frontend, frontend.request(("s", 0), [1, A, 2, 3, 4], max_tokens=2))
    engine.run()
    engine.check(frontend, ("s", 0))
    assert engine.core.receiver.stats.num_damaged_values == 1
    engine.assert_clean()


def test_a_value_that_changed_while_its_request_was_away_is_asked_for_again():
    engine, frontend = crowded()
    damage(engine.core, A, C)
    engine.run()
    assert engine.core.stats.num_preemptions > 0
    assert engine.core.receiver.stats.num_damaged_values > 0
    for rid in frontend.bodies:
        assert frontend.finish[rid] == "length"
        engine.check(frontend, rid)
    engine.assert_clean()


def test_many_requests_on_trial_may_hold_a_wrong_value():
    """Each of them was one more call on the stack."""
    engine = Engine()
    frontend = engine.connect()

    def ask(name, ids, items=()):
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        places = tuple((len(ids) + index, index) for index, _ in enumerate(items))
        packed = codec.pack_tokens([*ids, *[0] * len(items)], wide=False)[0]
        body = RequestBody(
            token_ids=packed, wide=False, placements=places, sampling=sampling, on_trial=True
        )
        sent = frontend.request((name, 0), [*ids, *items], sampling=sampling, body=body)
        engine.up(frontend, sent)

    ask("first", [1, 2, 3])
    for number in range(sys.getrecursionlimit()):
        ask(f"h{number}", [1], [wrong_a()])
    frontend.sender.reset()
    engine.up(frontend, frontend.request(("s", 0), [1, A, 2], max_tokens=2))
    for _ in range(8):
        engine.core.step()
    engine.deliver()
    assert frontend.finish["first", 0] == "length"
    engine.core.end_session("f1", "over")


def test_what_was_made_from_a_replaced_value_is_not_used_again():
    """Encoder outputs and blocks go with the value they were made from; a stream that has begun
    keeps its own, and nobody else finds them."""
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, wrong_a(), 2, 3, 4], max_tokens=40))
    engine.step()
    engine.core.receiver.release_value("f1", ("r", 0), A.mm_hash)
    frontend.sender.reset()  # it forgets what the engine has, and sends the value again
    for number in range(2):
        rid = (f"s{number}", 0)
        engine.up(frontend, frontend.request(rid, [1, A, 2, 3, 4], max_tokens=2))
        engine.step()
    engine.run()
    assert set(frontend.finish.values()) == {"length"}
    for rid in frontend.bodies:
        engine.check(frontend, rid)
    stats = engine.core.receiver.stats
    assert (stats.num_value_conflicts, stats.num_damaged_values) == (1, 0)
    engine.assert_clean()


def test_an_output_of_a_replaced_value_is_not_joined_while_somebody_holds_it():
    """The first request is in the middle of the wrong item and has given the value up: it starts
    over with the right one, and the second one does not share its output."""
    caches = EngineCaches(ipc_bytes=4000, ipc_staging_bytes=8000, block_size=4, unpin_at="encoded")
    limits = SchedulerConfig(
        max_num_batched_tokens=32, max_num_seqs=8, max_num_encoder_input_tokens=32
    )
    engine = Engine(caches=caches, scheduler=limits)
    frontend = engine.connect()
    prompt = [*range(1, 7), *range(8, 30), wrong_a(), 2, 3, 4]  # 28 tokens before it
    engine.up(frontend, frontend.request(("r", 0), prompt, max_tokens=12))
    engine.step()
    assert engine.core.scheduler.encoder.users(A.mm_hash)
    frontend.sender.reset()
    engine.up(frontend, frontend.request(("s", 0), [1, 2, A, 2, 3, 4], max_tokens=2))
    engine.run()
    assert set(frontend.finish.values()) == {"length"}
    engine.check(frontend, ("s", 0))
    engine.assert_clean()


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("num_before", [5, 40])
def test_who_brings_the_right_value_while_a_wrong_one_is_in_use_gets_his_own(num_before, run_ahead):
    """It was answered from the one in use. Who has computed it goes on without waiting for anybody;
    who has not yet (40 tokens stand before it, a step computes 32) starts over with the right one,
    and so does who waits."""
    engine = Engine(run_ahead=run_ahead)
    frontend = engine.connect()
    prompt = [*range(10, 10 + num_before), wrong_a(), 2, 3, 4]
    engine.up(frontend, frontend.request(("r", 0), prompt, max_tokens=50))
    engine.step()
    for number in range(9):  # eight run at most
        rid = (f"w{number}", 0)
        engine.up(frontend, frontend.request(rid, [*range(10, 40), 50 + number, A], max_tokens=4))
    frontend.sender.reset()
    engine.up(frontend, frontend.request(("s", 0), [1, A, 2, 3, 4], max_tokens=2))
    for _ in range(40):
        engine.step()
    assert frontend.finish["s", 0] == "length", "long before the first one ends"
    engine.run()
    assert set(frontend.finish.values()) == {"length"}
    if num_before == 40:
        ids, _, sampling = frontend.bodies["r", 0]
        frontend.bodies["r", 0] = ids, [A], sampling
    for rid in frontend.bodies:
        engine.check(frontend, rid)
    stats = engine.core.receiver.stats
    assert (stats.num_value_conflicts, stats.num_queries) == (1, 11)
    engine.assert_clean()


@pytest.mark.parametrize("unpin_at", ["finish", "encoded"])
def test_who_waits_with_a_damaged_value_poisons_nobody_else(unpin_at):
    """One request waits in the scheduler while the value changes in memory; the next one finds out,
    and gets a new value and nothing that the first one made."""
    caches = EngineCaches(ipc_bytes=4000, ipc_staging_bytes=8000, block_size=4, unpin_at=unpin_at)
    engine = Engine(caches=caches)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 2, 3, 4], max_tokens=2))
    engine.run()
    core = engine.core
    entry = core.receiver.store.lookup(A.mm_hash)
    memory = bytearray(entry.value.data)
    entry.value = entry.value._replace(data=memoryview(memory))
    core.scheduler.reset_encoder_cache()
    core.scheduler.reset_prefix_cache()
    engine.up(frontend, frontend.request(("s", 0), [1, A, 2, 3, 4], max_tokens=9))
    assert len(core.scheduler.waiting) == 1
    memory[-1] ^= 1
    for number in range(2):
        rid = (f"t{number}", 0)
        engine.up(frontend, frontend.request(rid, [1, A, 2, 3, 4], max_tokens=2))
    engine.run()
    assert set(frontend.finish.values()) == {"length"}
    for number in range(2):
        engine.check(frontend, (f"t{number}", 0))
    assert core.receiver.stats.num_damaged_values == 1
    engine.assert_clean()


def test_a_value_that_differs_after_a_reset_is_known_to_be_wrong():
    """A reset lets pinned values go at their last unpin, so what was made from them stays."""
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, wrong_a(), 2, 3, 4], max_tokens=12))
    engine.step()
    engine.core.receiver.reset()
    frontend.sender.reset()
    for rid in (("s", 0), ("t", 0)):
        engine.up(frontend, frontend.request(rid, [1, A, 2, 3, 4], max_tokens=2))
        engine.run()
    engine.check(frontend, ("t", 0))
    assert engine.core.receiver.stats.num_value_conflicts == 1
    engine.assert_clean()
