"""Keys and values kept in fewer bits than the model computes with: `caches.kv.dtype`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foveal_runtime.main.engine import kv_blocks
from foveal_runtime.model.attention import (
    FP8,
    FP8_MAX,
    BackendRequest,
    KVPool,
    create_backend,
    kv_dtypes,
)
from foveal_runtime.model.attention.torch_backend import TorchBackend, to_fp8
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig
from foveal_runtime.plan.profile import ModelProfile
from tests.support.models.attention_batches import CPU, DEVICE, batch, geometry, on_device, pool_as

LENGTHS = [(1, 1), (1, 37), (9, 21), (3, 14), (6, 6)]


def narrow(context, layer):
    """The same batch over an FP8 pool."""
    pool = KVPool([layer], context.pool.num_blocks, context.pool.block_size, FP8, CPU,
                  context.pool.dtype)  # fmt: skip
    pool.keys = [to_fp8(t) for t in context.pool.keys]
    pool.values = [to_fp8(t) for t in context.pool.values]
    return replace(context, pool=pool)


def request(layer, dtype: torch.dtype) -> BackendRequest:
    return BackendRequest((layer,), 8, dtype, DEVICE, FP8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_fp8_is_read_as_what_it_holds(name: str, dtype: torch.dtype) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    layer = geometry(32, 3)
    context, query = batch(layer, LENGTHS, 8, dtype)
    narrowed = narrow(context, layer)
    held = replace(narrowed, pool=pool_as(narrowed.pool, torch.float32))
    want = TorchBackend().attend(layer, query.float(), held)
    backend = create_backend(name, request(layer, dtype))
    got = backend.attend(layer, query.to(DEVICE), on_device(narrowed))
    assert got.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float().cpu(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_what_fp8_cannot_hold_is_cut_and_never_becomes_nan(name: str) -> None:
    """e4m3 has no infinity: a plain conversion of 449 and more gives NaN, for ever in the pool."""
    if name == "triton":
        pytest.importorskip("triton")
    layer = geometry(16, 1)
    context, _ = batch(layer, [(4, 4)], 8, torch.float32)
    context = on_device(narrow(context, layer))
    exact = torch.tensor([0.0, 1.5, -240.0, 1e4, -1e30, 448.0, 0.015625, -3.25]).repeat(4)
    key = exact.view(1, 2, 16).expand(4, 2, 16).to(DEVICE)
    create_backend(name, request(layer, torch.float32)).write_kv(layer, key, -key, context)
    for pool, given in ((context.pool.keys[0], key), (context.pool.values[0], -key)):
        rows = pool.view(torch.uint8)[context.slots].view(FP8).float()
        assert torch.equal(rows, given.clamp(-FP8_MAX, FP8_MAX))


def test_what_is_kept_and_what_is_computed_with() -> None:
    assert kv_dtypes("auto", torch.float32) == (torch.float32, torch.float32)
    assert kv_dtypes("bfloat16", torch.float32) == (torch.bfloat16, torch.bfloat16)
    assert kv_dtypes("fp8", torch.bfloat16) == (FP8, torch.bfloat16)


@pytest.mark.parametrize(("kv_dtype", "part", "most"), [("bfloat16", 2, 0.02), ("fp8", 4, 0.15)])
@pytest.mark.parametrize(("name", "attention"), [("llava", "cpu"), ("gemma3", "torch")])
def test_a_model_says_nearly_the_same(
    name: str, attention: str, kv_dtype: str, part: int, most: float, bench
) -> None:
    """Mean deviation of the logits over their spread: random weights tell it larger than it is."""
    plain, one = bench(name), bench(name, attention=attention, kv_dtype=kv_dtype)
    assert one.runner.kv_block_bytes * part == plain.runner.kv_block_bytes
    prompt = one.prompt(1, [(0, 1)], num_text=30)
    job = one.job("a", prompt)
    one.driver.run([job])
    assert not one.driver.failed
    one.deviation(job, prompt)
    print(f"{name} {kv_dtype}: {one.mean_deviation / one.spread:.4f} of the spread")
    assert 0 < one.mean_deviation < most * one.spread


def test_kv_memory_of_the_document_is_that_of_all_ranks() -> None:
    """Regression: every rank took as much as was meant for all of them, so that an engine of
    several devices asked each for several times its KV memory."""
    caches = EngineCaches(kv_bytes=1 << 30)
    config = EngineConfig(model=ModelConfig(path="x"), caches=caches, tensor_parallel=4)
    assert kv_blocks(config, 4096, 1 << 20) == (256, 0)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "token"),
    [
        ("float32", "auto", 1024), ("float32", "bfloat16", 512), ("float32", "fp8", 256),
        ("bfloat16", "bfloat16", 1024), ("bfloat16", "fp8", 512), ("float64", "fp8", 1024),
    ],
)  # fmt: skip
def test_the_budget_counts_what_is_kept(dtype: str, kv_dtype: str, token: int) -> None:
    profile = ModelProfile(dtype=dtype, max_model_len=9, weight_bytes=1, kv_bytes_per_token=1024)
    assert profile.kv_token_bytes(kv_dtype) == token


def test_the_budget_and_the_pool_agree(tiny) -> None:
    from foveal_runtime.model import profiler

    path = str(tiny("llama"))
    profile = profiler.predict(path)
    for kv_dtype in ("auto", "bfloat16", "fp8"):
        runner = TorchRunner.load(path, kv_dtype=kv_dtype, block_size=8, attention="torch")
        assert runner.kv_block_bytes == 8 * profile.kv_token_bytes(kv_dtype)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_triton_says_what_torch_says_of_a_model_in_fp8(bench) -> None:
    """In the interpreter, whose rounding to fp8 is a little off: so a model of few layers."""
    pytest.importorskip("triton")
    spread, logits = 1.0, []
    for attention in ("torch", "triton"):
        one = bench("gemma2_softcap", attention=attention, kv_dtype="fp8")
        prompt = one.prompt(1, num_text=20)
        job = one.job("a", prompt)
        one.driver.run([job])
        one.deviation(job, prompt)
        spread = one.spread
        logits.append(one.sampler.logits["a", 0])
    assert (logits[0] - logits[1]).abs().mean() < 0.1 * spread
