"""Transformers' own model in float64, and how far from that its float32 is.

Sums in another order move logits of float32, and how far depends on the numbers. In Gemma 4, GELU
of a number below -5 is a difference of two almost equal ones, of which float32 keeps a digit or
none, and the norm behind it makes that as large as any other number: the logits are off by 4e-4,
ours and transformers' alike. So where the two differ, float64 says what is right, and transformers'
own float32 how near to that float32 comes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NUM_MOVED = 4
LAST_BIT = 2.0**-23


def forward(
    model: torch.nn.Module, ids: torch.Tensor, kwargs: Mapping[str, Any], first: int
) -> torch.Tensor:
    """Logits from place `first` on, of one pass over everything."""
    return model(input_ids=ids, use_cache=False, **kwargs).logits[0][first:]


class _OnlyFloat64(TorchFunctionMode):
    """Computes in float64 what a model asks to be computed in float32, as norms and softmax are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        values = {key: _widened(value) for key, value in (kwargs or {}).items()}
        result = func(*map(_widened, args), **values)
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            # No AssertionError: controls expect one, and would take this for it.
            raise TypeError(f"{func} computed in float32")
        return result


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _only_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with _OnlyFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def exact_logits(
    model: Any, ids: torch.Tensor, kwargs: Mapping[str, Any], first: int
) -> torch.Tensor:
    twin = copy.deepcopy(model).double()
    twin.set_experts_implementation("eager")  # the usual one has no float64
    doubles = {}
    for name, value in kwargs.items():
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        doubles[name] = value.double() if is_float else value
    with _only_float64():
        return forward(twin, ids, doubles, first)


@torch.inference_mode()
def float32_error(
    model: Any, ids: torch.Tensor, kwargs: Mapping[str, Any], first: int, exact: torch.Tensor
) -> float:
    """The largest error of any logit in float32: as the weights are, and with each of them moved by
    up to its last bit, a few times. One run alone may be right by luck, where another processor,
    which sums in another order, is not."""
    errors = [float((forward(model, ids, kwargs, first) - exact).abs().max())]
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_MOVED):
        moved = copy.deepcopy(model)
        for weight in moved.parameters():
            by = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
            weight.copy_(weight.double() * (1 + LAST_BIT * by))
        errors.append(float((forward(moved, ids, kwargs, first) - exact).abs().max()))
    return max(errors)
