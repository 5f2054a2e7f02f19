"""Layers with a sliding window in a pool of their own, beside transformers' own forward.

The engine's scheduler over the real runner, prompts of many windows: logits are those of a whole
forward, whatever lies in the blocks that requests have given back.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from foveal_runtime.engine.process.assemble import LoadedEngine, scheduler_limits
from foveal_runtime.engine.scheduler.window_blocks import WindowBlocks
from foveal_runtime.main.engine import _allocate, warm_up
from foveal_runtime.model import profiler
from foveal_runtime.model.attention import FP8, KVPool, window_of
from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.budget.kv import KVShape, window_blocks
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from tests.support.models.bench import NUM_BLOCKS
from tests.support.models.compiled import NEEDS_KERNEL, NEEDS_PACKING
from tests.support.models.rerun_capturer import RerunCapturer
from tests.support.models.scheduled_bench import Engine, converse, goes_on_elsewhere

NUM_WINDOW_BLOCKS = 40
FAMILIES = (
    "gemma2_softcap", "gpt_oss_sinks", "cohere2", "llama4_text", "gemma3", "gemma4",
    "gemma4_large", "gemma3n_text", "mixed", "mixed_gemma",
)  # fmt: skip
FAST = (
    ("gemma2_softcap", "auto"),
    ("gemma3", "torch"),
    ("gemma4", "auto"),
    ("mixed", "auto"),
    ("mixed_gemma", "auto"),
)
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.fixture(autouse=True)
def _mixed(checkpoints) -> None:
    """Cases whose small steps, and of one the last layer, are computed in ways of their own on
    CPUs; layers of the second turn heads in two ways."""
    checkpoints.CASES["mixed"] = checkpoints.text_case(
        "Qwen3Config", hidden_size=96, intermediate_size=136, num_hidden_layers=3, head_dim=16,
        num_attention_heads=6, num_key_value_heads=2, use_sliding_window=True, sliding_window=12,
        layer_types=MIXED,
    )  # fmt: skip
    checkpoints.CASES["mixed_gemma"] = checkpoints.text_case(
        "Gemma3TextConfig", hidden_size=96, intermediate_size=136, num_hidden_layers=3, head_dim=16,
        num_attention_heads=6, num_key_value_heads=2, sliding_window=12, layer_types=MIXED,
        query_pre_attn_scalar=24, tie_word_embeddings=False,
    )  # fmt: skip


def families(*fast: tuple[str, str]) -> list:
    marks = {True: (), False: (pytest.mark.extended,)}
    return [
        pytest.param(name, attention, marks=marks[(name, attention) in fast])
        for name in FAMILIES
        for attention in ("torch", "auto")
    ]


class Windowed(Engine):
    """Two pools. After each step everything in free blocks that nobody may find is overwritten."""

    def __init__(self, one, **limits) -> None:
        limits = {"num_snapshots": 0, "num_window_blocks": NUM_WINDOW_BLOCKS, **limits}
        super().__init__(one, window=one.runner.window, **limits)
        self.num_poisoned = 0
        self.most_held = 0
        execute = one.runner.execute

        def poisoned(plan):
            self.poison()
            return execute(plan)

        one.runner = _Runner(one.runner, poisoned)

    def preempt_at(self, *steps: int) -> None:
        """Throws the youngest request back before these steps."""
        schedule, numbers = self.scheduler.schedule, iter(range(1000))

        def preempting():
            if next(numbers) in steps:
                self.scheduler.preempt(self.scheduler.running[-1])
            return schedule()

        self.scheduler.schedule = preempting

    def poison(self) -> None:
        windows, pool = self.scheduler.windows.pool, self.one.runner._pool
        held = [len(request.window_ids) for request in self.scheduler.running]
        self.most_held = max(self.most_held, *held, 0)
        free = [block for block in windows._free if windows._hash[block] is None]
        self.num_poisoned += len(free)
        for index in pool.windowed:
            for one in (pool.keys[index], pool.values[index]):
                one.view(pool.num_window_blocks, -1)[free] = 1e4


class _Runner:
    """A runner with another `execute`."""

    def __init__(self, runner, execute) -> None:
        self._runner = runner
        self.execute = execute

    def __getattr__(self, name: str):
        return getattr(self._runner, name)


def opened(bench, name: str, attention: str):
    return bench(name, attention=attention, reuse=False, num_window_blocks=NUM_WINDOW_BLOCKS)


def long_prompt(one, seed: int, num_text: int = 40):
    return one.prompt(seed, [(kind, 7 + kind) for kind in one.case.items][:1], num_text=num_text)


def budget(one) -> int:
    """Odd, and no smaller than an item that is computed in one step."""
    return max(one.case.budget, 23)


@pytest.mark.parametrize(
    ("name", "attention"),
    [*families(*FAST), pytest.param("gemma3", "triton", marks=pytest.mark.slow)],
)
def test_what_was_left_behind_is_never_read(name: str, attention: str, bench) -> None:
    """Four requests in chunks of an odd size, preempted now and then, nothing cached."""
    one = opened(bench, name, attention)
    prompts = {f"{i}": long_prompt(one, 30 + i, num_text=40 + 9 * i) for i in range(4)}
    longest = max(len(prompt.ids) for prompt in prompts.values())
    engine = Windowed(
        one, max_num_batched_tokens=budget(one), num_window_blocks=18, prefix_caching=False
    )
    engine.preempt_at(2, 6, 11)
    jobs = [one.job(key, prompt, ignore_eos=True) for key, prompt in prompts.items()]
    engine.run(*jobs)
    assert engine.scheduler.stats.num_preemptions >= 3
    assert engine.num_poisoned > 20
    most = window_blocks(one.runner.window, budget(one), 8)
    assert engine.most_held <= most < longest // 8
    for job in jobs:
        one.check(job, prompts[job.request_id])


@pytest.mark.parametrize(("name", "attention"), families(*FAST))
def test_logits_after_a_hit_are_those_of_a_cold_run(name: str, attention: str, bench) -> None:
    one = opened(bench, name, attention)
    prompt = long_prompt(one, 11)
    engine = Windowed(one, max_num_batched_tokens=budget(one))
    hits, num_before = converse(engine, prompt, cut=2)
    length = len(prompt.ids)
    assert hits["first"] == 0
    assert hits["next turn"] == num_before // 8 * 8
    if one.runner.traits.bidirectional == "none":
        assert hits["again"] == (length - 1) // 8 * 8
        assert hits["other question"] >= length - 10
    # A pool of windows that many prompts have passed through: shorter hits, the same logits.
    for number in range(4):
        other = long_prompt(one, 50 + number, num_text=60)
        engine.run(one.job(f"other {number}", other, ignore_eos=True))
    last = one.job("last", prompt, ignore_eos=True)
    engine.run(last)
    one.check(last, prompt)
    assert engine.scheduler.windows.pool.num_evictions > 0


def test_a_request_goes_on_elsewhere_from_its_tokens(bench) -> None:
    one = bench("gemma3", reuse=False, num_window_blocks=NUM_WINDOW_BLOCKS)
    goes_on_elsewhere(one, long_prompt(one, 11), Windowed)


@pytest.mark.parametrize(
    "attention", ["torch", "auto", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_recorded_steps_have_both_tables(attention: str, bench) -> None:
    """Triton: in the interpreter."""
    one = bench("gemma2_softcap", attention=attention, reuse=False, num_window_blocks=40)
    assert one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=200)
    prompts = {f"{i}": long_prompt(one, 20 + i, num_text=30 + 7 * i) for i in range(3)}
    jobs = [one.job(key, prompt, ignore_eos=True) for key, prompt in prompts.items()]
    Windowed(one).run(*jobs)
    assert one.runner.num_graph_steps >= 5
    for job in jobs:
        one.check(job, prompts[job.request_id])


@NEEDS_KERNEL
@NEEDS_PACKING
@pytest.mark.parametrize("name", ["mixed", "mixed_gemma"])
def test_small_steps_are_computed_in_one_call(name: str, bench) -> None:
    one = bench(name, attention="auto", reuse=False, num_window_blocks=NUM_WINDOW_BLOCKS)
    assert one.runner.forward.has_short_last_layer == (name == "mixed")
    ways = one.runner.forward.decoder_layers
    assert ways is not None
    calls = []
    run, ways._kernel.run = ways._kernel.run, lambda step: calls.append(step) or run(step)
    prompt = long_prompt(one, 14)
    job = one.job("a", prompt, ignore_eos=True)
    Windowed(one).run(job)
    assert [(step.num_layers, step.num_rows) for step in calls].count((3, 1)) == 5
    one.check(job, prompt)


def given_back_early(self: WindowBlocks, position: int) -> int:
    return max(position - self._window + 1 + 8, 0) // 8


def hit_of_one_pool(self: WindowBlocks, request, num_blocks: int) -> tuple[int, list[int]]:
    return num_blocks, []


@pytest.mark.parametrize(
    ("name", "wrong"), [("first_of", given_back_early), ("lookup", hit_of_one_pool)]
)
@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_a_block_that_is_missing_is_seen(name, wrong, attention, bench, monkeypatch) -> None:
    """Controls: a block that is freed one too early, a hit on the other pool alone."""
    monkeypatch.setattr(WindowBlocks, name, wrong)
    monkeypatch.setattr(WindowBlocks, "check_integrity", lambda *_: None)
    one = bench("gemma2_softcap", attention=attention, reuse=False, num_window_blocks=40)
    engine, prompt = Windowed(one), long_prompt(one, 11)
    for label in ("first", "again"):
        job = one.job(label, prompt, ignore_eos=True)
        engine.run(job)
    assert one.deviation(job, prompt) > 0.1


def test_pools_have_their_planned_bytes(bench, tiny) -> None:
    one = bench("gemma4", reuse=False, num_window_blocks=NUM_WINDOW_BLOCKS)
    runner, profile = one.runner, profiler.predict(str(tiny("gemma4")), "float32")
    assert profile.window_pool
    assert profile.window == runner.window == window_of(runner.layers) == 7
    assert runner.window_block_bytes == 8 * profile.window_token_bytes("auto")
    whole = runner.kv_block_bytes - runner.window_block_bytes
    planned = NUM_BLOCKS * whole + NUM_WINDOW_BLOCKS * runner.window_block_bytes
    assert runner.kv_pool_bytes == planned
    half = KVPool(runner.layers, 9, 8, FP8, torch.device("cpu"), num_window_blocks=5)
    assert 4 * half.size_bytes == 9 * whole + 5 * runner.window_block_bytes


def test_an_engine_makes_both_pools_of_its_memory(tiny) -> None:
    """As it loads: from the document's bytes, and then the first steps run."""
    runner = TorchRunner.load(str(tiny("gemma2_softcap")), block_size=8)
    config = EngineConfig(
        model=ModelConfig(path="x"),
        caches=EngineCaches(kv_bytes=60 * runner.kv_block_bytes, block_size=8),
        scheduler=SchedulerConfig(max_num_batched_tokens=24),
    )
    _allocate(runner, config, 300)
    warm_up(runner, 8, has_windows=True)
    most = window_blocks(12, 24, 8)
    assert runner.num_blocks - 1 > 300 // 8 + 1
    assert most < runner.num_window_blocks < runner.num_blocks / 2
    spare = config.caches.kv_bytes - runner.kv_pool_bytes
    assert 0 <= spare < 2 * runner.kv_block_bytes
    loaded = LoadedEngine(
        runner=runner, num_blocks=runner.num_blocks, max_model_len=300, largest={},
        num_window_blocks=runner.num_window_blocks, window=runner.window,
    )  # fmt: skip
    limits = scheduler_limits(config, loaded)
    assert (limits.max_model_len, limits.window) == (300, 12)
    assert limits.num_window_blocks == runner.num_window_blocks


