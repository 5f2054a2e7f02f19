"""The C kernel's products with weights as they are, in pairs or packed by oneDNN, of every
instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foveal_runtime.model.cpu import kernels
from foveal_runtime.model.cpu.fusing import unpacked_product
from foveal_runtime.model.cpu.kernels import (
    DONE,
    MOST_IN_ORDER,
    DecoderKernel,
    Product,
    ProductJob,
)
from foveal_runtime.model.cpu.packing import (
    DTYPES,
    PackedLinear,
    PairedLinear,
    packed_class,
)
from tests.support.models.compiled import NEEDS_KERNEL, params_of

pytestmark = NEEDS_KERNEL


def packed(dtype: torch.dtype) -> object:
    lacks = packed_class(dtype) is not PackedLinear
    mark = pytest.mark.skipif(lacks, reason=f"oneDNN has no {dtype} products here")
    return pytest.param(PackedLinear, dtype, marks=mark)


KINDS = [
    (nn.Linear, torch.float32),
    (nn.Linear, torch.bfloat16),
    (PairedLinear, torch.bfloat16),
    packed(torch.float32),
    packed(torch.bfloat16),
]
SHAPES = [(64, 128), (96, 96), (136, 80), (80, 576), (200 * 16, 64)]
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 64, 97)


def product_of(kind: type[nn.Module], linear: nn.Linear) -> tuple[nn.Module, Product]:
    if kind is nn.Linear:
        return linear, unpacked_product(linear)
    layer = kind(linear)
    if (product := layer.product()) is None:
        pytest.skip("not laid out in a known way on this machine")
    return layer, product


def multiplied(kernel: DecoderKernel, product: Product, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    out = rows.new_empty(len(rows), product.outs)
    threads = torch.get_num_threads()
    addresses = {"x": rows.data_ptr(), "out": out.data_ptr()}
    job = ProductJob(DTYPES[rows.dtype], threads, len(rows), product=product, **addresses)
    assert kernel.multiply(job) == DONE
    return out


def linear_of(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(*weight.t().shape, dtype=weight.dtype).requires_grad_(False)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear


@pytest.mark.parametrize("path", params_of("decoder_layers"))
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_sums_of_whole_numbers_are_exact(kind, dtype, outs, ins, path):
    """All 8 bits of every input and weight count, so nothing of them is cut off."""
    torch.manual_seed(outs)
    weight = torch.randint(-31, 32, (outs, ins)).to(dtype)
    bias = torch.randint(-9, 10, (outs,)).to(dtype)
    layer, product = product_of(kind, linear_of(weight, bias))
    for count in (1, 7, 40):
        rows = torch.randint(-255, 256, (count, ins)).to(dtype)
        wanted = rows.double() @ weight.double().t() + bias.double()
        assert wanted.abs().max() < 2**24
        got = multiplied(DecoderKernel(path), product, rows)
        assert torch.equal(got, wanted.to(dtype))
    assert layer is not None  # the product's addresses are its


@pytest.mark.parametrize("path", params_of("decoder_layers"))
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_row_is_the_same_bits_in_any_company(kind, dtype, outs, ins, path, monkeypatch):
    torch.manual_seed(ins)
    rows = torch.randn(NUM_ROWS[-1] + 1, ins).to(dtype)
    weight, bias = torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype)
    kernel = DecoderKernel(path)
    layer, product = product_of(kind, linear_of(weight, bias))
    whole = multiplied(kernel, product, rows)
    wanted = rows.double() @ weight.double().t() + bias.double()
    summed = rows.double().abs() @ weight.double().abs().t()
    rounded = wanted.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-23)
    assert ((whole.double() - wanted).abs() <= summed * 2**-20 + rounded).all()
    for most in (0, 7, 96):
        monkeypatch.setattr(kernel, "most_in_order", most)
        for count in NUM_ROWS:
            some = slice(1, 1 + count)
            assert torch.equal(multiplied(kernel, product, rows[some]), whole[some]), (most, count)
    assert layer is not None


@pytest.mark.parametrize("path", [p for p in params_of("decoder_layers") if "v4" in str(p.id)])
def test_few_rows_take_weights_chunk_by_chunk_on_intels_cpus_alone(path, monkeypatch):
    for vendor, rows in (("GenuineIntel", MOST_IN_ORDER), ("AuthenticAMD", 0), ("", 0)):
        monkeypatch.setattr(kernels, "cpu_vendor", lambda vendor=vendor: vendor)
        assert DecoderKernel(path).most_in_order == rows
    monkeypatch.undo()
    DecoderKernel(path)  # as this CPU wants it
