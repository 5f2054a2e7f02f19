"""Quantised weights by the GPU's kernels, in Triton's interpreter or on a GPU, against their
dequantised twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.checkpoint import blocked, dequantize, loader
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear, quantize_linears
from foveal_runtime.model.checkpoint.quantized import StoredAs
from foveal_runtime.model.layers.forward import Forward
from tests.support.models.bench import DEVICE, Bench
from tests.support.models.quantised import FORMATS, make

pytest.importorskip("triton")
from foveal_runtime.model.gpu import code_kernels, codes
from foveal_runtime.model.layers import gpu_layer
from tests.support.models.triton_compile import SMALL_CARD_BYTES, compiled

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}
"""Of the largest result: the order of sums; otherwise rounding, and in bfloat16 that the
interpreter cuts numbers off instead."""
NUM_ROWS = (1, 17, 33, codes.MOST_FEW + 1)
KINDS = ["int4", "int4 zeros", "int8", "int8 zeros", "fp8", "fp8 outputs", "fp8 blocks"]
SIZES = [(16, 64), (48, 352), (16, 1024)]
"""Less than a warp multiplies at a time, more but not whole times, whole times of four warps. In
the interpreter a product takes as long as there are steps of 16 lines and 16 inputs."""


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


@pytest.mark.parametrize("rows", [4, codes.MOST_FEW + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_code_shows(kind: str, rows: int) -> None:
    layer = layer_of(kind, 48, 384)
    whole = torch.randn(rows, 384, device=DEVICE)
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
    weight = codes.Coded(numbers.to(DEVICE), torch.ones(1, 1, device=DEVICE), None, 16, 240, 240)
    one = torch.eye(240, device=DEVICE)
    product = codes.CodedProduct(weight, None, scratch_bytes=1 << 20)
    wanted = numbers.float().t().to(DEVICE)
    assert torch.equal(product(one), wanted)
    for dtype in (torch.float16, torch.bfloat16):
        few = torch.cat([product(rows) for rows in one.to(dtype).split(codes.MOST_FEW)])
        is_right = few.float() == wanted
        if DEVICE == "cpu" and dtype == torch.bfloat16:
            is_right |= wanted.abs() < 2**-6  # of subnormal ones the interpreter loses bits
        assert is_right.all()


def test_slabs_are_as_large_as_there_is_room(monkeypatch) -> None:
    layer, launched = layer_of("int4", 80, 384), []
    rows = torch.randn(codes.MOST_FEW + 1, 384, device=DEVICE)
    whole = blocked.multiply_on_gpu(layer, rows)
    monkeypatch.setattr(blocked, "_SLAB_BYTES", 33 * 384 * 4)
    mm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: launched.append(a[2].shape) or mm(*a, **k))
    torch.testing.assert_close(blocked.multiply_on_gpu(layer, rows), whole)
    assert [tuple(shape) for shape in launched] == [(384, 33), (384, 33), (384, 14)]


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_kernels_that_do_not_work_are_not_used(fault: str, monkeypatch, caplog) -> None:
    """On a GPU that they have never seen, say."""
    monkeypatch.setattr(blocked, "KERNELS", dict(blocked.KERNELS))
    holder = nn.Sequential(nn.Linear(384, 80)).requires_grad_(False)
    quantize_linears(holder, "int4")
    multiply = codes.CodedProduct.__call__

    def broken(*parts: object) -> torch.Tensor:
        if fault == "failing":
            raise RuntimeError("no such instruction")
        return multiply(*parts) * 1.1

    blocked.block_quantized(holder.to(DEVICE), "cuda")
    assert ("cuda", blocked.BLOCKED) in blocked.KERNELS
    monkeypatch.setattr(codes.CodedProduct, "__call__", broken)
    blocked.block_quantized(holder, "cuda")
    assert ("cuda", blocked.BLOCKED) not in blocked.KERNELS
    assert ("no such instruction" if fault == "failing" else "differ by 0.1") in caplog.text


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """Layers are laid out, and multiplied with, as on a GPU."""
    if DEVICE == "cpu":
        lay_out = blocked.block_quantized
        # Nothing is said to be for CPUs, so nothing of a CPU's is made of the rest.
        monkeypatch.setattr(loader, "block_quantized", lambda model, _: lay_out(model, "cuda") * 0)
        monkeypatch.setattr(loader, "pack_linears", lambda model: 0)
        for kind in (blocked.BLOCKED, "plain"):
            monkeypatch.setitem(dequantize.KERNELS, ("cpu", kind), blocked.multiply_on_gpu)


@pytest.mark.parametrize("count", [1, 33, codes.MOST_FEW + 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_follows_a_product_is_inside(kind: str, count: int) -> None:
    """The gate of an MLP, of two layers whose weights become one, and the sum with what is
    there."""
    x = torch.randn(count, 384, device=DEVICE)
    gate, up = layers = layer_of(kind, 16, 384), layer_of(kind, 16, 384)
    up.bias.data = up.bias.data + 1
    wanted = functional.silu(gate(x)) * up(x)
    bias = torch.cat([one.bias for one in layers])
    product = blocked.product_on_gpu(layers, bias, "swish")
    assert product is not None
    found = product(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    down = layer_of(kind, 48, 64)
    down.bias = None
    x, there = torch.randn(count, 64, device=DEVICE), torch.randn(count, 48, device=DEVICE)
    product = blocked.product_on_gpu([down], None)
    assert product is not None
    for is_own in (False, True):
        torch.testing.assert_close(product(x, there.clone(), is_own), there + down(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_merged_is_kept_once(kind: str) -> None:
    """Queries, keys and values of three sizes: FP8 with blocks of outputs that do not divide one
    of them, or a scale for each layer."""
    layers = [layer_of(kind, outs, 384) for outs in (80, 48, 32)]
    x = torch.randn(5, 384, device=DEVICE)
    wanted = torch.cat([one(x) for one in layers], dim=1)
    product = blocked.product_on_gpu(layers, torch.cat([one.bias for one in layers]))
    assert product is not None
    torch.testing.assert_close(product(x), wanted)
    torch.testing.assert_close(torch.cat([one(x) for one in layers], dim=1), wanted)
    names = ["weight"] if kind.startswith("fp8") else ["codes", "scales"]
    for name in [*names, "zeros"] if hasattr(layers[0], "zeros") else names:
        kept = [getattr(one, name) for one in layers]
        assert len({one.untyped_storage().data_ptr() for one in kept}) == 1, name


@pytest.mark.usefixtures("as_on_a_gpu")
def test_codes_of_different_kinds_stay_apart() -> None:
    pairs = (("int4", "int8"), ("int4", "int4 zeros"), ("fp8", "fp8 blocks"), ("int8", "fp8"))
    for kinds in pairs:
        assert blocked.product_on_gpu([layer_of(kind, 80, 384) for kind in kinds], None) is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_kernels_that_failed_are_not_merged_either(monkeypatch) -> None:
    layer = layer_of("int4", 80, 384)
    monkeypatch.delitem(dequantize.KERNELS, (DEVICE, blocked.BLOCKED))
    assert blocked.product_on_gpu([layer], None) is None


MODULES = {"AWQ", "GPTQ ordered by activations", "W4A16", "W8A8 by tensor", "W8A16 asymmetric"}
LAYERS = {"AWQ"}
"""Formats that are tried in each run; the others, when all is."""


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(name, way, marks=[] if name in usual else pytest.mark.extended)
     for way, usual in (("modules", MODULES), ("few kernels", LAYERS)) for name in FORMATS],
)  # fmt: skip
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_checkpoint_is_its_plain_twin(name: str, way: str, tiny, tmp_path, monkeypatch) -> None:
    """Through the runner."""
    made, product = [], codes.CodedProduct
    monkeypatch.setattr(codes, "CodedProduct", lambda *a, **k: made.append(a) or product(*a, **k))
    stored, plain = make(Path(tiny("llama")), tmp_path, name)
    if way == "modules":
        monkeypatch.setattr(Forward, "use_gpu_layers", lambda *_: 0)
    bench = Bench("llama", stored, plain=plain)
    if way == "few kernels":
        if DEVICE == "cpu":
            bench.runner.forward.use_gpu_layers(bench.runner.backend)
        layers = bench.runner.loaded.decoder.layers
        num_layers = sum(isinstance(one.forward, gpu_layer.GpuLayer) for one in layers)
        assert num_layers == (0 if "ordered by" in name else len(layers))
    made.clear()
    prompts = [bench.prompt(seed, [], num_text=9 + 28 * seed) for seed in range(2)]
    jobs = [bench.job(str(seed), prompt) for seed, prompt in enumerate(prompts)]
    bench.driver.run(jobs)
    for job, prompt in zip(jobs, prompts, strict=True):
        bench.check(job, prompt)
    assert bool(made) == (way == "modules" and "ordered by" not in name)


MOST_INSTRUCTIONS = {"int4,64": 6.5, "int4,128": 6.5, "int8,4096": 6.5, "fp8,128": 7.5}
"""For each code, and thread: what such a product takes besides memory."""


@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [
        ("bfloat16", 90),
        pytest.param("bfloat16", 80, marks=pytest.mark.extended),
        pytest.param("float16", 80, marks=pytest.mark.extended),
    ],
)
def test_kernels_compile_without_a_gpu(dtype: str, architecture: int) -> None:
    found = compiled(*(f"codes,{dtype},{kind},{architecture}" for kind in MOST_INSTRUCTIONS))
    assert len(found) == 5 * len(MOST_INSTRUCTIONS)
    for one in found:
        assert one["shared_bytes"] <= SMALL_CARD_BYTES, one
        assert one["spilled_bytes"] == 0, one
        assert not one["before_wait"], one  # what an earlier kernel has not written yet
    codes_each = codes.TILE[0] * int(code_kernels.PART) / 32
    for at, (kind, most) in enumerate(MOST_INSTRUCTIONS.items()):
        for one in found[5 * at : 5 * at + 4]:
            assert 0 < one["loop_instructions"] / codes_each <= most, (kind, one)
