"""Packed linear layers compute what plain ones do, and only plain ones are replaced."""

from pathlib import Path

import pytest
import torch
from torch import nn

from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu.fusing import FEW_ROWS, fuse
from foveal_runtime.model.cpu.kernels import has_slow_dots
from foveal_runtime.model.cpu.packing import (
    MORE_ROWS,
    PackedLinear,
    PairedLinear,
    can_pack,
    has_kernel,
    pack_linears,
    packed_class,
)

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this torch has no oneDNN linear layers"
)
needs_kernel = pytest.mark.skipif(
    not can_pack(torch.float32) or not has_kernel(), reason="no C kernel for this machine"
)


class Other(nn.Linear):
    """A subclass has a forward of its own."""

    def forward(self, rows):
        return super().forward(rows) + 1


@needs_packing
def test_bfloat16_is_packed_where_anything_multiplies_it():
    """Or what is tested of such layers is skipped as if the CPU had none."""
    alone = PairedLinear if has_kernel() else None
    has_products = torch.ops.mkldnn._is_mkldnn_bf16_supported() and not has_slow_dots()
    assert packed_class(torch.bfloat16) is (PackedLinear if has_products else alone)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 96), (1, 1, 96), (2, 3, 96), (577, 96), (0, 96)])
def test_a_packed_layer_computes_the_same(shape, dtype, bias):
    if not can_pack(dtype):
        pytest.skip(f"no packed {dtype} on this machine")
    torch.manual_seed(1)
    linear = nn.Linear(96, 130, bias=bias).to(dtype)
    holder = nn.ModuleDict({"one": linear})
    rows = torch.randn(*shape).to(dtype)
    wanted = linear(rows)
    assert pack_linears(holder) == 1
    assert isinstance(holder["one"], PackedLinear)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    with torch.inference_mode():
        got = holder["one"](rows)
    assert got.shape == wanted.shape
    assert torch.allclose(got, wanted, atol=tolerance, rtol=tolerance)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outs", [64, 130, 17])
def test_packing_keeps_every_bit(outs, dtype):
    if not can_pack(dtype):
        pytest.skip(f"no packed {dtype} on this machine")
    torch.manual_seed(1)
    linear = nn.Linear(96, outs, bias=False).to(dtype).requires_grad_(False)
    holder = nn.ModuleDict({"one": linear})
    assert pack_linears(holder) == 1
    assert torch.equal(holder["one"](torch.eye(96, dtype=dtype)).t(), linear.weight)


@needs_packing
def test_strided_rows():
    torch.manual_seed(1)
    linear = nn.Linear(32, 48)
    rows = torch.randn(7, 64)[::2, ::2]
    holder = nn.Sequential(linear)
    wanted = linear(rows)
    pack_linears(holder)
    assert torch.allclose(holder(rows), wanted, atol=1e-5)


def test_what_is_shared_or_special_stays():
    """A tied head would otherwise take its memory twice."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(40, 32), "head": nn.Linear(32, 40, bias=False), "own": Other(32, 8)}
    )
    model["head"].weight = model["embed"].weight
    hooked = model["hooked"] = nn.Linear(32, 8)
    hooked.register_forward_hook(lambda *_: None)
    assert pack_linears(model) == 0
    assert model["head"].weight is model["embed"].weight


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 5, FEW_ROWS, FEW_ROWS + 1, MORE_ROWS + 1])
def test_rows_go_through_a_tied_head_as_it_lies(num_rows, dtype):
    if not can_pack(dtype):
        pytest.skip(f"no packed {dtype} on this machine")
    torch.manual_seed(3)
    for outs, ins, bias in ((130, 100, True), (16, 4096, False), (1, 33, True)):
        head = nn.Linear(ins, outs, bias=bias).to(dtype).requires_grad_(False)
        embeddings = nn.Embedding(outs, ins)
        embeddings.weight = head.weight
        model = nn.ModuleDict({"embed": embeddings, "head": head, "packed": nn.Linear(8, 8)})
        rows = torch.randn(2, num_rows, ins)[1:].to(dtype)
        wanted = nn.functional.linear(
            rows.double(), head.weight.double(), head.bias.double() if bias else None
        )
        assert pack_linears(model) == 1
        fuse(model)
        assert "forward" in head.__dict__
        assert head.weight is embeddings.weight
        got = model["head"](rows)
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        assert torch.allclose(got.double(), wanted, atol=tolerance, rtol=tolerance)
        with pytest.raises(RuntimeError):
            head(torch.zeros(1, ins + 1, dtype=dtype))


@needs_kernel
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_bfloat16_convolutions_are_summed_in_float32(kind):
    torch.manual_seed(4)
    layer = kind(3, 8, kernel_size=4, stride=2, padding=1).bfloat16().requires_grad_(False)
    rows = torch.randn(1, 3, *[12] * (layer.weight.dim() - 2)).bfloat16()
    wanted = layer.double()(rows.double())
    layer.bfloat16()
    fuse(layer)
    assert ("forward" in layer.__dict__) == (packed_class(torch.bfloat16) is PairedLinear)
    got = layer(rows)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), wanted, atol=2**-7, rtol=2**-8)


def test_other_dtypes_stay():
    assert pack_linears(nn.Sequential(nn.Linear(32, 8).double())) == 0
    mixed = nn.Linear(32, 8).bfloat16()
    mixed.bias.data = mixed.bias.data.float()
    assert pack_linears(nn.Sequential(mixed)) == 0
    fuse(nn.Sequential(mixed))
    with pytest.raises(RuntimeError, match="dtype"):
        mixed(torch.zeros(1, 32, dtype=torch.bfloat16))


@needs_packing
def test_small_products_are_done_alone_and_the_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer = PackedLinear(nn.Linear(768, 768, bias=False))
        seen = []
        for num_rows in (1, 26, 33, 34, 640):
            rows = torch.ones(num_rows, 768)
            is_alone = rows.numel() <= layer._most_alone
            seen.append(is_alone)
            layer(rows)
            assert torch.get_num_threads() == 2
        assert seen == [True, True, True, False, False]
        with pytest.raises(RuntimeError):
            layer(torch.ones(1, 5))
        assert torch.get_num_threads() == 2
        assert PackedLinear(nn.Linear(4096, 1024))._most_alone == 0
    finally:
        torch.set_num_threads(before)


@needs_packing
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of what is mapped")
def test_no_file_of_the_checkpoint_stays_mapped():
    """Else all weights would count twice: packed, and in the file."""
    model = Path(__file__).parents[2] / "examples/tiny-vlm/model"
    held = load_model(str(model))
    assert any(isinstance(module, PackedLinear) for module in held.model.modules())
    assert str(model) not in Path("/proc/self/maps").read_text()
