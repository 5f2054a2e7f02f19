"""Prefixes of models with recurrent state: a hit needs a snapshot, and is never a wrong one.

The fake runner sums a state over the tokens of each request and asserts that it equals the sum over
the KV that the block table names, so a snapshot of another prefix, place or time fails the step.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from foveal_runtime.engine.events.log import EventBatch, EventLog, StatesRemoved, StateStored
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS

STATEFUL = msgspec.structs.replace(FAKE_TRAITS, state_bytes=1024)


def hybrid(**limits) -> Drive:
    settings = {"num_snapshots": 16, "snapshot_tokens": 16, "num_blocks": 200, **limits}
    return Drive(traits=STATEFUL, **settings)


def full_attention(**limits) -> Drive:
    return Drive(**limits)


def test_the_same_prompt_starts_at_its_last_whole_block() -> None:
    drive = hybrid()
    prompt = list(range(100, 150))
    assert drive.ask("first", prompt) == 0
    assert drive.ask("again", prompt) == 48
    drive.assert_done()


def test_a_conversation_goes_on_where_its_answer_ended() -> None:
    drive = hybrid()
    history = list(range(100, 130))
    drive.ask("0", history, max_tokens=13)
    for turn in range(1, 4):
        history = [*history, *drive.outputs[str(turn - 1)]]
        computed = len(history) - 1  # the last output was sampled, not computed
        history += [turn] * 9
        assert drive.ask(str(turn), history, max_tokens=13) == computed // 4 * 4
    drive.assert_done()


def test_another_question_about_an_image_starts_at_its_end() -> None:
    drive = hybrid()
    picture = image("cat", 5, 14)
    prompt = [1] * 5 + [9] * 14
    drive.ask("what", [*prompt, *range(50, 60)], [picture])
    assert drive.ask("why", [*prompt, *range(70, 80)], [picture]) == 16
    assert drive.ask("other", [*prompt, *range(50, 60)], [image("dog", 5, 14)]) == 0
    assert drive.ask("third", [*prompt, *range(50, 60)], [image("cow", 5, 14)]) == 4
    drive.assert_done()


def test_a_prefix_that_two_prompts_share_is_kept_the_second_time() -> None:
    """Nothing tells where a system prompt ends until a second prompt leaves it."""
    drive = hybrid(snapshot_tokens=64)
    shared = list(range(100, 140))
    drive.ask("a", [*shared, *[1] * 10])
    assert drive.ask("b", [*shared, *[2] * 10]) == 0
    assert drive.scheduler.stats.num_stateless_tokens == 40
    assert drive.ask("c", [*shared, *[3] * 10]) == 40
    drive.assert_done()


def test_a_request_waits_for_a_state_that_another_is_about_to_make() -> None:
    drive = hybrid(snapshot_tokens=64)
    shared = list(range(100, 140))
    first = drive.add("a", [*shared, *[1] * 10])
    second = drive.add("b", [*shared, *[2] * 10])
    drive.run()
    drive.assert_done()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)


def test_salts_do_not_share_states() -> None:
    drive = hybrid()
    prompt = list(range(100, 150))
    drive.ask("mine", prompt, cache_salt=b"a")
    assert drive.ask("yours", prompt, cache_salt=b"b") == 0
    assert drive.ask("mine too", prompt, cache_salt=b"a") == 48


def test_a_preempted_request_goes_on_from_its_own_snapshot() -> None:
    drive = hybrid(num_blocks=34, max_num_batched_tokens=64)
    for name in "abc":
        drive.add(name, [ord(name)] * 24, max_tokens=28)
    hits = []
    while drive.scheduler.has_work:
        plan = drive.step()
        hits += [new.snapshot for new in plan.new if len(new.token_ids) > 24]
    drive.assert_done()
    assert drive.scheduler.stats.num_preemptions > 0
    assert all(hits)


def test_without_slots_no_prefix_is_reused() -> None:
    drive = hybrid(num_snapshots=0)
    prompt = list(range(100, 150))
    drive.ask("first", prompt)
    assert drive.ask("again", prompt) == 0
    assert drive.scheduler.snapshots is None


def test_few_slots_are_reused_for_what_came_last() -> None:
    drive = hybrid(num_snapshots=2)
    for number in range(6):
        drive.ask(f"{number}", [number + 10] * 50, max_tokens=1)
    assert drive.ask("last", [15] * 50, max_tokens=1) == 48
    assert drive.ask("old", [10] * 50, max_tokens=1) == 0
    assert drive.scheduler.snapshots.pool.num_evictions > 0


def test_a_reset_forgets_states() -> None:
    drive = hybrid()
    prompt = list(range(100, 150))
    drive.ask("first", prompt)
    drive.scheduler.reset_prefix_cache()
    assert drive.scheduler.snapshots.pool.num_cached_blocks == 0
    assert drive.ask("again", prompt) == 0


def test_a_failed_request_leaves_no_state_of_its_outputs() -> None:
    drive = hybrid()
    drive.add("bad", [7] * 30, max_tokens=40)
    for _ in range(15):
        drive.step()
    drive.runner.failures["bad"] = "logits are not finite"
    drive.run()
    snapshots = drive.scheduler.snapshots
    assert drive.errors["bad"]
    assert snapshots.pool.num_cached_blocks == 1  # of the prompt


def test_a_request_goes_on_when_its_medium_turns_out_to_be_wrong() -> None:
    """Its blocks are withdrawn and get no hashes any more: its states must have no names either."""
    drive = hybrid()
    cat, _ = image("cat", 2, 6)
    drive.add("w", [1, 2, *[9] * 6, 3, 4, 5], [(cat, b"value of cat")], max_tokens=20)
    for _ in range(3):
        drive.step()
    drive.scheduler.forget_media([cat.mm_hash])
    drive.run()
    drive.assert_done()
    assert drive.scheduler.snapshots.pool.num_cached_blocks == 0


def test_a_request_whose_medium_was_wrong_starts_over_beside_another() -> None:
    """What it made since has no hashes. Preempted while another computes the same tokens, it was
    compared with that one past its last hash: an IndexError, which ends the engine."""
    drive = hybrid()
    cat, value = image("cat", 1, 6)
    request = drive.add("w", [1, *[9] * 6, *range(20, 31)], [(cat, value)], max_tokens=40)
    for _ in range(4):
        drive.step()
    drive.scheduler.forget_media([cat.mm_hash])
    for _ in range(20):
        drive.step()
    assert len(request.block_hashes) < request.num_computed // 4
    drive.add("b", [*request.token_ids, *range(20, 120)], [(cat, value)])
    drive.step()
    drive.scheduler.preempt(request)
    drive.run()
    drive.assert_done()


def test_no_state_made_from_a_wrong_value_is_found_by_others() -> None:
    drive = hybrid()
    cat, value = image("cat", 2, 6)
    prompt = [1, 2, *[9] * 6, *range(20, 60)]
    drive.add("w", prompt, [(cat, b"WRONG of cat")])
    drive.step()
    drive.scheduler.forget_media([cat.mm_hash])
    drive.run()
    hits = [drive.ask(name, prompt, [(cat, value)]) for name in "bcd"]
    assert hits == [0, 44, 44]
    drive.assert_done()


def test_a_wrong_snapshot_is_seen() -> None:
    """Negative control: a hit on the state of another image."""
    drive = hybrid()
    prompt = [1] * 5 + [9] * 14 + [5] * 10
    drive.ask("cat", prompt, [image("cat", 5, 14)])
    snapshots, get = drive.scheduler.snapshots, drive.runner.snapshots
    wrong = {slot: (end, state + state) for slot, (end, state) in get.items()}
    drive.runner.snapshots = wrong
    assert snapshots.pool.num_cached_blocks
    with pytest.raises(AssertionError, match="other tokens"):
        drive.ask("again", prompt, [image("cat", 5, 14)])


def test_a_stream_does_not_take_the_slot_that_a_newcomer_starts_from() -> None:
    """It would be computed first beside an image in slices, and save into the slot."""
    drive = hybrid(
        num_snapshots=3, snapshot_tokens=4, target_itl_seconds=0.03, slices_encoding=True,
        encoder_compute_embeds=64, encoder_cache_embeds=128, max_num_batched_tokens=64,
        costs=(0.01, 0.002, 0.004),
    )  # fmt: skip
    drive.ask("warm", [1, *[3] * 8, 2], [image("warm", 1, 8)])
    drive.add("stream", range(20, 25), max_tokens=60)
    for _ in range(9):
        drive.step()
    prefix = list(range(100, 104))
    drive.add("prefix", prefix, max_tokens=1)
    for _ in range(6):
        drive.step()
    drive.add("a", range(200, 205), max_tokens=4)
    drive.add("late", [*prefix, *[3] * 30, 2], [image("late", 4, 30)], max_tokens=4)
    drive.run()
    drive.assert_done()


def test_events_tell_of_states() -> None:
    """Routers count a prompt's blocks up to its last state."""
    batches: list[EventBatch] = []
    log = EventLog("engine-0", batches.append)
    drive = hybrid(num_snapshots=2)
    drive.scheduler = Scheduler(drive.limits, STATEFUL, clock=drive.clock, observer=log)
    first = drive.add("0", [10] * 50, max_tokens=1)
    drive.run()
    for number in range(1, 4):
        drive.ask(f"{number}", [number + 10] * 50, max_tokens=1)
    log.flush()
    events = batches[0].events
    stored = [e.block_hash for e in events if isinstance(e, StateStored)]
    removed = [h for e in events if isinstance(e, StatesRemoved) for h in e.block_hashes]
    assert stored[:2] == [first.block_hashes[7], first.block_hashes[11]]  # at 32 and 48 tokens
    assert removed == stored[:-2]


