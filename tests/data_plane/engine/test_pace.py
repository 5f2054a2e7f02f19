"""A target for the gap between tokens: steps beside streams take as much as their measured cost
allows, and everything still gets its turn."""

from __future__ import annotations

from itertools import pairwise

import pytest

from foveal_runtime.engine.scheduler.pace import LEAST_SECONDS, MOST_SECONDS, Pace
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
        seen.append(pace.tokens())
    assert seen[-1] > 100
    assert max(seen) <= 1000, "no more on the way than the costs allow"


def test_costs_follow_what_steps_take_now() -> None:
    pace = Pace(0.1, start_tokens=50)
    assert pace.tokens() == 50
    decode = StepPlan(1, scheduled=[ScheduledRequest("a", 4, 1, [1], True)])
    prompt = StepPlan(2, scheduled=[ScheduledRequest("b", 0, 40, [2], False)])
    pace.observe(prompt, StepResult(2, forward_seconds=0.06))
    assert pace.tokens() == 66, "the streams' own share is not known yet"
    pace.observe(decode, StepResult(1, forward_seconds=0.02))
    assert pace.tokens() == 80
    for _ in range(60):
        pace.observe(prompt, StepResult(2, forward_seconds=0.10))  # the machine became slower
    assert pace.tokens() == 40
    item = EncoderInput(b"i" * 32, 1, 10, memoryview(b""))
    pace.observe(StepPlan(3, encode=[item]), StepResult(3, encode_seconds=0.03))
    assert pace.tokens_instead(21, modality=1) == 32
    assert pace.embeds_instead(10, modality=1) == 6
    assert pace.embeds_instead(10, modality=0) == 0, "never seen"


def test_an_image_and_its_prompt_do_not_share_a_gap_that_holds_each() -> None:
    """10 outputs take 30 ms and 20 tokens 40 beside 10 of streams: each fits into 50, both do not,
    so streams have their turn between them."""
    pace = Pace(0.05, 256)
    item = EncoderInput(b"i" * 32, 1, 10, memoryview(b""))
    stream = ScheduledRequest("a", 4, 1, [1], True)
    pace.observe(StepPlan(1, scheduled=[stream]), StepResult(1, forward_seconds=0.01))
    mixed = StepPlan(2, scheduled=[stream, ScheduledRequest("b", 0, 20, [2], False)])
    pace.observe(mixed, StepResult(2, forward_seconds=0.05))
    pace.observe(StepPlan(3, encode=[item]), StepResult(3, encode_seconds=0.03))
    assert pace.slice_seconds([item]) == 0
    assert pace.slice_seconds([item], 5) == 0
    assert pace.slice_seconds([item], 20) == pytest.approx(0.04)


def test_steps_without_streams_say_nothing_of_them() -> None:
    """The rest of a split plan, and a plan that only moves something."""
    pace = Pace(0.0, 1000, growth=10.0)
    stream = ScheduledRequest("a", 4, 1, [1], True)
    window = ScheduledRequest("b", 0, 40, [2], False)
    pace.observe(StepPlan(1, scheduled=[stream]), StepResult(1, forward_seconds=0.02))
    mixed = StepPlan(2, scheduled=[stream, window])
    for _ in range(64):
        pace.observe(mixed, StepResult(2, forward_seconds=0.06))
    before = pace.tokens()
    rest = StepPlan(3, scheduled=[window], slice_seconds=0.01)
    pace.observe(rest, StepResult(3, forward_seconds=0.3))
    assert pace.tokens() == before
    pace.observe(StepPlan(4, finished=["c"]), StepResult(4))
    assert pace.is_look_due


def test_without_a_target_a_step_is_bounded_by_what_streams_alone_take() -> None:
    """And by tokens: a fast prompt makes no larger steps than before."""
    drive = _drive(0.0, mixed_growth=6.0)
    drive.add("stream", range(20, 24), max_tokens=160)
    for _ in range(3):
        drive.step()
    drive.add("long", range(1000, 1300), max_tokens=2)
    drive.run()
    settled = _seconds(drive)[3:-1]
    assert settled
    assert max(settled) <= 6 * STEP + 1e-9
    assert min(settled) > 6 * STEP - 2 * TOKEN
    drive.assert_done()
    decode = StepPlan(1, scheduled=[ScheduledRequest("a", 4, 1, [1], True)])
    pace = Pace(0.0, 50, growth=4.0)
    assert pace.tokens() == 50
    pace.observe(decode, StepResult(1, forward_seconds=0.1))
    pace.observe(StepPlan(2, scheduled=[ScheduledRequest("b", 0, 40, [2], False)]),
                 StepResult(2, forward_seconds=0.11))  # fmt: skip
    assert pace.tokens() == 50


