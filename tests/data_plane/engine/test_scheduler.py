"""Scheduling scenarios: one rule at a time, each checked against the uncached reference."""

import pytest

from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.types.request import Status
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    MediaTooLarge,
    Overloaded,
)
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.scheduled_chunks import P, chunks


def test_a_long_prompt_is_computed_in_chunks_and_decodes_go_on():
    drive = Drive(max_num_batched_tokens=10)
    drive.add("short", range(20, 24), max_tokens=6)
    drive.step()
    drive.add("long", range(100, 125), max_tokens=2)
    drive.run()
    assert chunks(drive, "short") == [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1)]
    assert chunks(drive, "long") == [(0, 9), (9, 9), (18, 7), (25, 1)]
    drive.assert_done()
    assert drive.finish == {"short": "length", "long": "length"}


def test_a_step_beside_a_stream_is_smaller_and_a_step_without_one_is_not():
    drive = Drive(max_num_batched_tokens=20, max_num_mixed_tokens=6)
    drive.add("stream", range(20, 24), max_tokens=5)
    drive.step()
    drive.add("long", range(100, 140), max_tokens=2)
    drive.run()
    assert chunks(drive, "stream") == [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1)]
    assert chunks(drive, "long") == [(0, 5), (5, 5), (10, 5), (15, 5), (20, 20), (40, 1)]
    drive.assert_done()


def test_beside_a_stream_one_large_item_or_several_small_ones_are_encoded():
    """Three items of 5 where 11 may be encoded beside a stream, then one of 12: it has its turn."""
    drive = Drive(max_num_mixed_tokens=11)
    drive.add("stream", range(20, 24), max_tokens=9)
    drive.step()
    for name in "abc":
        drive.add(name, [1, *[P] * 5, 2], [image(name.upper(), 1, 5)], max_tokens=2)
    drive.add("large", [1, *[P] * 12, 2], [image("L", 1, 12)], max_tokens=2)
    drive.run()
    encoded = [sum(entry.num_embeds for entry in plan.encode) for plan in drive.plans]
    assert [one for one in encoded if one] == [10, 5, 12]
    drive.assert_done()


def test_every_stream_gets_its_token_even_when_there_are_more_than_the_limit():
    drive = Drive(max_num_mixed_tokens=2)
    for number in range(6):
        drive.add(f"s{number}", [number, 1, 2], max_tokens=4)
    drive.run()
    assert len({len(chunks(drive, f"s{number}")) for number in range(6)}) == 1
    drive.assert_done()


def test_what_another_is_computing_is_waited_for_and_others_pass():
    """A prompt of four blocks in two steps: who wants the same waits for it, and computes no block
    of it; a prompt of its own does not wait; one that shares less than it would save does not."""
    drive = Drive(max_num_batched_tokens=16)
    same = list(range(20, 40))
    drive.add("first", same, max_tokens=2)
    drive.add("second", [*same, 7, 8], max_tokens=2)
    drive.add("own", range(100, 104), max_tokens=2)
    drive.add("salted", same, max_tokens=2, cache_salt=b"tenant")
    drive.add("third", [*same[:12], 50, 51], max_tokens=2)
    drive.run()
    assert chunks(drive, "first")[:2] == [(0, 16), (16, 4)]
    assert chunks(drive, "second")[0] == (20, 2)
    assert chunks(drive, "third")[0] == (12, 2)
    assert chunks(drive, "salted")[0][0] == 0, "another tenant's blocks are not its own"
    order = list(dict.fromkeys(e.request_id for plan in drive.plans for e in plan.scheduled))
    assert order.index("own") < order.index("second")
    assert order.index("second") < order.index("third"), "those who waited keep their order"
    drive.assert_done()


def test_a_short_common_beginning_is_not_waited_for():
    drive = Drive(max_num_batched_tokens=8)
    drive.add("first", range(20, 40), max_tokens=2)
    drive.add("second", [20, 21, 22, 23, *range(60, 76)], max_tokens=2)
    drive.step()
    drive.add("third", [20, 21, 22, 23, *range(80, 96)], max_tokens=2)
    drive.run()
    assert chunks(drive, "second")[0][0] <= 4
    assert {"first", "second", "third"} == drive.finish.keys()
    drive.assert_done()


def test_who_waits_for_blocks_goes_on_when_the_one_that_computes_them_ends():
    drive = Drive(max_num_batched_tokens=8)
    same = list(range(20, 60))
    drive.add("first", same)
    drive.add("second", same, max_tokens=2)
    drive.step()
    drive.step()
    assert chunks(drive, "second") == []
    drive.abort("first")
    drive.run()
    assert chunks(drive, "second")[0] == (16, 8), "what was computed is not lost"
    drive.assert_done()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_many_wait_for_one_and_are_served_in_their_order(policy):
    """More than a pass passes over."""
    drive = Drive(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=16, policy=policy)
    same = list(range(20, 60))
    for number in range(50):
        drive.add(f"r{number:02}", [*same, 100 + number], max_tokens=1)
    drive.run()
    computed = sum(e.num_scheduled_tokens for plan in drive.plans for e in plan.scheduled)
    assert computed == 41 + 49
    assert list(drive.finish) == sorted(drive.finish)
    drive.assert_done()


