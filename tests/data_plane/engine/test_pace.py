"""A target for the gap between tokens: steps beside streams take as much as their measured cost
allows, and everything still gets its turn."""

from __future__ import annotations

import pytest

from foveal_runtime.engine.scheduler.pace import Pace
from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.types.step import EncoderInput, ScheduledRequest, StepPlan, StepResult
from tests.support.scheduled_chunks import P, chunks

STEP, TOKEN, EMBED = 0.010, 0.002, 0.004


def _drive(target: float, **limits: object) -> Drive:
    settings = {"max_num_batched_tokens": 64, "max_num_mixed_tokens": 30, "num_blocks": 400,
                "encoder_compute_embeds": 64, "encoder_cache_embeds": 200,
                "max_model_len": 600} | limits  # fmt: skip
    return Drive(costs=(STEP, TOKEN, EMBED), target_itl_seconds=target, **settings)


def _seconds(drive: Drive) -> list[float]:
    """Of each step in which the stream got a token beside another's prompt or encoding."""
    found = []
    for plan in drive.plans:
        streams = [entry for entry in plan.scheduled if entry.request_id == "stream"]
        others = plan.num_prompt_tokens
        if streams and streams[0].num_computed_tokens and (others or plan.encode):
            embeds = sum(entry.num_embeds for entry in plan.encode)
            found.append(STEP + TOKEN * others + EMBED * embeds)
    return found


@pytest.mark.parametrize("target", [0.030, 0.050, 0.100])
def test_steps_keep_to_the_target_and_use_it(target: float) -> None:
    drive = _drive(target)
    drive.add("stream", range(20, 24), max_tokens=120)
    for _ in range(3):
        drive.step()
    drive.add("long", range(1000, 1300), max_tokens=2)
    drive.run()
    seconds = _seconds(drive)
    settled = seconds[3:-1]  # the first ones are what was measured, the last is what was left
    assert settled
    assert max(settled) <= target + 1e-9
    assert min(settled) > target - 2 * TOKEN
    drive.assert_done()


def test_a_target_that_cannot_be_kept_still_computes_prompts_block_by_block() -> None:
    drive = _drive(0.001)
    drive.add("stream", range(20, 24), max_tokens=80)
    drive.step()
    drive.add("long", range(1000, 1100), max_tokens=2)
    drive.run()
    sizes = [size for _, size in chunks(drive, "long")]
    assert sizes[2:-2] == [4] * len(sizes[2:-2])
    drive.assert_done()


def test_encoding_takes_its_time_from_the_tokens_beside_it() -> None:
    """Images of 8 (32 ms) within 60 ms: one a step, fewer tokens beside it, and each has a turn."""
    drive = _drive(0.060)
    drive.add("stream", range(20, 24), max_tokens=200)
    for _ in range(2):
        drive.step()
    drive.add("warm", [1, *[P] * 8, *range(1000, 1060)], [image("W", 1, 8)], max_tokens=2)
    for _ in range(8):
        drive.step()
    before = len(drive.plans)
    for name in "abcd":
        words = range(ord(name) * 1000, ord(name) * 1000 + 30)
        drive.add(name, [1, *[P] * 8, *words], [image(name, 1, 8)], max_tokens=2)
    drive.run()
    encoding = [plan for plan in drive.plans[before:] if plan.encode]
    assert [len(plan.encode) for plan in encoding] == [1, 1, 1, 1]
    assert max(_seconds(drive)[6:]) <= 0.060 + 1e-9
    drive.assert_done()


def test_an_item_that_alone_takes_longer_than_the_target_is_encoded_whole() -> None:
    drive = _drive(0.020)
    drive.add("stream", range(20, 24), max_tokens=80)
    drive.step()
    for name in "ab":
        drive.add(name, [1, *[P] * 30, 2], [image(name, 1, 30)], max_tokens=2)
    drive.run()
    assert [len(plan.encode) for plan in drive.plans if plan.encode] == [1, 1]
    drive.assert_done()


def test_every_stream_gets_its_token_whatever_the_target() -> None:
    drive = _drive(0.001, max_num_seqs=12)
    for number in range(10):
        drive.add(f"s{number}", [number, 1, 2], max_tokens=30)
    for _ in range(12):
        drive.step()
    drive.add("late", [1, *[P] * 30, 2], [image("late", 1, 30)], max_tokens=2)
    since = len(drive.plans)
    for _ in range(15):
        drive.step()
    for plan in drive.plans[since:]:
        here = {entry.request_id for entry in plan.scheduled}
        assert {f"s{number}" for number in range(10)} <= here
    drive.run()
    drive.assert_done()


def test_slow_decodes_of_the_past_do_not_throttle_prompts_for_ever() -> None:
    """While prompts queue no step is of decodes alone: steps beside streams tell, too."""
    pace = Pace(0.05, 256)
    stream = ScheduledRequest("a", 4, 1, [1], True)
    for _ in range(20):
        pace.observe(StepPlan(1, scheduled=[stream]), StepResult(1, forward_seconds=0.060))
    mixed = StepPlan(2, scheduled=[stream, ScheduledRequest("b", 0, 16, [2], False)])
    seen = []
    for _ in range(200):
        pace.observe(mixed, StepResult(2, forward_seconds=0.008))
        seen.append(pace.tokens)
    assert seen[-1] > 100
    assert max(seen) <= 1000, "no more on the way than the costs allow"


def test_costs_follow_what_steps_take_now() -> None:
    pace = Pace(0.1, start_tokens=50)
    assert pace.tokens == 50
    decode = StepPlan(1, scheduled=[ScheduledRequest("a", 4, 1, [1], True)])
    prompt = StepPlan(2, scheduled=[ScheduledRequest("b", 0, 40, [2], False)])
    pace.observe(prompt, StepResult(2, forward_seconds=0.06))
    assert pace.tokens == 66, "the streams' own share is not known yet"
    pace.observe(decode, StepResult(1, forward_seconds=0.02))
    assert pace.tokens == 80
    for _ in range(60):
        pace.observe(prompt, StepResult(2, forward_seconds=0.10))  # the machine became slower
    assert pace.tokens == 40
    item = EncoderInput(b"i" * 32, 1, 10, memoryview(b""))
    pace.observe(StepPlan(3, encode=[item]), StepResult(3, encode_seconds=0.03))
    assert pace.tokens_instead(21, modality=1) == 32
    assert pace.embeds_instead(10, modality=1) == 6
    assert pace.embeds_instead(10, modality=0) == 0, "never seen"
