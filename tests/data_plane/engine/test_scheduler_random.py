"""Random requests, aborts, resets, wrong media and failures against the uncached reference.

Each example checks all books after each step, and at the end that every request made exactly the
tokens it makes alone, and that no block and no encoder reference is left.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.budget.kv import window_blocks
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.plan.sampling import SamplingParams

P = 9
SIZES = {"A": (3, 0), "B": (6, 0), "C": (11, 5), "D": (16, 0), "E": (7, 6)}


def prompt_of(parts):
    """parts: ints (text) and item names. Returns token ids and items."""
    tokens, items = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            length, embeds = SIZES[part]
            items.append(image(part, len(tokens), length, embeds))
            tokens.extend([P] * length)
    return tokens, items


def sampling_of(max_tokens, pooling):
    """Most requests want tokens, some an embedding."""
    wanted = 1 if pooling else max_tokens
    return SamplingParams(max_tokens=wanted, ignore_eos=True, pooling=pooling)


PARTS = st.lists(
    st.one_of(st.integers(10, 12), st.sampled_from(sorted(SIZES))), min_size=1, max_size=12
)
LIMITS = st.fixed_dictionaries({
    "num_blocks": st.integers(30, 70),
    "num_reserved_blocks": st.sampled_from([0, 0, 20]),
    "block_size": st.sampled_from([1, 4, 16]),
    "max_num_batched_tokens": st.sampled_from([16, 17, 40, 300]),
    "max_num_mixed_tokens": st.sampled_from([0, 3, 11]),
    "target_itl_seconds": st.sampled_from([0.0, 0.001, 0.02, 0.05]),
    "mixed_growth": st.sampled_from([0.0, 2.5]),
    "slices_encoding": st.booleans(),
    "max_num_seqs": st.sampled_from([1, 3, 8]),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "encoder_compute_embeds": st.sampled_from([16, 30]),
    "encoder_cache_embeds": st.sampled_from([16, 25, 60]),
    "encoder_host_bytes": st.sampled_from([0, 700, 4000]),
    "encoder_eviction": st.sampled_from(["lru", "cost"]),
    "disable_chunked_mm_input": st.booleans(),
    "prefix_caching": st.booleans(),
    "window": st.sampled_from([0, 0, 1, 6, 21]),
    "num_speculative_tokens": st.sampled_from([0, 0, 1, 4]),
    "draft_match": st.just((1, 3)),
})  # fmt: skip


def with_windows(limits, spare):
    """Few blocks of layers with a window: what one request may need, and `spare` more."""
    if not limits["window"]:
        return limits
    most = window_blocks(limits["window"], limits["max_num_batched_tokens"], limits["block_size"])
    return {**limits, "num_window_blocks": min(most, limits["num_blocks"]) + spare}


class Engine(RuleBasedStateMachine):
    drive = None

    @rule(
        limits=LIMITS,
        bidirectional=st.sampled_from(["none", "none", "item", "prompt"]),
        run_ahead=st.booleans(),
        spare=st.integers(0, 20),
        vocab_size=st.sampled_from([2, 60]),
    )
    @precondition(lambda self: self.drive is None)
    def start(self, limits, bidirectional, run_ahead, spare, vocab_size):
        traits = ModelTraits(
            vocab_size=vocab_size, max_position=500, eos_token_ids=(), is_multimodal=True,
            bidirectional=bidirectional, embed_bytes=32,
        )  # fmt: skip
        costs = 0.01, 0.001, 0.002
        limits = with_windows(limits, spare)
        self.drive = Drive(traits=traits, run_ahead=run_ahead, costs=costs, **limits)
        self.count = 0

    @rule(
        parts=PARTS, max_tokens=st.integers(1, 40), priority=st.integers(0, 2), salt=st.booleans(),
        pooling=st.sampled_from(["", "", "mean", "last", "cls"]),
    )  # fmt: skip
    @precondition(lambda self: self.drive is not None)
    def add(self, parts, max_tokens, priority, salt, pooling):
        tokens, items = prompt_of(parts)
        self.count += 1
        try:
            self.drive.add(
                f"r{self.count}", tokens, items, sampling=sampling_of(max_tokens, pooling),
                priority=priority, cache_salt=b"s" * salt,
            )  # fmt: skip
        except FovealError:
            self.drive.scheduler.check_integrity()

    @rule(steps=st.integers(1, 6))
    @precondition(lambda self: self.drive is not None)
    def steps(self, steps):
        for _ in range(steps):
            self.drive.step()

    @rule(pick=st.integers(0, 30))
    @precondition(lambda self: self.drive is not None)
    def abort(self, pick):
        live = [r for r in self.drive.requests if self.drive.scheduler.get(r)]
        if live:
            self.drive.abort(live[pick % len(live)])

    @rule(pick=st.integers(0, 30))
    @precondition(lambda self: self.drive is not None)
    def fail(self, pick):
        live = [r.request_id for r in self.drive.scheduler.running]
        if live:
            self.drive.runner.failures[live[pick % len(live)]] = "injected"

    @rule()
    @precondition(lambda self: self.drive is not None)
    def reset(self):
        self.drive.scheduler.reset_encoder_cache()
        self.drive.scheduler.reset_prefix_cache()

    @rule(names=st.sets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2))
    @precondition(lambda self: self.drive is not None)
    def forget(self, names):
        self.drive.scheduler.forget_media(image(name, 0, 1)[0].mm_hash for name in names)

    @invariant()
    def books_agree(self):
        if self.drive is not None:
            self.drive.scheduler.check_integrity()

    def teardown(self):
        if self.drive is not None:
            self.drive.run()
            self.drive.assert_done()
            assert self.drive.scheduler.stats.num_no_progress == 0


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("seed", range(18))
def test_a_crowd_of_requests_under_pressure(seed, run_ahead):
    """Few blocks, few encoder outputs, many equal pictures and prefixes."""
    print("seed", seed)
    rng = random.Random(seed)
    windows = {"num_window_blocks": 24, "window": 9} if seed >= 12 else {}
    drive = Drive(
        num_blocks=40, block_size=4, max_num_batched_tokens=rng.choice([16, 24, 64]),
        max_num_mixed_tokens=rng.choice([0, 5]), costs=(0.01, 0.001, 0.002),
        target_itl_seconds=rng.choice([0.0, 0.02]), mixed_growth=2.5 * (seed % 3 == 0),
        slices_encoding=bool(seed % 2), num_reserved_blocks=30 * (seed % 4 == 1),
        max_num_seqs=6, encoder_compute_embeds=16, encoder_cache_embeds=rng.choice([16, 40]),
        encoder_host_bytes=rng.choice([0, 900]), policy=rng.choice(["fcfs", "priority"]),
        encoder_eviction=rng.choice(["lru", "cost"]),
        disable_chunked_mm_input=rng.random() < 0.3, run_ahead=run_ahead, **windows,
    )  # fmt: skip
    prefix = [rng.choice([10, 11, "A", "B"]) for _ in range(4)]
    for number in range(40):
        parts = prefix[: rng.randint(0, 4)] + rng.choices([10, 11, 12, *SIZES], k=rng.randint(1, 5))
        tokens, items = prompt_of(parts)
        try:
            drive.add(
                f"r{number}", tokens, items, priority=rng.randint(0, 2),
                sampling=sampling_of(rng.randint(1, 60), rng.choice(["", "", "mean", "last"])),
            )  # fmt: skip
        except FovealError:
            continue
        for _ in range(rng.randint(0, 4)):
            drive.step()
        live = [r for r in drive.requests if drive.scheduler.get(r)]
        if live and rng.random() < 0.15:
            drive.abort(rng.choice(live))
        if rng.random() < 0.05:
            drive.scheduler.forget_media([image(rng.choice([*SIZES]), 0, 1)[0].mm_hash])
    drive.run()
    drive.assert_done()
    stats = drive.scheduler.stats
    assert stats.num_preemptions + stats.num_prefix_hit_tokens > 0
    assert (drive.num_ahead > 0) == run_ahead