@pytest.mark.parametrize("trace", ["conversation", "same-image"])
def test_hits_are_nearly_those_of_full_attention(trace: str) -> None:
    """At least 95 % of the prompt tokens that an engine without states takes from its cache."""
    found = {}
    for name, drive in (("full", full_attention(num_blocks=4000, max_model_len=2000)),
                        ("hybrid", hybrid(num_blocks=4000, num_snapshots=128,
                                          max_model_len=2000))):  # fmt: skip
        rng = random.Random(7)
        {"conversation": _conversations, "same-image": _same_images}[trace](drive, rng)
        drive.assert_done()
        found[name] = drive.scheduler.stats.num_prefix_hit_tokens
    assert found["hybrid"] >= 0.95 * found["full"] > 0


def _conversations(drive: Drive, rng: random.Random) -> None:
    """Eight chats of six turns behind one system prompt, each about an image of its own, four
    turns at a time."""
    history = {chat: [3] * 37 + [9] * 14 for chat in range(8)}
    for turn in range(6):
        for start in (0, 4):
            for chat in range(start, start + 4):
                history[chat] += [rng.randrange(100, 999) for _ in range(rng.randint(4, 30))]
                name = f"{chat}-{turn}"
                picture = image(f"image {chat}", 37, 14)
                drive.add(name, history[chat], [picture], max_tokens=rng.randint(5, 40))
            drive.run()
            for chat in range(start, start + 4):
                history[chat] += drive.outputs[f"{chat}-{turn}"]


