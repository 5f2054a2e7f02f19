"""Quantised weights by the GPU's kernels, in Triton's interpreter or on a GPU, against their
dequantised twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from foveal_runtime.model.checkpoint import blocked, dequantize, loader
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear, quantize_linears
from foveal_runtime.model.checkpoint.quantized import StoredAs
from tests.support.models.bench import DEVICE, Bench
from tests.support.models.quantised import FORMATS, make

pytest.importorskip("triton")
from foveal_runtime.model.gpu import codes
from tests.support.models.triton_compile import SMALL_CARD_BYTES, compiled

pytestmark = pytest.mark.model
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}
"""Of the largest result: the order of sums; otherwise rounding, and in bfloat16 that the
interpreter cuts numbers off instead."""
NUM_ROWS = (1, 5, 16, 17, codes.MOST_FEW, codes.MOST_FEW + 1, 70)
KINDS = ["int4", "int4 zeros", "int8", "int8 zeros", "fp8", "fp8 outputs", "fp8 blocks"]
SIZES = [(48, 64), (80, 320), (32, 640)]


def layer_of(kind: str, outs: int, ins: int) -> QuantizedLinear:
    torch.manual_seed(outs + ins)
    linear = nn.Linear(ins, outs).requires_grad_(False).to(DEVICE)
    name, _, more = kind.partition(" ")
    if name == "fp8":
        rows, columns = {"outputs": (1, ins), "blocks": (32, 128)}.get(more, (outs, ins))
        shape = (-(-outs // rows), -(-ins // columns))
        stored = {
            "weight": torch.randn(outs, ins).mul_(20).to(torch.float8_e4m3fn),
            "weight_scale": torch.rand(shape if more else ()) / 50 + 0.01,
        }
        layout = StoredAs("plain", 8, "weight_scale", rows, columns)
        return QuantizedLinear(linear, layout, stored).to(DEVICE)
    holder = nn.Sequential(linear)
    assert quantize_linears(holder, name) == 1
    layer = holder[0]
    if more and name == "int8":
        zeros = torch.randint(-9, 10, layer.weight_scale.shape, dtype=torch.int8)
        layer.register_buffer("weight_zero_point", zeros.to(DEVICE))
    elif more:
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (outs // 8, layer.weight_scale.shape[1]))
        layer.register_buffer("weight_zero_point", words.int().to(DEVICE))
    weight = layer.dequantized()
    assert blocked.block_quantized(holder, "cuda") == 1
    torch.testing.assert_close(layer.dequantized(), weight, rtol=0, atol=0)
    return layer


def off(layer: QuantizedLinear, rows: torch.Tensor) -> float:
    """The largest difference from the dequantised weight's product, of the largest result."""
    got = blocked.multiply_on_gpu(layer, rows)
    assert got.dtype == rows.dtype
    weight = layer.dequantized().to(rows.dtype).double()
    wanted = rows.double() @ weight.t() + layer.bias.double()
    assert got.shape == wanted.shape
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantised_weights(kind: str, dtype: torch.dtype) -> None:
    for outs, ins in SIZES:
        layer = layer_of(kind, outs, ins)
        layer.bias.data = layer.bias.data.to(dtype)
        rows = torch.randn(NUM_ROWS[-1], ins, device=DEVICE).to(dtype)
        for count in NUM_ROWS:
            assert off(layer, rows[:count]) <= BOUND[dtype], (outs, ins, count)


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_code_shows(kind: str, rows: int) -> None:
    layer = layer_of(kind, 80, 320)
    whole = torch.randn(rows, 320, device=DEVICE)
    wanted = blocked.multiply_on_gpu(layer, whole)
    name = "weight" if kind.startswith("fp8") else "codes"
    getattr(layer, name).view(torch.uint8).view(-1)[77] ^= 2
    apart = (blocked.multiply_on_gpu(layer, whole) - wanted).abs().max() / wanted.abs().max()
    assert apart > 10 * BOUND[torch.float32]


