"""What the scheduler may hand out: of the engine's configuration, its device and its model."""

from dataclasses import replace

import msgspec
import pytest

from foveal_runtime.engine.process.assemble import (
    CPU_MIXED_GROWTH,
    CPU_SHORT_GROWTH,
    LoadedEngine,
    scheduler_limits,
)
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS, FakeRunner
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from foveal_runtime.plan.errors import StartupError


def test_limits_come_from_the_configuration():
    runner = FakeRunner(num_blocks=100, block_size=16)
    loaded = LoadedEngine(
        runner=runner, num_blocks=100, max_model_len=10_000,
        largest={"image": LargestItem(3000, 2900)},
    )  # fmt: skip
    config = EngineConfig(model=ModelConfig(path="/m"))
    limits = scheduler_limits(config, loaded)
    assert (limits.encoder_compute_embeds, limits.encoder_cache_embeds) == (2900, 2900)
    assert limits.max_model_len == 1584, "no request may outgrow the KV cache"
    assert limits.max_num_mixed_tokens == 256
    assert limits.num_reserved_blocks == 0
    untouched = msgspec.structs.replace(config, caches=EngineCaches(kv_touched=False))
    assert scheduler_limits(untouched, loaded).num_reserved_blocks == 86, "7/8 of 99"
    on_gpu = msgspec.structs.replace(untouched, device="cuda")
    assert scheduler_limits(on_gpu, loaded).num_reserved_blocks == 0
    half = msgspec.structs.replace(runner.traits, value_bytes=2)
    loaded = replace(loaded, runner=FakeRunner(num_blocks=100, block_size=16, traits=half))
    assert scheduler_limits(config, loaded).max_num_mixed_tokens == 512, "a step takes half as long"
    config = msgspec.structs.replace(
        config, scheduler=SchedulerConfig(disable_chunked_mm_input=True)
    )
    with pytest.raises(StartupError, match=r"3000.*2048"):
        scheduler_limits(config, loaded)


def limits_of(device="cpu", tensor_parallel=1, state_bytes=0, **scheduler):
    config = EngineConfig(
        model=ModelConfig(path="/m"), device=device, tensor_parallel=tensor_parallel,
        scheduler=SchedulerConfig(**scheduler),
    )  # fmt: skip
    traits = msgspec.structs.replace(FAKE_TRAITS, state_bytes=state_bytes)
    runner = FakeRunner(num_blocks=100, block_size=16, traits=traits)
    largest = {"image": LargestItem(24, 24)}
    loaded = LoadedEngine(runner=runner, num_blocks=100, max_model_len=1000, largest=largest)
    return scheduler_limits(config, loaded)


def test_a_target_for_gaps_is_in_milliseconds():
    assert limits_of().target_itl_seconds == 0
    assert limits_of(target_itl_ms=75).target_itl_seconds == 0.075


def test_a_recurrent_state_takes_back_no_guess():
    assert limits_of(num_speculative_tokens=4).num_speculative_tokens == 4
    with pytest.raises(StartupError, match="num_speculative_tokens 4: a recurrent state"):
        limits_of(num_speculative_tokens=4, state_bytes=64)


def test_steps_beside_streams_grow_on_cpus_without_a_bound():
    cpu, gpu, bounded = limits_of(), limits_of("cuda"), limits_of(max_num_mixed_tokens=100)
    assert (cpu.mixed_growth, cpu.short_growth) == (CPU_MIXED_GROWTH, CPU_SHORT_GROWTH)
    assert cpu.mixed_growth > cpu.short_growth > 0
    for limits in (gpu, bounded):
        assert (limits.mixed_growth, limits.short_growth) == (0, 0)
    assert (gpu.max_num_mixed_tokens, bounded.max_num_mixed_tokens) == (0, 100)


def test_encoding_is_sliced_by_one_process_on_a_cpu():
    assert limits_of().slices_encoding
    assert not limits_of("cuda").slices_encoding
    assert not limits_of(tensor_parallel=2).slices_encoding
