"""Steps submitted before the result of the one before: the same tokens, ends and books."""

import random

import pytest

from foveal_runtime.engine.testing.drive import Drive, assert_alike, image
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.plan.sampling import SamplingParams

EOS = 7
TRAITS = ModelTraits(
    vocab_size=24, max_position=500, eos_token_ids=(EOS,), is_multimodal=True, embed_bytes=32
)


def both(fill, **options):
    """The same requests in a usual loop and in one that runs ahead; every step checks all books."""
    found = [Drive(traits=TRAITS, run_ahead=run_ahead, **options) for run_ahead in (False, True)]
    return assert_alike(fill, *found)


def params(**options):
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **options})


def test_decoding_runs_ahead_and_nothing_is_computed_twice():
    def fill(drive):
        drive.add("a", list(range(10, 19)), max_tokens=12)
        drive.add("b", [10, 11], max_tokens=30)

    usual, ahead = both(fill)
    # All but the first step and those around the end of the first request and of all.
    assert ahead.num_ahead >= 25
    assert ahead.runner.num_computed_tokens == usual.runner.num_computed_tokens
    assert len(ahead.plans) == len(usual.plans)


@pytest.mark.parametrize("seed", range(6))
def test_an_end_that_only_the_token_tells_drops_one_token(seed):
    rng = random.Random(seed)

    def fill(drive):
        rng.seed(seed)
        for number in range(6):
            stop = tuple(rng.sample(range(24), 2))
            prompt = [rng.randrange(10, 20) for _ in range(rng.randint(1, 20))]
            drive.add(f"r{number}", prompt, sampling=params(
                ignore_eos=rng.random() < 0.3, stop_token_ids=stop, max_tokens=40,
                min_tokens=rng.choice([0, 5])))  # fmt: skip

    usual, ahead = both(fill)
    assert "stop" in ahead.finish.values()
    assert ahead.num_ahead > 0
    made = sum(map(len, ahead.outputs.values()))
    assert ahead.scheduler.stats.num_generation_tokens == made
    assert usual.scheduler.stats.num_generation_tokens == made
    assert ahead.runner.num_computed_tokens > usual.runner.num_computed_tokens  # the dropped ones


def test_blocks_of_a_request_that_ended_under_way_go_to_another():
    """The engine has blocks for one request: the next one gets them while the dropped token's key
    is still being written."""

    def fill(drive):
        for number in range(5):
            prompt = [10 + number] * 6
            drive.add(f"r{number}", prompt, sampling=params(ignore_eos=False, max_tokens=30))

    _, ahead = both(fill, num_blocks=9, prefix_caching=False)
    assert ahead.num_ahead > 0


def test_an_abort_while_a_step_is_under_way():
    drive = Drive(run_ahead=True, num_blocks=20)
    drive.add("a", [10] * 5, max_tokens=30)
    drive.add("b", [11] * 5, max_tokens=30)
    for _ in range(4):
        drive.step()
    assert drive.num_ahead > 0
    drive.abort("a")
    drive.scheduler.check_integrity()
    drive.add("c", [12] * 9, max_tokens=10)
    drive.run()
    drive.assert_done()
    assert len(drive.outputs["a"]) < 30
    assert (len(drive.outputs["b"]), len(drive.outputs["c"])) == (30, 10)


def test_a_failure_while_a_step_is_under_way():
    def fill(drive):
        drive.add("a", [10] * 5, max_tokens=30)
        drive.add("b", [11] * 5, max_tokens=30)
        for _ in range(4):
            drive.step()
        drive.runner.failures["a"] = "injected"

    drive = Drive(run_ahead=True)
    fill(drive)
    drive.run()
    drive.assert_done()
    assert drive.errors["a"][1] == "injected"
    assert len(drive.outputs["b"]) == 30


def test_preemption_with_steps_ahead():
    def fill(drive):
        for number in range(4):
            drive.add(f"r{number}", [10 + number] * 8, max_tokens=40)

    _, ahead = both(fill, num_blocks=24)
    assert ahead.scheduler.stats.num_preemptions > 0
    assert ahead.num_ahead > 0


def test_a_queue_that_could_move_is_not_kept_waiting():
    drive = Drive(run_ahead=True, max_num_seqs=2)
    for name in "abc":
        drive.add(name, [10, 11], max_tokens=10)
    drive.step()
    assert drive.num_ahead == 1  # both seats are taken: nobody could come
    drive.abort("a")
    before = drive.num_ahead
    drive.step()  # the one under way; the queue's head goes first now
    assert drive.num_ahead == before
    assert any(new.request_id == "c" for new in drive.step().new)
    drive.run()
    drive.assert_done()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"grammar": "start: /a*/"},
        {"bad_words": ((5, 6),)},
    ],
)
def test_options_that_need_the_text_so_far_wait(options):
    drive = Drive(run_ahead=True)
    drive.add("a", [10, 11], sampling=params(**options))
    drive.run()
    assert drive.num_ahead == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_crowd_ends_as_it_would_have(seed):
    """Pictures, prefixes, few blocks and seats, stops: added while steps are under way."""

    def fill(drive):
        rng = random.Random(seed)
        for number in range(25):
            tokens = [rng.randrange(10, 13) for _ in range(rng.randint(1, 12))]
            items = []
            if rng.random() < 0.4:
                items.append(image(rng.choice("AB"), len(tokens), 6))
                tokens += [9] * 6 + [10]
            try:
                drive.add(f"r{number}", tokens, items, sampling=params(
                    max_tokens=rng.randint(1, 40), ignore_eos=rng.random() < 0.5))  # fmt: skip
            except FovealError:
                continue
            for _ in range(rng.randint(0, 5)):
                drive.step()

    print("seed", seed)
    _, ahead = both(fill, num_blocks=30, max_num_seqs=5)
    assert ahead.num_ahead > 0
