"""The C kernel's products with weights as oneDNN packs them, of every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foveal_runtime.model.cpu.kernels import (
    BFLOAT16,
    DONE,
    DecodeKernel,
    Product,
    ProductJob,
    load_decode_kernel,
)
from foveal_runtime.model.cpu.packing import PackedLinear, can_pack, layout_of, raw_address
from tests.support.models.compiled import params_of

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no packed bfloat16 on this machine"),
    pytest.mark.skipif(isinstance(load_decode_kernel(), str), reason=str(load_decode_kernel())),
]
SHAPES = [(64, 128), (96, 96), (136, 80), (80, 576), (200 * 16, 64)]
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 64)


def multiplied(kernel: DecodeKernel, linear: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    outs, ins = linear.out_features, linear.in_features
    layout = layout_of(outs, ins, torch.bfloat16)
    if layout is None:
        pytest.skip("not laid out in a known way on this machine")
    product = Product(
        weight=raw_address(linear.weight),
        bias=linear.bias.data_ptr(),
        ins=ins,
        outs=outs,
        **layout._asdict(),
    )
    rows = rows.contiguous()
    out = rows.new_empty(len(rows), outs)
    threads = torch.get_num_threads()
    addresses = {"x": rows.data_ptr(), "out": out.data_ptr()}
    job = ProductJob(BFLOAT16, threads, len(rows), product=product, **addresses)
    assert kernel.multiply(job) == DONE
    return out


def linear_of(outs: int, ins: int, weight: torch.Tensor, bias: torch.Tensor) -> PackedLinear:
    linear = nn.Linear(ins, outs, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return PackedLinear(linear)


@pytest.mark.parametrize("path", params_of("decode_layers"))
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_sums_of_whole_numbers_are_exact(outs, ins, path):
    """All 8 bits of every input and weight count, so nothing of them is cut off."""
    torch.manual_seed(outs)
    rows = torch.randint(-255, 256, (7, ins)).bfloat16()
    weight = torch.randint(-31, 32, (outs, ins)).bfloat16()
    bias = torch.randint(-9, 10, (outs,)).bfloat16()
    wanted = rows.double() @ weight.double().t() + bias.double()
    assert wanted.abs().max() < 2**24
    got = multiplied(DecodeKernel(path), linear_of(outs, ins, weight, bias), rows)
    assert torch.equal(got, wanted.bfloat16())


@pytest.mark.parametrize("path", params_of("decode_layers"))
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_a_row_is_the_same_bits_in_any_company(outs, ins, path):
    torch.manual_seed(ins)
    rows = torch.randn(NUM_ROWS[-1] + 1, ins).bfloat16()
    weight, bias = torch.randn(outs, ins).bfloat16(), torch.randn(outs).bfloat16()
    kernel, linear = DecodeKernel(path), linear_of(outs, ins, weight, bias)
    whole = multiplied(kernel, linear, rows)
    wanted = rows.double() @ weight.double().t() + bias.double()
    apart = (whole.double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert float(apart.max()) <= 2**-8
    for count in NUM_ROWS:
        some = slice(1, 1 + count)
        assert torch.equal(multiplied(kernel, linear, rows[some]), whole[some]), count
