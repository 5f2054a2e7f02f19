"""Linear layers whose weights are kept in the layout that oneDNN computes with, on CPUs.

Called by the loader once the weights are there. With the plain layout every product rearranges its
weights first, which is most of the work of a decode step: 4 rows in float32 take 1.6 times as long,
in bfloat16 2.1 times; 640 rows still 1.1 to 1.3 times. The packed weight takes the place of the
plain one (same number of bytes) and gives it back bit by bit (`weight.to_dense()`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.cpu.threads import KERNEL_CACHE_ENTRIES
from foveal_runtime.telemetry.memory import trim_heap

HINT_ROWS = 16
"""The batch size that the layout is chosen for: good from 1 row to thousands, unlike 1 or none."""

ALONE_PRODUCTS = 20_000_000
ALONE_BYTES = 8 << 20
"""A product of at most so many multiplications and bytes of weights is done by one thread: it takes
about as long as waking the others. Measured in docs/decisions/small-products-alone.md."""

_LARGE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Activation(NamedTuple):
    """What oneDNN applies to a product before it is written; its names."""

    name: str
    algorithm: str = ""


IDENTITY = Activation("none")


class PackedLinear(nn.Module):  # type: ignore[misc]
    """Stands where an nn.Linear stood; computes the same up to the order of sums."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = nn.Parameter(_pack(linear.weight.data), requires_grad=False)
        self.bias = linear.bias
        self._most_alone = _most_alone(linear.weight)

    def forward(
        self,
        rows: torch.Tensor,
        activation: Activation = IDENTITY,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """activation(rows @ weight + bias), or without one `times` that, of the result's shape."""
        if rows.numel() > self._most_alone:
            return _multiply(rows, self.weight, self.bias, activation, times)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _multiply(rows, self.weight, self.bias, activation, times)
        finally:
            torch.set_num_threads(threads)


def _most_alone(weight: torch.Tensor) -> int:
    """Up to how many numbers of input one thread multiplies with this weight; 0 = never."""
    return ALONE_PRODUCTS // weight.shape[0] if weight.nbytes <= ALONE_BYTES else 0


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, HINT_ROWS)
    return packed


def _multiply(
    rows: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation = IDENTITY,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    out: torch.Tensor
    if times is None:
        out = product(rows, packed, bias, activation.name, [], activation.algorithm)
    else:
        out = product.binary(rows, times, packed, bias, "mul")
    return out


class Layout(NamedTuple):
    """Where oneDNN puts a weight: blocks of `wide` outputs times `deep` inputs, in which outputs
    are next to each other, or `paired` inputs of each. Strides are in numbers, block to block.
    """

    wide: int
    deep: int
    paired: bool
    out_stride: int
    in_stride: int


@functools.lru_cache
def layout_of(outs: int, ins: int, dtype: torch.dtype) -> Layout | None:
    """How weights of this shape are packed, or None where it is none of the ways known here."""
    dense = torch.randn(outs, ins).to(dtype)
    packed = _pack(dense)
    try:
        found = raw_numbers(packed)
    except (AttributeError, RuntimeError):
        return None  # a torch that shows no address
    for wide, deep in itertools.product((64, 48, 32, 16, 24, 8), (16, 64, 32, 4, 2, 1)):
        blocks = _blocks(dense, wide, deep)
        if blocks.numel() != found.numel() or (dtype == torch.bfloat16 and deep % 2):
            continue
        paired = dtype == torch.bfloat16
        if paired:  # (..., deep / 2, wide, 2)
            blocks = blocks.unflatten(2, (deep // 2, 2)).transpose(3, 4)
        across, down = blocks.shape[:2]
        size = wide * deep
        if torch.equal(blocks.reshape(-1), found):
            return Layout(wide, deep, paired, down * size, size)
        if torch.equal(blocks.transpose(0, 1).reshape(-1), found):
            return Layout(wide, deep, paired, size, across * size)
    return None


def _blocks(dense: torch.Tensor, wide: int, deep: int) -> torch.Tensor:
    """(output blocks, input blocks, deep, wide), filled up with zeros."""
    outs, ins = dense.shape
    whole = functional.pad(dense, (0, -ins % deep, 0, -outs % wide))
    return whole.unflatten(0, (-1, wide)).unflatten(2, (-1, deep)).permute(0, 2, 3, 1)


def raw_address(packed: torch.Tensor) -> int:
    """Where a packed weight lies. Raises AttributeError on a torch that does not say."""
    address: int = torch.ops.mkldnn.data_ptr(packed)
    return address


def raw_numbers(packed: torch.Tensor) -> torch.Tensor:
    """A packed weight's memory as it is, flat; good while `packed` lives."""
    count = torch.ops.mkldnn._nbytes(packed)
    memory = (ctypes.c_char * count).from_address(raw_address(packed))
    return torch.frombuffer(memory, dtype=packed.dtype)


def weight_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors on this rank, those that share memory counted once. Packed ones show
    no address."""
    # A shard is a DTensor, whose import is for those who have ranks.
    own: list[torch.Tensor] = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    found = {id(t) if t.is_mkldnn else t.data_ptr(): t.nbytes for t in own}
    return sum(found.values())


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch, on this machine, computes with packed weights of `dtype`."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.arange(64 * 32, dtype=dtype).reshape(64, 32).remainder(7)
        rows = torch.eye(32, dtype=dtype)
        return bool(torch.equal(_multiply(rows, _pack(weight), None), weight.t()))
    except (AttributeError, RuntimeError) as error:
        _log.info("weights stay unpacked: %s", error)
        return False


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of a model on the CPU; returns how many.

    Left as they are: weights that another module holds, too (a head tied to the embeddings), layers
    of other classes (their forward is their own) or with hooks, and dtypes that cannot be packed.
    """
    holders = _holders(model)
    able: dict[torch.dtype, bool] = {}
    # Places alone: a list of modules would keep every plain weight until the last one is packed.
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_plain(child, holders)
    ]
    num_packed = 0
    for parent, name in places:
        dtype = getattr(parent, name).weight.dtype
        if dtype not in able:
            able[dtype] = can_pack(dtype)
        if able[dtype]:
            setattr(parent, name, PackedLinear(getattr(parent, name)).eval())
            num_packed += 1
    return num_packed


def own_rest(model: nn.Module) -> None:
    """Copies what was not packed out of the checkpoint's mapped files: a single tensor keeps a
    whole file mapped, which then counts beside the packed copy of its weights."""
    for one in itertools.chain(model.parameters(), model.buffers()):
        if not one.is_mkldnn:
            one.data = one.data.clone()
            if one.nbytes >= _LARGE_BYTES:
                trim_heap()  # or one tensor's memory after another stays beside its copy


def _holders(model: nn.Module) -> dict[int, int]:
    """How many places in the model hold each parameter."""
    found: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = found.get(id(parameter), 0) + 1
    return found


def _is_plain(linear: Any, holders: dict[int, int]) -> bool:
    weight = linear.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and holders[id(weight)] == 1
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def fill_kernel_cache(dtype: str, width: int) -> None:
    """Computes with as many shapes as the caches of compiled kernels hold (model/cpu/threads.py).

    For measuring what they take when they are full; `width` is the model's own.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if not can_pack(kind):
        return
    linear = PackedLinear(nn.Linear(width, width, bias=False, dtype=kind))
    with torch.inference_mode():
        for rows in range(1, KERNEL_CACHE_ENTRIES + 2):
            linear(torch.zeros(rows, width, dtype=kind))
