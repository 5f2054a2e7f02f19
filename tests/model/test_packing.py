"""Packed linear layers compute what plain ones do, and only plain ones are replaced."""

from pathlib import Path

import pytest
import torch
from torch import nn

from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu.packing import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.model

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this torch has no oneDNN linear layers"
)


class Other(nn.Linear):
    """A subclass has a forward of its own."""

    def forward(self, rows):
        return super().forward(rows) + 1


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
    assert torch.equal(holder["one"].weight.to_dense(), linear.weight)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    with torch.inference_mode():
        got = holder["one"](rows)
    assert got.shape == wanted.shape
    assert torch.allclose(got, wanted, atol=tolerance, rtol=tolerance)


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


def test_other_dtypes_stay():
    assert pack_linears(nn.Sequential(nn.Linear(32, 8).double())) == 0


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