@pytest.mark.parametrize(
    ("lengths", "num_images", "num_tokens"),
    [([30], 0, 7), ([31], 0, 25), ([30, 31], 0, 7), ([31, 30], 0, 25), ([30], 1, 25)],
)
def test_short_texts_are_spread_thinner_than_long_prompts_and_images(
    lengths: list[int], num_images: int, num_tokens: int
) -> None:
    """Short is what one step beside streams may hold: 30 tokens here."""
    drive = Drive(
        costs=(0.05, 0.01, 0.0), mixed_growth=6.0, short_growth=2.5, max_num_batched_tokens=64,
        max_num_mixed_tokens=30, num_blocks=400, encoder_compute_embeds=64,
        encoder_cache_embeds=200, max_model_len=600,
    )  # fmt: skip
    drive.add("stream", range(20, 24), max_tokens=60)
    drive.step()
    drive.step()
    drive.add("measured", range(60, 65), max_tokens=1)
    drive.step()
    for number, length in enumerate(lengths):
        tokens = list(range(1000 + 100 * number, 1000 + 100 * number + length))
        if num_images:
            tokens[1:21] = [P] * 20
        items = [image("a", 1, 20)] if num_images else []
        drive.add(f"p{number}", tokens, items, max_tokens=1)
    drive.step()
    assert drive.plans[-1].num_prompt_tokens == num_tokens
    drive.run()
    drive.assert_done()


def test_a_pause_beside_images_is_short_whatever_streams_take() -> None:
    """15 times 84 ms would be a second and more; slow streams do not stop prompts either."""
    pace = Pace(0.0, 256, growth=15.0, short=2.5)
    assert pace.slice_seconds([EncoderInput(b"a" * 32, 1, 10, memoryview(b""))]) == LEAST_SECONDS
    for decode, most in ((0.01, 0.15), (0.084, MOST_SECONDS), (0.4, 1.0)):
        pace = Pace(0.0, 256, growth=15.0, short=2.5)
        stream = ScheduledRequest("a", 4, 1, [1], True)
        pace.observe(StepPlan(1, scheduled=[stream]), StepResult(1, forward_seconds=decode))
        spare = pace.slice_seconds([EncoderInput(b"a" * 32, 1, 10, memoryview(b""))])
        assert spare == pytest.approx(most - decode)


def test_fast_streams_do_not_make_prompts_slow() -> None:
    """2.5 times 1 ms would be two tokens of a prompt; nobody sees gaps of 25 ms."""
    pace = Pace(0.0, 256, growth=2.5)
    stream = ScheduledRequest("a", 4, 1, [1], True)
    pace.observe(StepPlan(1, scheduled=[stream]), StepResult(1, forward_seconds=0.001))
    mixed = StepPlan(2, scheduled=[stream, ScheduledRequest("b", 0, 50, [2], False)])
    pace.observe(mixed, StepResult(2, forward_seconds=0.026))
    assert pace.tokens() == 48


@pytest.mark.parametrize(
    ("num_waiting", "num_tokens"), [(0, 40), (8, 40), (16, 120), (28, 240), (30, 256), (900, 256)]
)
def test_the_more_short_prompts_wait_the_more_a_step_takes(
    num_waiting: int, num_tokens: int
) -> None:
    """Twice 40 ms for up to eight of them, then as many times that as there are eights."""
    pace = Pace(0.0, 256, growth=30.0, short=2.0)
    stream = ScheduledRequest("a", 4, 1, [1], True)
    pace.observe(StepPlan(1, scheduled=[stream]), StepResult(1, forward_seconds=0.04))
    mixed = StepPlan(2, scheduled=[stream, ScheduledRequest("b", 0, 40, [2], False)])
    pace.observe(mixed, StepResult(2, forward_seconds=0.08))
    assert pace.tokens(are_short=True, num_waiting=num_waiting) == num_tokens
    assert pace.tokens(num_waiting=num_waiting) == 256
    kept = Pace(0.08, 256)
    for plan, seconds in ((StepPlan(1, scheduled=[stream]), 0.04), (mixed, 0.08)):
        kept.observe(plan, StepResult(1, forward_seconds=seconds))
    assert kept.tokens(are_short=True, num_waiting=num_waiting) == 40  # a target is a target


