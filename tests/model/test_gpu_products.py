"""Products of few rows with weights, in Triton's interpreter or on a GPU, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.models.bench import DEVICE

pytest.importorskip("triton")
from foveal_runtime.model.gpu.products import MAX_ROWS, PlainProduct
from tests.support.models.triton_compile import SMALL_CARD_BYTES, compiled

ROWS = [1, 2, 7, MAX_ROWS, MAX_ROWS + 1]
SIZES = [(48, 64), (50, 300), (33, 2056), (16, 8)]
"""Of weights; more of a row than a program reads at once, and less than the least it can."""
GATES = {
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def check(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 2**-6
    most = float(wanted.abs().max())
    torch.testing.assert_close(got.double(), wanted.double(), rtol=bound, atol=bound * most)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_a_linear_layer(rows: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = random(*size, dtype=dtype), random(size[0], dtype=dtype)
    x = random(rows, size[1], dtype=dtype)
    wanted = x.double() @ weight.double().t()
    check(PlainProduct(weight)(x), wanted, dtype)
    check(PlainProduct(weight, bias)(x), wanted + bias.double(), dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_own", [False, True])
def test_it_adds_what_is_there(rows: int, is_own: bool) -> None:
    weight, x, there = random(50, 300), random(rows, 300), random(rows, 50)
    before = there.clone()
    check(PlainProduct(weight)(x, there, is_own), before + x @ weight.t(), torch.float32)
    if not is_own:
        assert torch.equal(there, before)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("rows", ROWS)
def test_it_opens_gates(rows: int, name: str) -> None:
    weight, bias, x = random(100, 300) / 8, random(100), random(rows, 300)
    gate, up = functional.linear(x, weight, bias).chunk(2, dim=1)
    check(PlainProduct(weight, bias, name)(x), GATES[name](gate) * up, torch.float32)


def test_rows_that_lie_apart_are_read_as_they_lie() -> None:
    weight, x = random(48, 64), random(64, 5).t()
    check(PlainProduct(weight)(x), x @ weight.t(), torch.float32)


def test_no_rows() -> None:
    assert PlainProduct(random(48, 64))(random(0, 64)).shape == (0, 48)


@pytest.mark.parametrize("architecture", [80, 89, 90])
def test_a_layer_compiles_without_a_gpu(architecture: int) -> None:
    found = compiled(f"layer,bfloat16,3584,18944,{architecture}")
    names = [*2 * ["vector_kernel", "rows_kernel", "rows_kernel"], "norm_kernel", "heads_kernel"]
    assert [one["kernel"] for one in found] == names
    assert max(one["shared_bytes"] for one in found) <= SMALL_CARD_BYTES
    assert not any(one["spilled_bytes"] for one in found)
    # What starts early would read what an earlier kernel has not written yet.
    assert all(one["before_wait"] == ([] if architecture >= 90 else None) for one in found)
