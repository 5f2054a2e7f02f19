"""Guessed tokens: the same answers with fewer steps, and no trace of wrong guesses."""

import random

import msgspec
import pytest

from foveal_runtime.engine.testing.drive import Drive, assert_alike, image
from foveal_runtime.engine.types.drafts import Drafts
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.sampling import SamplingParams

TRAITS = ModelTraits(
    vocab_size=2, max_position=500, eos_token_ids=(1,), is_multimodal=True, embed_bytes=32
)


def both(fill, **options):
    """The same requests without guesses and with them; every step checks all books."""
    guesses = {"num_speculative_tokens": 4, "draft_match": (1, 3)}
    found = [Drive(traits=TRAITS, **more, **options) for more in ({}, guesses)]
    return assert_alike(fill, *found)


def params(**options):
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **options})


def test_what_followed_before_is_proposed():
    drafts = Drafts(100, (), 2, 3)
    assert drafts.propose([7, 8, 9, 5, 8, 9], 4) == [5, 8, 9, 5]  # two stood before; once more
    assert drafts.propose([7, 8, 9, 5, 8, 9, 5, 8], 2) == [9, 5]  # the longest, the latest
    assert drafts.propose([7, 8, 9, 5, 8, 9, 5, 8, 1], 4) == []
    assert drafts.propose([7, 8, 9, 5, 8, 9, 5, 8, 1, 3], 4) == []


def test_no_end_and_no_token_outside_the_vocabulary_is_proposed():
    placeholder = 32_000
    drafts = Drafts(100, (99,), 1, 4)
    assert drafts.propose([5, 6, placeholder, placeholder, 5], 4) == [6]
    assert drafts.propose([5, 6, placeholder, placeholder, 5, 6], 4) == []
    assert drafts.propose([5, 6, -1, -1, 5, 6, 0xD800, 5], 4) == [6]
    assert Drafts(100, (99,), 1, 4).propose([5, 6, 99, 7, 5], 4) == [6]


def test_one_token_has_nothing_before_it():
    assert Drafts(100, (99,), 1, 4).propose([5], 4) == []
    assert Drafts(100, (99,), 1, 4).propose([5, 5], 4) == [5, 5, 5, 5]


def test_wrong_guesses_in_a_row_make_a_pause():
    drafts, ids, made = Drafts(10, (), 1, 2), [1, 2, 3, 1], []
    for _ in range(40):
        draft = drafts.propose(ids, 2)
        made.append(len(draft))
        if draft:
            drafts.count(0)
        ids += [1]
    tries = [index for index, count in enumerate(made) if count]
    assert tries == [0, 2, 6, 14, 30]
    drafts.count(1)
    assert drafts.propose(ids, 2)


def test_right_guesses_save_steps():
    """A model that says the same token for ever: its one step in five makes five tokens."""
    traits = msgspec.structs.replace(TRAITS, vocab_size=1)
    drive = Drive(traits=traits, num_speculative_tokens=4, draft_match=(1, 3))
    drive.add("a", [0, 0, 0], sampling=params(max_tokens=41))
    drive.run()
    assert drive.outputs["a"] == [0] * 41
    assert len(drive.plans) == 9 + 1  # the last one tells the runner that the request is gone
    assert drive.scheduler.stats.num_accepted_tokens == 32


@pytest.mark.parametrize("seed", range(8))
def test_streams_end_as_without_guesses(seed):
    rng = random.Random(seed)

    def fill(drive):
        rng.seed(seed)
        for number in range(6):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            stop = (rng.randrange(2),) if number > 1 else ()
            drive.add(f"r{number}", prompt, sampling=params(
                ignore_eos=number < 2, stop_token_ids=stop, seed=rng.randrange(99),
                min_tokens=rng.choice([0, 30]), max_tokens=rng.randint(31, 60)))  # fmt: skip

    usual, guessed = both(fill, num_blocks=60)
    stats = guessed.scheduler.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    made = sum(map(len, guessed.outputs.values()))
    assert stats.num_generation_tokens == usual.scheduler.stats.num_generation_tokens == made


@pytest.mark.parametrize("seed", range(8))
def test_few_blocks_and_a_window(seed):
    """Requests give way to each other, and layers with a window have blocks of their own."""
    rng = random.Random(seed)

    def fill(drive):
        rng.seed(seed)
        for number in range(5):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            drive.add(f"r{number}", prompt, sampling=params(seed=rng.randrange(99)))

    usual, guessed = both(
        fill, num_blocks=14, block_size=8, num_window_blocks=13 * (seed % 2), window=9
    )
    assert guessed.scheduler.stats.num_accepted_tokens > 0
    assert usual.scheduler.stats.num_preemptions > 0


def test_items_and_prompts_have_steps_without_guesses():
    def fill(drive):
        drive.add("a", [0, 1] * 6, sampling=params(max_tokens=60))
        drive.add("b", [1, *[0] * 8, 1], [image("x", 1, 8)], sampling=params())

    _, guessed = both(fill, max_num_batched_tokens=8)
    assert guessed.scheduler.stats.num_accepted_tokens > 0
    for plan in guessed.plans:
        if plan.encode or plan.num_prompt_tokens:
            assert plan.num_draft_tokens == 0


def test_no_guess_goes_beyond_the_last_token_that_is_wanted():
    def fill(drive):
        drive.add("a", [0, 1] * 6, sampling=params(max_tokens=3, seed=5))

    _, guessed = both(fill, max_model_len=14)
    for plan in guessed.plans:
        for entry in plan.scheduled:
            assert entry.num_computed_tokens + entry.num_scheduled_tokens <= 14