@pytest.mark.parametrize(("target", "embeds"), [(0.0, 2_000), (0.5, 20_000)])
def test_a_large_image_does_not_stop_32_streams(
    target: float, embeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 megapixels are 20,000 outputs or so, 80 s here. Between two tokens of a stream lies what a
    step may take: of the encoder, or of the prompt after it; and then their own step."""
    drive = _drive(target, mixed_growth=2.5, slices_encoding=True, max_num_seqs=33,
                   num_blocks=16_000, max_model_len=30_000, max_num_batched_tokens=2048,
                   encoder_compute_embeds=embeds, encoder_cache_embeds=embeds,
                   max_num_mixed_tokens=256, check=False)  # fmt: skip
    bound = target or LEAST_SECONDS
    names = [f"s{number}" for number in range(32)]
    for number, name in enumerate(names):
        drive.add(name, [number, 1, 2], max_tokens=1000)
    for _ in range(3):
        drive.step()
    drive.add("warm", range(1000, 1020), max_tokens=1)
    drive.step()
    times = []
    update = drive.scheduler.update

    def note(plan: StepPlan, result: StepResult) -> None:
        if any(entry.request_id == "s0" for entry in plan.scheduled):
            times.append(drive.runner.seconds)
        update(plan, result)

    monkeypatch.setattr(drive.scheduler, "update", note)
    drive.add("large", [1, *[P] * embeds, 2], [image("large", 1, embeds)], max_tokens=1)
    before = len(drive.plans)
    while not (whole := drive.step()).encode:
        before = len(drive.plans)
    streams = drive.plans[before:]
    streams.remove(whole)
    assert len(streams) > embeds * EMBED / bound
    for plan in streams:
        assert [entry.request_id for entry in plan.scheduled] == names
    assert {entry.request_id for entry in whole.scheduled} == {"large"}
    while not drive.outputs["large"]:
        drive.step()
    assert "s0" not in drive.finish
    gaps = [after - earlier for earlier, after in pairwise(times)]
    assert max(gaps) <= bound + STEP + TOKEN
    drive.run(max_steps=4000)
    drive.assert_done()


def test_what_streams_alone_take_is_looked_at_again_while_prompts_queue() -> None:
    drive = _drive(0.0, mixed_growth=4.0)
    drive.add("stream", range(20, 24), max_tokens=300)
    drive.step()
    for number in range(1, 6):
        drive.add(f"p{number}", range(1000 * number, 1000 * number + 500), max_tokens=2)
    drive.step()
    assert drive.plans[-1].num_prompt_tokens == 0, "nobody knows yet what it may take"
    for _ in range(80):
        drive.step()
    looks = [n for n, plan in enumerate(drive.plans[2:]) if plan.num_prompt_tokens == 0]
    assert looks[:1] == [64]
    drive.run()
    drive.assert_done()


def test_who_goes_first_takes_no_streams_token() -> None:
    """A prompt goes first that another kept from its item, and that wants all there is."""
    drive = _drive(0.060, slices_encoding=True, encoder_compute_embeds=30)
    drive.add("stream", range(20, 24), max_tokens=60)
    for name, num_words in (("a", 1), ("b", 1), ("late", 200)):
        words = range(1000, 1000 + num_words)
        drive.add(name, [1, *[P] * 30, *words], [image(name, 1, 30)], max_tokens=60)
    for _ in range(12):
        before = len(drive.outputs["stream"])
        drive.step()
        assert len(drive.outputs["stream"]) > before
    drive.run()
    drive.assert_done()


def _step_with(drive: Drive, name: str) -> None:
    before = len(drive.outputs[name])
    drive.step()
    assert len(drive.outputs[name]) > before, f"{name} stands still"


@pytest.mark.parametrize("target", [0.0, 0.060])
def test_a_prompt_takes_no_token_of_who_streams_behind_it(target: float) -> None:
    """Its images and words fill every step; the request that came after it decodes meanwhile, and
    without a target alone now and then."""
    drive = _drive(target, mixed_growth=4.0, slices_encoding=True, encoder_compute_embeds=30,
                   max_model_len=3000, num_blocks=2000)  # fmt: skip
    prompt = [1, *[P] * 30, 5, *[P] * 30, *range(1000, 2900)]
    drive.add("long", prompt, [image("one", 1, 30), image("two", 32, 30)], max_tokens=4)
    drive.add("short", [1, 2, 3], max_tokens=300)
    drive.step()
    while not drive.outputs["long"]:
        _step_with(drive, "short")
    looks = [plan for plan in drive.plans[20:-4] if plan.num_prompt_tokens == 0]
    assert bool(looks) == (not target)
    drive.run()
    drive.assert_done()


def test_a_newcomer_that_goes_first_takes_no_streams_token() -> None:
    drive = _drive(0.060, slices_encoding=True)
    drive.add("stream", range(20, 24), max_tokens=90)
    for _ in range(4):
        drive.step()
    drive.add("a", range(200, 203), max_tokens=4)
    drive.add("late", [*[P] * 30, 1], [image("late", 0, 30)], max_tokens=4)
    while not drive.outputs["late"]:
        _step_with(drive, "stream")
    assert any(plan.slice_seconds for plan in drive.plans)
    drive.run()
    drive.assert_done()