def test_first_come_first_served_and_seats_are_limited():
    drive = Drive(max_num_seqs=2)
    for name in "abc":
        drive.add(name, [ord(name), 1, 2], max_tokens=3)
    assert {entry.request_id for entry in drive.step().scheduled} == {"a", "b"}
    drive.run()
    assert list(drive.finish) == ["a", "b", "c"]
    drive.assert_done()


def test_the_priority_policy_runs_the_smaller_number_first():
    drive = Drive(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 5), ("b", 1), ("c", 1), ("d", 0)):
        drive.add(name, [ord(name), 1], priority=priority)
    drive.run()
    assert list(drive.finish) == ["d", "b", "c", "a"]
    drive.assert_done()


def test_the_last_to_come_is_preempted_and_recomputed():
    drive = Drive(num_blocks=8, max_num_batched_tokens=64)
    drive.add("a", range(10, 22), max_tokens=16)
    drive.add("b", range(30, 42), max_tokens=16)
    drive.run()
    assert drive.scheduler.stats.num_preemptions > 0
    assert drive.requests["a"].num_preemptions == 0
    assert drive.requests["b"].num_preemptions > 0
    assert list(drive.finish) == ["a", "b"]
    drive.assert_done()


def test_the_least_important_is_preempted_even_when_it_was_scheduled_already():
    drive = Drive(num_blocks=8, max_num_batched_tokens=64, policy="priority")
    drive.add("low", range(10, 22), max_tokens=16, priority=9)
    drive.step()
    drive.add("high", range(30, 42), max_tokens=16, priority=1)
    drive.run()
    assert drive.requests["high"].num_preemptions == 0
    assert drive.requests["low"].num_preemptions > 0
    drive.assert_done()


def test_a_preempted_request_drops_its_encoder_references_and_takes_them_again():
    drive = Drive(num_blocks=9, max_num_batched_tokens=16)
    drive.add("a", range(10, 22), max_tokens=18)
    drive.add("b", [1, *[P] * 12, 2], [image("A", 1, 12)], max_tokens=12)
    drive.run()
    assert drive.requests["b"].num_preemptions > 0
    drive.assert_done()


def test_a_request_too_long_for_the_model_is_refused_with_both_numbers():
    drive = Drive(max_model_len=20)
    with pytest.raises(ContextLengthExceeded, match=r"20.*20"):
        drive.add("a", range(20))
    drive.add("b", range(10, 29), max_tokens=50)
    drive.run()
    assert (len(drive.outputs["b"]), drive.finish["b"]) == (1, "length")


def test_bad_requests_are_refused_and_change_nothing():
    drive = Drive(num_blocks=5, max_waiting=1)
    with pytest.raises(InvalidRequest):
        drive.add("a", [])
    with pytest.raises(InvalidRequest):
        drive.add("a", [1], max_tokens=0)
    with pytest.raises(EngineFailure, match=r"21 tokens.*20"):
        drive.add("a", range(21))
    with pytest.raises(MediaTooLarge, match=r"17 encoder outputs.*32.*16"):
        drive.add("a", [P] * 17, [image("A", 0, 17)])
    drive.add("a", [1])
    with pytest.raises(Overloaded):
        drive.add("b", [1])
    drive.run()
    drive.assert_done()


def test_a_request_that_outgrows_the_kv_cache_alone_fails_and_the_engine_goes_on():
    drive = Drive(num_blocks=4)
    drive.add("a", range(10, 22), max_tokens=50)
    drive.add("b", range(30, 34), max_tokens=4)
    drive.run()
    assert drive.finish == {"a": "error", "b": "length"}
    assert drive.errors["a"][0] == "engine_error"
    assert "4 of 4" in drive.errors["a"][1]
    drive.assert_done()


def test_stop_rules():
    probe = Drive()
    probe.add("p", [5, 6, 7], max_tokens=8)
    probe.run()
    made = probe.outputs["p"]
    eos = ModelTraits(
        vocab_size=32_000, max_position=1000, eos_token_ids=(made[3],), is_multimodal=False
    )

    def run(traits=None, **options):
        drive = Drive(traits=traits) if traits else Drive()
        drive.add("p", [5, 6, 7], sampling=SamplingParams(**options))
        outputs = []
        while drive.scheduler.has_work:
            plan = drive.scheduler.schedule()
            if plan.scheduled or plan.finished:
                drive.scheduler.update(plan, drive.runner.execute(plan))
            outputs += [output for _, output in drive.scheduler.take_outputs()]
        return sum(len(o.token_ids) for o in outputs), outputs[-1].finish, outputs[-1].stop_token

    assert run(max_tokens=5) == (5, "length", None)
    assert run(eos, max_tokens=8) == (4, "stop", None)
    assert run(eos, max_tokens=8, ignore_eos=True) == (8, "length", None)
    assert run(max_tokens=8, stop_token_ids=(made[2],)) == (3, "stop", made[2])
    assert run(max_tokens=8, stop_token_ids=(made[2],), min_tokens=3) == (8, "length", None)
    assert run(eos, max_tokens=8, min_tokens=3) == (4, "stop", None)
    assert run(eos, max_tokens=8, min_tokens=4) == (8, "length", None)
    assert run(eos, max_tokens=8, min_tokens=8, grammar="x") == (4, "stop", None)