def test_every_code_of_a_byte_is_widened() -> None:
    """All finite float8 numbers, subnormal ones among them, as torch widens them."""
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits.view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()][:240].repeat(16, 1)
    weight = codes.Coded(numbers.to(DEVICE), torch.ones(1, 1, device=DEVICE), None, 16, 240)
    one = torch.eye(240, device=DEVICE)
    found = codes.multiply_codes(one, weight, None, 1 << 20)
    assert torch.equal(found, numbers.float().t().to(DEVICE))


def test_slabs_are_as_large_as_there_is_room(monkeypatch) -> None:
    layer, launched = layer_of("int4", 80, 320), []
    rows = torch.randn(40, 320, device=DEVICE)
    whole = blocked.multiply_on_gpu(layer, rows)
    monkeypatch.setattr(blocked, "SCRATCH_BYTES", 2 * 33 * 320 * 4)
    mm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: launched.append(a[2].shape) or mm(*a, **k))
    torch.testing.assert_close(blocked.multiply_on_gpu(layer, rows), whole)
    assert [tuple(shape) for shape in launched] == [(320, 33), (320, 33), (320, 14)]


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_kernels_that_do_not_work_are_not_used(fault: str, monkeypatch, caplog) -> None:
    """On a GPU that they have never seen, say."""
    monkeypatch.setattr(blocked, "KERNELS", dict(blocked.KERNELS))
    holder = nn.Sequential(nn.Linear(320, 80)).requires_grad_(False)
    quantize_linears(holder, "int4")
    multiply = codes.multiply_codes

    def broken(*parts: object) -> torch.Tensor:
        if fault == "failing":
            raise RuntimeError("no such instruction")
        return multiply(*parts) * 1.1

    blocked.block_quantized(holder.to(DEVICE), "cuda")
    assert ("cuda", blocked.BLOCKED) in blocked.KERNELS
    monkeypatch.setattr(codes, "multiply_codes", broken)
    blocked.block_quantized(holder, "cuda")
    assert ("cuda", blocked.BLOCKED) not in blocked.KERNELS
    assert ("no such instruction" if fault == "failing" else "differ by 0.1") in caplog.text


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_its_plain_twin(name: str, tiny, tmp_path, monkeypatch) -> None:
    """Through the runner, with layers laid out as on a GPU."""
    if DEVICE == "cpu":
        lay_out = blocked.block_quantized
        monkeypatch.setattr(loader, "block_quantized", lambda model, device: lay_out(model, "cuda"))
        for kind in (blocked.BLOCKED, "plain"):
            monkeypatch.setitem(dequantize.KERNELS, ("cpu", kind), blocked.multiply_on_gpu)
    calls = []
    multiply = codes.multiply_codes
    monkeypatch.setattr(codes, "multiply_codes", lambda *a: calls.append(a) or multiply(*a))
    stored, plain = make(Path(tiny("llama")), tmp_path, name)
    bench = Bench("llama", stored, plain=plain)
    prompts = [bench.prompt(seed, [], num_text=9 + 28 * seed) for seed in range(2)]
    jobs = [bench.job(str(seed), prompt) for seed, prompt in enumerate(prompts)]
    bench.driver.run(jobs)
    for job, prompt in zip(jobs, prompts, strict=True):
        bench.check(job, prompt)
    assert bool(calls) == ("ordered by" not in name)


def test_kernels_compile_without_a_gpu() -> None:
    found = compiled(*(f"codes,{dtype},{kind},{architecture}"
                       for kind in ("int4,64", "int4,128", "int8,4096", "fp8,128")
                       for dtype in ("bfloat16", "float32")
                       for architecture in (80, 90)))  # fmt: skip
    assert len(found) == 3 * 4 * 2 * 2
    for one in found:
        assert one["shared_bytes"] <= SMALL_CARD_BYTES, one
        assert one["spilled_bytes"] == 0, one
