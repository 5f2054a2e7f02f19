"""Norms and MLPs of packed models, and what was not packed, in fewer passes over memory, on CPUs.

Called by the loader after packing. A layer of transformers writes and reads its activations once
for every small operator: an RMS norm six times, quick GELU three. Here a norm is one pass of a C
kernel, and an activation happens while oneDNN writes the product. A head that is tied to the
embeddings keeps their layout, which oneDNN rearranges for every product of a few rows; the C kernel
reads it as it is. The modules stay, with their classes and parameters; only their `forward` is
another.

Nothing is taken from a class's name: what a module computes is tried on random rows first, and a
module that computes anything else keeps its own forward.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.cpu.kernels import (
    NormJob,
    Product,
    RmsNorm,
    RowKernels,
    load_row_kernels,
)
from foveal_runtime.model.cpu.packing import (
    ACTIVATIONS,
    DTYPES,
    MORE_ROWS,
    WIDE,
    Activation,
    PackedLinear,
    can_pack,
    has_kernel,
    has_like_bias,
    is_slow,
    lacks_avx512,
    loaded_kernel,
    multiply,
)

PROBE_ROWS = 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Of the largest value: the order of sums; in bfloat16 a last bit and what it grows to."""

NORM_FORMS = ((0.0, True), (1.0, False), (0.0, False), (1.0, True))
"""(added to the weight, whether the normed row is rounded to its dtype before the product)."""

FEW_ROWS = 16
"""Most rows of a product that the C kernel computes with unpacked weights, where torch could:
MORE_ROWS without AVX-512, and by AMX."""
CACHED_BYTES = 256 << 10
"""Of a weight that is not packed, which rows are multiplied with in turn: half a second cache."""

_CALL_ERRORS = (TypeError, ValueError, RuntimeError, IndexError)
_log = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor], torch.Tensor]


def fuse(model: nn.Module) -> tuple[int, int]:
    """Gives the RMS norms and MLPs of a packed model faster forwards, and whatever else there are
    such for; returns how many norms and MLPs."""
    kernels = load_row_kernels()
    if isinstance(kernels, str):
        _log.warning("norms stay torch's: %s", kernels)
    num_norms = num_mlps = 0
    known: dict[object, bool] = {}
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in model.modules():
            if not isinstance(kernels, str) and (norm := fused_norm(module, kernels)):
                module.forward = norm
                num_norms += 1
            elif mlp := fused_mlp(module, kernels, known):
                module.forward = mlp
                num_mlps += 1
            elif other := unpacked_forward(module):
                module.forward = other
    _log.info("fused: %d norms, %d MLPs", num_norms, num_mlps)
    return num_norms, num_mlps


def fused_norm(module: Any, kernels: RowKernels) -> FusedNorm | None:
    """The same norm by the C kernel, or None where `module` is no RMS norm that it computes."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if (
        not isinstance(eps, float)
        or not isinstance(weight, nn.Parameter)
        or weight.dim() != 1
        or weight.dtype not in DTYPES
        or getattr(module, "bias", None) is not None
        or len(inspect.signature(module.forward).parameters) != 1  # a norm with a gate
        or list(module.children())
    ):
        return None
    original: Forward = module.forward
    # A mean far from 0: a layer norm, which takes it away, must not look alike.
    rows = (3 * torch.randn(PROBE_ROWS, weight.shape[0]) + 5).to(weight.dtype)
    try:
        wanted = original(rows)
    except _CALL_ERRORS:
        return None  # takes rows of another shape
    forms = [FusedNorm(module, original, kernels, eps, *form) for form in NORM_FORMS]
    best = min(forms, key=lambda form: _distance(form(rows), wanted))
    return best if _is_same(best(rows), wanted) else None


@dataclass(frozen=True)
class FusedNorm:
    """A norm module's forward by the C kernel.

    Attributes:
        module: has the weight, which may be replaced while this lives.
        original: the module's own forward, for rows that the kernel does not take.
        offset, rounds: one of NORM_FORMS.
    """

    module: Any
    original: Forward
    kernels: RowKernels
    eps: float
    offset: float
    rounds: bool

    def parameters(self) -> RmsNorm:
        """As the kernels take it. The address is good while the module keeps its weight."""
        return RmsNorm(self.module.weight.data_ptr(), self.eps, self.offset, self.rounds)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.module.weight
        if rows.dtype != weight.dtype or not rows.is_contiguous():
            return self.original(rows)
        width = weight.shape[0]
        out = torch.empty_like(rows)
        self.kernels.norm(
            NormJob(
                dtype=DTYPES[weight.dtype],
                num_threads=torch.get_num_threads(),
                num_rows=rows.numel() // width,
                width=width,
                x=rows.data_ptr(),
                out=out.data_ptr(),
                norm=self.parameters(),
            )
        )
        return out


def fused_mlp(
    module: nn.Module, kernels: RowKernels | str, known: dict[object, bool]
) -> Forward | None:
    """The same MLP with its activation inside a product, or None where `module` is none.

    `known`: what trying showed, by class and its settings (layers of one class may differ in
    them), activation and dtype; one of each is tried.
    """
    linears = [child for child in module.children() if isinstance(child, PackedLinear)]
    others = [child for child in module.children() if not isinstance(child, PackedLinear)]
    if len(linears) not in (2, 3) or len(others) != 1 or list(others[0].parameters()):
        return None
    activation = activation_of(others[0])
    if activation is None:
        return None
    named = dict(module.named_children())
    if len(linears) == 3:
        if not {"gate_proj", "up_proj", "down_proj"} <= set(named) or activation is QUICK_GELU:
            return None
        forward = _gated(named["gate_proj"], named["up_proj"], named["down_proj"], activation)
        first = named["gate_proj"]
    else:
        first, second = linears
        if first.out_features != second.in_features:
            first, second = second, first
        if activation is QUICK_GELU and isinstance(kernels, str):
            return None
        forward = _plain(first, second, activation, kernels)
    dtype = first.weight.dtype
    settings = {k: v for k, v in vars(module).items() if isinstance(v, (int, float))}
    key = (type(module), type(others[0]), activation, dtype, *sorted(settings.items()))
    if key not in known:
        known[key] = _computes_alike(module, forward, first.in_features, dtype)
    return forward if known[key] else None


def _computes_alike(module: Any, forward: Forward, width: int, dtype: torch.dtype) -> bool:
    rows = torch.randn(1, PROBE_ROWS, width).to(dtype)
    try:
        wanted = module.forward(rows)
    except _CALL_ERRORS:
        return False  # takes more than rows
    return isinstance(wanted, torch.Tensor) and _is_same(forward(rows), wanted)


def _gated(gate: nn.Module, up: nn.Module, down: nn.Module, activation: Activation) -> Forward:
    def forward(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = down(up(rows, times=gate(rows, activation)))
        return out

    return forward


def _plain(
    first: nn.Module, second: nn.Module, activation: Activation, kernels: RowKernels | str
) -> Forward:
    def forward(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = second(first(rows, activation))
        return out

    def forward_quick(rows: torch.Tensor) -> torch.Tensor:
        wide = first(rows)
        assert isinstance(kernels, RowKernels)
        assert wide.is_contiguous()
        kernels.quick_gelu(
            DTYPES[wide.dtype], torch.get_num_threads(), wide.numel(), wide.data_ptr()
        )
        out: torch.Tensor = second(wide)
        return out

    return forward_quick if activation is QUICK_GELU else forward


QUICK_GELU = Activation("quick_gelu")
"""x * sigmoid(1.702 x), which oneDNN's products do not offer through torch."""