def test_tokens_of_an_earlier_attempt_count_and_are_not_emitted_again():
    drive = Drive()
    drive.add("a", range(10, 20), max_tokens=9)
    drive.run()
    again = Drive()
    again.add("a", range(10, 20), max_tokens=9, emitted=drive.outputs["a"][:5])
    again.run()
    assert again.outputs["a"] == drive.outputs["a"][5:]
    assert again.first["a"].num_prompt_tokens == 10
    again.add("done", range(10, 20), max_tokens=5, emitted=drive.outputs["a"][:5])
    assert again.finish["done"] == "length"
    assert again.outputs["done"] == []
    again.assert_done()


def test_abort_gives_everything_back_wherever_the_request_is():
    drive = Drive(max_num_seqs=1, max_num_batched_tokens=8)
    drive.add("a", [1, *[P] * 12, 2], [image("A", 1, 12)])
    drive.add("b", range(10, 20))
    drive.step()
    assert drive.requests["a"].status is Status.RUNNING
    assert drive.abort("b") is drive.requests["b"]
    assert drive.abort("a") is drive.requests["a"]
    assert drive.abort("a") is None
    drive.run()
    drive.assert_done()
    assert drive.outputs == {"a": [], "b": []}


def test_an_abort_between_plan_and_result_is_harmless():
    drive = Drive()
    drive.add("a", range(10, 20))
    drive.add("b", range(30, 40))
    plan = drive.scheduler.schedule()
    result = drive.runner.execute(plan)
    drive.abort("a")
    drive.scheduler.update(plan, result)
    drive.scheduler.check_integrity()
    drive._collect()
    drive.run()
    assert drive.outputs["a"] == []
    drive.assert_done()


def test_a_failing_request_does_not_touch_the_others():
    drive = Drive()
    for name in "ab":
        drive.add(name, range(ord(name), ord(name) + 10))
    drive.step()
    drive.runner.failures["a"] = "not a number"
    drive.run()
    assert drive.errors == {"a": ("engine_error", "not a number")}
    drive.assert_done()


def test_a_request_whose_options_leave_no_token_is_refused():
    """It was the engine's failure, which clients send again and alerts count."""
    drive = Drive()
    drive.add("a", range(10))
    drive.runner.failures["a"] = "no token is left"
    plan = drive.scheduler.schedule()
    result = drive.runner.execute(plan)
    result.impossible = ["a"]
    drive.scheduler.update(plan, result)
    drive._collect()
    drive.run()
    assert drive.errors == {"a": ("invalid_request_error", "no token is left")}
    drive.assert_done()


def test_a_pass_that_cannot_progress_fails_the_blocker_and_never_spins():
    """An item that was rejected at the window's start once made an engine run empty passes for
    minutes. Here the room is stolen behind the scheduler's back, so nothing can ever be encoded."""
    drive = Drive()
    thief = drive.add("thief", [P] * 16, [image("T", 0, 16)])
    drive.step()
    drive.scheduler.encoder.cache_size -= 32
    drive.scheduler.encoder.num_free_embeds -= 32
    drive.check = False
    drive.add("a", [*[P] * 6, 2], [image("A", 0, 6)], max_tokens=1)
    del thief
    drive.abort("thief")
    drive.scheduler.reset_encoder_cache()
    for _ in range(4):
        drive.step()
    assert drive.finish["a"] == "error"
    assert "no step can compute" in drive.errors["a"][1]
    assert drive.scheduler.stats.num_no_progress == 1
    assert not drive.scheduler.has_work


def test_stage_times_and_counters():
    drive = Drive()
    drive.add("a", range(10, 40), max_tokens=3)
    drive.clock.now += 2.0
    drive.run()
    first = drive.first["a"]
    assert first.queue_seconds == pytest.approx(2.0)
    assert first.prefill_seconds == pytest.approx(0.01)
    stats = drive.scheduler.stats
    assert stats.num_prompt_tokens == 30
    assert stats.num_generation_tokens == 3
    assert stats.finished == {"length": 1}
    assert stats.observed.iteration_tokens.total == 32
    assert sum(stats.observed.iteration_tokens.counts) == 3