STARTED = """
import sys
from foveal_runtime.engine.process.assemble import scheduler_limits
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.request import Request
from foveal_runtime.main.engine import load_engine
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from foveal_runtime.plan.sampling import SamplingParams
config = EngineConfig(
    model=ModelConfig(path=sys.argv[1], max_model_len=300), num_threads=1,
    caches=EngineCaches(kv_bytes=1 << 18, block_size=8),
    scheduler=SchedulerConfig(max_num_batched_tokens=24),
)
loaded = load_engine(config)
scheduler = Scheduler(scheduler_limits(config, loaded), loaded.runner.traits, clock=lambda: 1.0)
sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
request = Request("a", list(range(3, 103)) * 2, sampling)
scheduler.add(request)
held = []
while scheduler.has_work:
    plan = scheduler.schedule()
    scheduler.update(plan, loaded.runner.execute(plan))
    scheduler.check_integrity()
    held.append((len(request.block_ids), len(request.window_ids)))
print(len(request.token_ids), max(held))
"""


@pytest.mark.extended
def test_an_engine_starts_with_both_pools(tiny) -> None:
    """Loaded and warmed up as `serve` and pods do it, and then a prompt of many windows."""
    command = [sys.executable, "-c", STARTED, str(tiny("gemma2_softcap"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "220 (28, 3)", done.stdout


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "qwen3_5"])
def test_other_models_have_one_pool(name: str, bench, tiny) -> None:
    """None with a window, all with one, and recurrent state."""
    one = bench(name)
    assert one.runner.window == one.runner.window_block_bytes == 0
    assert not one.runner._pool.windowed
    profile = profiler.predict(str(tiny(name)), "float32")
    assert not profile.window_pool
    shape = KVShape(
        block_size=8, block_bytes=one.runner.kv_block_bytes, window_block_bytes=0, window=0,
        step_tokens=64, max_model_len=512,
    )  # fmt: skip
    assert shape.divide(100 * one.runner.kv_block_bytes) == (100, 0)


@pytest.mark.extended
def test_two_ranks_have_two_pools_each(bench, tiny) -> None:
    name = "gemma2_softcap"
    one = bench(name, reuse=False, num_window_blocks=NUM_WINDOW_BLOCKS)
    runner = TensorParallelRunner.load(str(tiny(name)), 2, attention="torch", block_size=8)
    try:
        runner.allocate_kv(NUM_BLOCKS, num_window_blocks=NUM_WINDOW_BLOCKS)
        assert 2 * runner.window_block_bytes == one.runner.window_block_bytes
        outputs = []
        for each in (one.runner, runner):
            jobs = [one.job(f"{i}", long_prompt(one, i), ignore_eos=True) for i in range(3)]
            engine = Engine(
                one, num_snapshots=0, num_window_blocks=NUM_WINDOW_BLOCKS, window=runner.window
            )
            engine.one = replace_runner(one, each)
            engine.run(*jobs)
            outputs.append([job.outputs for job in jobs])
        assert outputs[0] == outputs[1]
    finally:
        runner.close()


def replace_runner(one, runner):
    one.runner = runner
    return one