def _same_images(drive: Drive, rng: random.Random) -> None:
    """Eighty questions about eight images, popular ones more often, three at a time."""
    for number in range(80):
        which = min(rng.randrange(8), rng.randrange(8))
        length = 8 + 4 * (which % 3)
        prompt = [3] * 21 + [9] * length
        prompt += [rng.randrange(100, 999) for _ in range(rng.randint(5, 25))]
        picture = image(f"image {which}", 21, length)
        drive.add(f"{number}", prompt, [picture], max_tokens=rng.randint(1, 12))
        if number % 3 == 2:
            drive.run()
    drive.run()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("run_ahead", [False, True])
def test_random_loads(seed: int, run_ahead: bool) -> None:
    """Shared and private prefixes, images (some turn out to be wrong), aborts, failures, few blocks
    and few slots: all books agree after each step, no state is a wrong one, and tokens are those
    without any cache."""
    rng = random.Random(seed)
    drive = hybrid(
        num_blocks=rng.choice([40, 80]), num_snapshots=rng.choice([1, 3, 20]),
        snapshot_tokens=rng.choice([4, 12, 60]), max_num_batched_tokens=rng.choice([9, 32]),
        disable_chunked_mm_input=rng.random() < 0.3, run_ahead=run_ahead,
    )  # fmt: skip
    histories = [[number + 3] * rng.randint(3, 30) for number in range(3)]
    lost = set()
    for number in range(40):
        name = str(number)
        prompt, items = list(rng.choice(histories)), []
        if rng.random() < 0.4:
            picture = image(f"i{rng.randrange(3)}", len(prompt), 8)
            prompt += [9] * 8
            items = [picture]
        prompt += [rng.randrange(9) for _ in range(rng.randint(1, 12))]
        drive.add(name, prompt, items, max_tokens=rng.randint(1, 24))
        for _ in range(rng.randint(0, 6)):
            drive.step()
        if rng.random() < 0.2 and drive.abort(name):
            lost.add(name)
        if rng.random() < 0.1 and name not in lost:
            drive.runner.failures[name] = "a reason"
        if rng.random() < 0.1:
            drive.scheduler.forget_media([image(f"i{rng.randrange(3)}", 0, 8)[0].mm_hash])
        if drive.outputs[name] and rng.random() < 0.5 and not items:
            histories[rng.randrange(3)] = [*prompt, *drive.outputs[name]][:60]
    drive.run()
    drive.assert_done()
