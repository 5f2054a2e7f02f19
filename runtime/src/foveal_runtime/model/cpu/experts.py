"""Experts of a layer in one call of the C kernel, on CPUs.

transformers stacks the experts' weights; its grouped products rearrange them as plain linear layers
do, and copy each row for every expert that it goes to. The kernel (kernels/experts.h) reads weights
in blocks, each once a step, and those alone that a row goes to. `PackedExperts` are made by the
loader where experts have plain weights; `checkpoint.experts` computes by the same call with
quantised ones.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from foveal_runtime.model.cpu.fusing import TOLERANCE, activation_of
from foveal_runtime.model.cpu.kernels import (
    DONE,
    NO_MEMORY,
    Expert,
    ExpertsJob,
    Product,
)
from foveal_runtime.model.cpu.packing import (
    ALONE_PRODUCTS,
    DTYPES,
    KERNEL_ACTIVATIONS,
    Layout,
    Repacked,
    blocked,
    has_fast_products,
    loaded_kernel,
)
from foveal_runtime.telemetry.memory import trim_heap

MOST_PAIRS = 4096
"""Of a row and an expert in one call, which has memory for that many: more take several."""
ALONE_SHARE = 8
"""Of ALONE_PRODUCTS: each number of few rows' experts is read from memory for one product."""
BLOCK = 64
"""Outputs that the kernel adds up at once: a whole number of the last products' blocks."""
_WIDTHS, _DEPTHS = (BLOCK, 32, 16), (64, 32, 16, 8, 4, 2)
"""Of blocks, the first that leaves no rest."""
_TRIED_ROWS, _TRIED_EXPERTS = 5, 8
_log = logging.getLogger(__name__)