_KNOWN: dict[Activation, Forward] = {
    **ACTIVATIONS,
    QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_of(module: nn.Module) -> Activation | None:
    """Which of those known the module computes, in float32, where they differ most clearly."""
    # Close to 0, and far away for those that are clipped.
    x = torch.cat([torch.linspace(-8, 8, 1001), torch.linspace(-100, 100, 201)])
    try:
        wanted = module(x)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    if not isinstance(wanted, torch.Tensor) or wanted.shape != x.shape:
        return None
    found = (a for a, f in _KNOWN.items() if torch.allclose(f(x), wanted, 1e-6, 2e-6))
    return next(found, None)


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).abs().sum())


def _is_same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    most = float((got.double() - wanted.double()).abs().max())
    return most <= TOLERANCE[wanted.dtype] * float(wanted.double().abs().max())


def unpacked_forward(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Of a linear layer that was not packed: its few rows go through the weight as it lies, which
    oneDNN would rearrange for each product. Of a convolution with bfloat16 weights where oneDNN has
    no products of such: float32, which is 70 times as fast. None for other modules."""
    kind = type(module)
    if kind is nn.Linear and can_pack(module.weight.dtype) and has_kernel():
        return functools.partial(_multiply_rows, module)
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and is_slow(module.weight.dtype):
        return functools.partial(_convolve, module)
    return None


def _multiply_rows(linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    weight = linear.weight
    most = MORE_ROWS if lacks_avx512() or _has_tiles(weight.dtype) else FEW_ROWS
    is_many = rows.numel() > most * linear.in_features and not is_slow(weight.dtype)
    is_like = rows.dtype == weight.dtype and has_like_bias(linear)
    if is_many or not is_like or not weight.is_contiguous():
        return functional.linear(rows, weight, linear.bias)
    return multiply(rows, unpacked_product(linear))


def _has_tiles(dtype: torch.dtype) -> bool:
    kernel = loaded_kernel()
    return dtype == torch.bfloat16 and not isinstance(kernel, str) and kernel.has_tiles


def unpacked_product(linear: nn.Linear) -> Product:
    """A layer with a contiguous weight as the kernel takes it; good while the layer keeps it."""
    outs, ins = linear.weight.shape
    is_small = ins * WIDE * linear.weight.itemsize <= CACHED_BYTES
    return Product(
        weight=linear.weight.data_ptr(),
        bias=None if linear.bias is None else linear.bias.data_ptr(),
        ins=ins,
        outs=outs,
        wide=WIDE if is_small else WIDE // 4,
    )


def _convolve(convolution: Any, rows: torch.Tensor) -> torch.Tensor:
    bias = None if convolution.bias is None else convolution.bias.float()
    out = convolution._conv_forward(rows.float(), convolution.weight.float(), bias)
    wanted: torch.Tensor = out.to(rows.dtype)
    return wanted
