"""KV memory in blocks of one pool or two: what a request needs, and how bytes are divided."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal_runtime.main.engine import kv_blocks
from foveal_runtime.plan.budget.kv import KVBlocks, KVShape, window_blocks
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.budget.types import BudgetInputs, EngineInputs
from foveal_runtime.plan.config import (
    GIB,
    EngineCaches,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from foveal_runtime.plan.profile import ModelProfile, decode

PROFILES = Path(__file__).parents[3] / "examples/profiles"


def profile_of(name: str) -> ModelProfile:
    return decode((PROFILES / f"{name}.json").read_bytes())


def inputs(memory: int, **engine: object) -> BudgetInputs:
    return BudgetInputs(engine=EngineInputs(device="gpu", device_bytes=memory, **engine))


@pytest.mark.parametrize(
    ("name", "one_pool", "two_pools"),
    [("gemma3-4b", 17.0, 2.85), ("gemma3-12b", 48.0, 8.95), ("gemma3-27b", 62.0, 11.24)],
)
def test_a_request_of_131072_tokens(name: str, one_pool: float, two_pools: float) -> None:
    """GiB that the plan wants at least, with chunks of 2,048 tokens."""
    profile = profile_of(name)
    (problem,) = [
        one for one in plan(inputs(1000 * GIB, kv_bytes=1), profile).problems if one.term == "kv"
    ]
    assert problem.needed / GIB == pytest.approx(two_pools, abs=0.01)
    older = msgspec.structs.replace(profile, window_pool=False)  # of an image that has one pool
    (problem,) = [
        one for one in plan(inputs(1000 * GIB, kv_bytes=1), older).problems if one.term == "kv"
    ]
    assert problem.needed / GIB == pytest.approx(one_pool, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_makes_the_pools_of_the_plan(ranks: int, kv_dtype: str) -> None:
    profile = profile_of("gemma3-12b")
    found = plan(inputs(80 * GIB, num_devices=ranks, kv_dtype=kv_dtype), profile)
    assert found.fits
    config = EngineConfig(
        model=ModelConfig(path="/models/gemma3"),
        caches=EngineCaches(kv_bytes=found.kv_bytes, block_size=16),
        scheduler=SchedulerConfig(max_num_batched_tokens=2048),
        tensor_parallel=ranks,
    )
    block_bytes = 16 * profile.kv_token_bytes(kv_dtype) // ranks
    window_bytes = 16 * profile.window_token_bytes(kv_dtype) // ranks
    blocks = kv_blocks(config, 131_072, block_bytes, window_bytes, profile.window)
    assert (blocks.whole - 1) * 16 == found.kv_tokens >= 131_072
    assert blocks.window * window_bytes * ranks == found.kv_window_bytes
    line = (found.device or found.engine).line("kv")
    assert line.num_items == blocks.whole
    assert line.bytes * ranks >= blocks.whole * (block_bytes - window_bytes) * ranks + (
        found.kv_window_bytes
    )
    (note,) = [note for note in found.notes if "sliding window" in note]
    each = {"auto": "0.94", "fp8": "0.47"}[kv_dtype]
    assert f"of a request of 131072 tokens they keep at most {each} GiB" in note


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_devices_share_kv_memory_of_a_given_size(ranks: int) -> None:
    asked = inputs(80 * GIB, num_devices=ranks, kv_bytes=20 * GIB)
    found = plan(asked, profile_of("gemma3-12b"))
    assert found.device is not None
    assert found.device.line("kv").bytes == 20 * GIB // ranks
    assert found.fits


SHAPES = st.builds(
    KVShape,
    block_size=st.sampled_from([1, 8, 16]),
    block_bytes=st.integers(50, 120),
    window_block_bytes=st.integers(0, 49),
    window=st.integers(1, 300),
    step_tokens=st.integers(1, 600),
    max_model_len=st.integers(2, 3000),
)


def bytes_of(shape: KVShape, blocks: KVBlocks) -> int:
    if not shape.has_windows:
        return blocks.whole * shape.block_bytes
    each = shape.block_bytes - shape.window_block_bytes
    return blocks.whole * each + blocks.window * shape.window_block_bytes


@given(shape=SHAPES, num_bytes=st.integers(0, 400_000), more=st.integers(0, 5_000))
def test_blocks_fit_and_never_become_fewer(shape: KVShape, num_bytes: int, more: int) -> None:
    less, larger = shape.divide(num_bytes), shape.divide(num_bytes + more)
    for blocks, size in ((less, num_bytes), (larger, num_bytes + more)):
        assert bytes_of(shape, blocks) <= size
        assert 0 <= blocks.window <= blocks.whole
        assert (blocks.window > 0) == (shape.has_windows and blocks.whole > 0)
        assert 0 <= size - bytes_of(shape, blocks) < 2 * shape.block_bytes
    assert less.whole <= larger.whole
    assert less.window <= larger.window


@given(shape=SHAPES)
def test_the_floor_serves_the_longest_request(shape: KVShape) -> None:
    blocks, wanted = shape.divide(shape.floor_bytes), shape.request_blocks
    assert shape.num_tokens(shape.floor_bytes) >= shape.max_model_len
    if not shape.has_windows:
        # One is the engine's padding: without it, its context was a block shorter than planned.
        assert blocks == (wanted.whole + 1, 0)
        return
    assert blocks.whole > wanted.whole
    assert blocks.window > wanted.window
    # A set less, and it would not: that is what the floor is rounded up to.
    fewer = shape.divide(shape.floor_bytes - 2 * shape.block_bytes)
    assert fewer.whole - 1 < wanted.whole or fewer.window - 1 < wanted.window


@given(shape=SHAPES, num_bytes=st.integers(0, 400_000))
def test_an_engine_that_holds_less_serves_shorter_requests(shape: KVShape, num_bytes: int) -> None:
    """Its longest request then has room in both pools, whatever the memory."""
    blocks = shape.divide(num_bytes)
    if blocks.window > 1:
        length = min(shape.max_model_len, (blocks.whole - 1) * shape.block_size)
        most = window_blocks(shape.window, shape.step_tokens, shape.block_size)
        assert min(shape.num_blocks(length), most) <= blocks.window - 1


def test_a_request_whose_chunk_is_all_of_it_needs_padding_beside_it() -> None:
    """Its windows are as many blocks as its context, so a pool apart saves nothing at its longest.
    A set of blocks less would hold 8,176 tokens and refuse the rest."""
    shape = KVShape(
        block_size=16, block_bytes=48, window_block_bytes=40, window=1024, step_tokens=8192,
        max_model_len=8192,
    )  # fmt: skip
    assert shape.request_blocks == (512, 512)
    assert shape.floor_bytes == 513 * 48
    assert shape.divide(512 * 48) == (512, 512)
    assert shape.num_tokens(512 * 48) == 8176


def test_requests_within_the_window_leave_one_pool() -> None:
    shape = KVShape(
        block_size=16, block_bytes=100, window_block_bytes=80, window=1024, step_tokens=2048,
        max_model_len=1024,
    )  # fmt: skip
    assert not shape.has_windows
    assert shape.divide(10_050) == (100, 0)
    assert shape.floor_bytes == 6_500
    assert shape.num_tokens(6_500) == 1024