class Experts:
    """The experts of one layer, as the kernel takes them.

    Attributes:
        each: the products of each.
        activation: of their gates, one of KERNEL_ACTIVATIONS.
    """

    def __init__(self, experts: Sequence[tuple[Product, ...]], activation: int) -> None:
        """Of each expert (gate, up, down), whose addresses must be good while this lives."""
        self.each = [Expert(*one) for one in experts]
        self.activation = activation
        self._experts = (Expert * len(self.each))(*self.each)
        gate, down = self.each[0].gate, self.each[0].down
        self._ends = gate.ins, down.outs
        self._size = gate.ins * gate.outs * 2 + down.ins * down.outs

    def __call__(
        self, rows: torch.Tensor, which: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """rows (T, E) through the experts `which` (T, k), whose outputs are added up with `factors`
        (T, k) in float32 and in the experts' order: (T, E) in the rows' type."""
        kernel = loaded_kernel()
        ins, outs = self._ends
        if isinstance(kernel, str) or rows.dtype not in DTYPES or rows.shape[1] != ins:
            raise RuntimeError(f"{rows.dtype} {tuple(rows.shape)} through experts of {ins} inputs")
        rows, factors = rows.contiguous(), factors.float().contiguous()
        which = which.long().contiguous()
        out = rows.new_empty(len(rows), outs)
        num_used = which.shape[1]
        step = max(1, MOST_PAIRS // num_used)
        is_alone = which.numel() * self._size * ALONE_SHARE <= ALONE_PRODUCTS
        for low in range(0, len(rows), step):
            code = kernel.experts(
                ExpertsJob(
                    dtype=DTYPES[rows.dtype],
                    num_threads=1 if is_alone else torch.get_num_threads(),
                    activation=self.activation,
                    num_experts=len(self.each),
                    num_used=num_used,
                    num_rows=min(step, len(rows) - low),
                    x=rows[low:].data_ptr(),
                    out=out[low:].data_ptr(),
                    which=which[low:].data_ptr(),
                    factors=factors[low:].data_ptr(),
                    experts=ctypes.addressof(self._experts),
                )
            )
            if code == NO_MEMORY:
                raise MemoryError("experts: no memory for their inputs")
            if code != DONE:
                raise RuntimeError(f"the kernel computes no such experts (code {code})")
        return out


def kernel_activation(experts: Any) -> int | None:
    """What the kernel knows as the activation of experts of transformers' that are gated in the
    usual way; None where they do more, or something else, with a row."""
    if getattr(type(experts), "_apply_gate", None) is not _default_apply_gate:
        return None
    is_usual = experts.has_gate and experts.is_concatenated and not experts.has_post_expert_norm
    if not is_usual or experts._is_expert_parallel:
        return None
    found = activation_of(experts.act_fn)
    return None if found is None else KERNEL_ACTIVATIONS.get(found)


class PackedExperts(Repacked):
    """Stand where transformers' experts stood; the weights are theirs, in blocks.

    Attributes:
        whole: what computes all of them.
    """

    def __init__(self, experts: Any, activation: int) -> None:
        super().__init__()
        self.own = tuple(name for name, _ in experts.named_parameters())
        products: list[list[Product]] = [[] for _ in experts.down_proj]
        for name, parts in (("gate_up_proj", 2), ("down_proj", 1)):
            weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
            if bias is not None:
                bias = bias.clone()
                setattr(self, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
            whole, found = _in_blocks(
                weight.transpose(1, 2) if experts.is_transposed else weight, bias, parts
            )
            for one, more in zip(products, found, strict=True):
                one.extend(more)
            setattr(self, name, nn.Parameter(whole, requires_grad=False))
        self.whole = Experts([tuple(one) for one in products], activation)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.whole(hidden_states, top_k_index, top_k_weights)


def pack_experts(model: nn.Module) -> int:
    """Replaces the stacked experts of a model on the CPU; returns of how many layers. Left as they
    are: experts that the kernel computes otherwise, which a trial shows."""
    num_packed = 0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parent in model.modules():
            for name, child in parent.named_children():
                if (made := _packed(child)) is not None:
                    setattr(parent, name, made)
                    num_packed += 1
                    trim_heap()
    if num_packed:
        _log.info("the experts of %d layers are computed in one call each", num_packed)
    return num_packed


def _packed(experts: Any) -> PackedExperts | None:
    """The same experts with packed weights, or None where they stay as they are."""
    activation = kernel_activation(experts)
    weights = {name: one for name, one in experts.named_parameters() if not name.endswith("_bias")}
    if activation is None or weights.keys() != {"gate_up_proj", "down_proj"}:
        return None
    num_experts, *ends = weights["down_proj"].shape
    kinds = {(one.dtype, one.device.type) for one in experts.parameters()}
    dtype = weights["down_proj"].dtype
    if kinds != {(dtype, "cpu")} or not has_fast_products(dtype) or any(end % 16 for end in ends):
        return None
    made = PackedExperts(experts, activation)
    made.eval()
    width = ends[0] if not experts.is_transposed else ends[1]
    rows = torch.randn(_TRIED_ROWS, width).to(dtype)
    orders = [torch.randperm(num_experts) for _ in rows]
    which = torch.stack(orders)[:, : min(_TRIED_EXPERTS, max(1, num_experts // 2))]
    factors = torch.rand(which.shape).to(dtype)
    try:
        wanted = experts(rows, which, factors)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None  # called in another way
    most = float((made(rows, which, factors).double() - wanted.double()).abs().max())
    if not most <= TOLERANCE[dtype] * float(wanted.double().abs().max()):
        _log.info("%s stay torch's: outputs differ by %.2g", type(experts).__name__, most)
        return None
    return made


def _in_blocks(
    weight: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> tuple[torch.Tensor, list[list[Product]]]:
    """Stacked weights (n, N, K) in blocks that the kernel reads, and of each expert the products
    with that many equal parts of its outputs. `bias`: (n, N)."""
    num_experts, outs, ins = weight.shape
    each = outs // parts
    wide = next(size for size in _WIDTHS if each % size == 0)
    deep = next(size for size in _DEPTHS if ins % size == 0)
    shape = (num_experts, parts, each // wide, ins // deep, wide * deep)
    whole = torch.empty(shape, dtype=weight.dtype)
    layout = Layout(wide, deep, weight.dtype == torch.bfloat16, ins * wide, wide * deep)
    found = []
    for number, expert in enumerate(weight):
        products = []
        for part, dense in enumerate(expert.split(each)):
            to = whole[number, part]
            to.copy_(blocked(dense, wide, deep).view(to.shape))
            own = None if bias is None else bias[number, part * each :].data_ptr()
            products.append(Product(to.data_ptr(), own, ins=ins, outs=each, **layout._asdict()))
        found.append(products)
    return whole, found
