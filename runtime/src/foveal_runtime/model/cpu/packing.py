"""Linear layers whose weights are kept in the layout that they are multiplied in, on CPUs.

Called by the loader once the weights are there. With the plain layout every product rearranges its
weights first, which is most of the work of a decode step: 4 rows in float32 take 1.6 times as long,
in bfloat16 2.1 times; 640 rows still 1.1 to 1.3 times. The packed weight takes the place of the
plain one (same number of bytes).

oneDNN packs and multiplies, except bfloat16 numbers on CPUs without AVX-512: it has no products of
those, and torch's own take up to 8 times as long as in float32. There the C kernel of small steps
multiplies, from blocks of its own; so it does where the instruction for pairs of them is slow
(`has_slow_dots`). What must stay as it lies is left to fusing.py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.cpu.kernels import (
    BFLOAT16,
    DONE,
    FLOAT32,
    NO_MEMORY,
    Product,
    ProductJob,
    has_slow_dots,
    load_decoder_kernel,
)
from foveal_runtime.model.cpu.threads import KERNEL_CACHE_ENTRIES
from foveal_runtime.telemetry.memory import trim_heap

HINT_ROWS = 16
"""The batch size that the layout is chosen for: good from 1 row to thousands, unlike 1 or none."""

ALONE_PRODUCTS = 20_000_000
ALONE_BYTES = 8 << 20
"""A product of at most so many multiplications and bytes of weights is done by one thread: it takes
about as long as waking the others. Measured in docs/decisions/small-products-alone.md."""

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""As the C kernels take them."""

MORE_ROWS = 64
"""Most rows of a product that the C kernel computes where oneDNN could, without AVX-512."""

WIDE, DEEP = 64, 64
"""Outputs and inputs of a block of our own."""
_LARGE_BYTES = 1 << 20
loaded_kernel = functools.cache(load_decoder_kernel)
_log = logging.getLogger(__name__)


class Activation(NamedTuple):
    """What oneDNN applies to a product before it is written; its names."""

    name: str
    algorithm: str = ""


IDENTITY = Activation("none")
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    IDENTITY: lambda x: x,
    Activation("swish"): functional.silu,
    Activation("gelu", "none"): functional.gelu,
    Activation("gelu", "tanh"): lambda x: functional.gelu(x, approximate="tanh"),
    Activation("relu"): functional.relu,
}


KERNEL_ACTIVATIONS = {
    Activation("swish"): 0,
    Activation("gelu", "tanh"): 1,
    Activation("gelu", "none"): 2,
    Activation("relu"): 3,
}
"""As the C kernels take them (`kernels/linear.h`)."""


class Repacked(nn.Module):  # type: ignore[misc]
    """What stands where a module of plain weights stood."""

    own = ("weight",)
    """Parameters that it has made memory of its own for."""


class PackedLinear(Repacked):
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
        is_few = rows.numel() <= MORE_ROWS * self.in_features and lacks_avx512()
        is_plain = activation == IDENTITY and times is None
        if is_few and is_plain and (product := self.product()) is not None:
            return multiply(rows, product)
        if rows.numel() > self._most_alone:
            return _multiply(rows, self.weight, self.bias, activation, times)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _multiply(rows, self.weight, self.bias, activation, times)
        finally:
            torch.set_num_threads(threads)

    def product(self) -> Product | None:
        """As the C kernels take it, or None where it is laid out in a way not known here. The
        addresses are good while the layer lives."""
        layout = layout_of(self.out_features, self.in_features, self.weight.dtype)
        return layout and self._product(raw_address(self.weight), layout)

    def _product(self, address: int, layout: Layout) -> Product:
        return Product(
            weight=address,
            bias=None if self.bias is None else self.bias.data_ptr(),
            ins=self.in_features,
            outs=self.out_features,
            **layout._asdict(),
        )


class PairedLinear(PackedLinear):
    """Likewise, in bfloat16 where oneDNN has no products of such: pairs of inputs are next to each
    other, in blocks that the C kernel reads."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        blocks = blocked(linear.weight.data, WIDE, DEEP)
        self.weight = nn.Parameter(blocks, requires_grad=False)
        self.bias = linear.bias
        self._layout = Layout(WIDE, DEEP, True, blocks[0].numel(), blocks[0, 0].numel())

    def forward(
        self,
        rows: torch.Tensor,
        activation: Activation = IDENTITY,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = multiply(rows, self.product())
        return ACTIVATIONS[activation](out) if times is None else out.mul_(times)

    def product(self) -> Product:
        return self._product(self.weight.data_ptr(), self._layout)


def multiply(rows: torch.Tensor, product: Product) -> torch.Tensor:
    """rows (..., inputs) times a weight that the C kernel reads, plus its bias: (..., outputs) in
    the rows' type, summed in float32. Raises RuntimeError for other rows."""
    kernel = loaded_kernel()
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    if rows.shape[-1] != product.ins or rows.dtype not in DTYPES:
        raise RuntimeError(f"{rows.dtype} {tuple(rows.shape)} times {product.ins} inputs")
    rows = rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], product.outs)
    if not rows.numel():
        return out
    is_alone = rows.numel() * product.outs <= ALONE_PRODUCTS
    code = kernel.multiply(
        ProductJob(
            dtype=DTYPES[rows.dtype],
            num_threads=1 if is_alone else torch.get_num_threads(),
            num_rows=rows.numel() // product.ins,
            x=rows.data_ptr(),
            out=out.data_ptr(),
            product=product,
        )
    )
    if code == NO_MEMORY:
        raise MemoryError("a linear layer: no memory for its inputs")
    if code != DONE:
        raise RuntimeError(f"the kernel multiplies no such weights (code {code})")
    return out


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
        if paired:
            blocks = _pair(blocks)
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


def blocked(dense: torch.Tensor, wide: int, deep: int) -> torch.Tensor:
    """A weight (outputs, inputs) in blocks that the C kernel reads, in bfloat16 with pairs of an
    output's inputs next to each other: (output blocks, input blocks, ...)."""
    if dense.dtype != torch.bfloat16:
        return _blocks(dense, wide, deep).contiguous()
    pairs = dense.contiguous().view(torch.int32)  # moved as one number: faster
    return _blocks(pairs, wide, deep // 2).contiguous().view(dense.dtype)


def _pair(blocks: torch.Tensor) -> torch.Tensor:
    """(..., deep, wide) to (..., deep / 2, wide, 2)."""
    return blocks.unflatten(2, (-1, 2)).transpose(3, 4)


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


def has_kernel() -> bool:
    """Whether `multiply` works, and is worth it."""
    kernel = loaded_kernel()
    return not isinstance(kernel, str) and kernel.is_fast_in_float32


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether the C kernel multiplies as fast as oneDNN, or where that cannot."""
    kernel = loaded_kernel()
    if isinstance(kernel, str) or dtype not in DTYPES:
        return False
    if dtype == torch.float32:
        return kernel.is_fast_in_float32
    return kernel.is_fast_in_bfloat16 or packed_class(dtype) is PairedLinear


@functools.cache
def lacks_avx512() -> bool:
    """Whether the C kernel's products of several rows are faster than oneDNN's for that reason."""
    kernel = loaded_kernel()
    return not isinstance(kernel, str) and kernel.is_fast_in_float32 and kernel.has_chunks


@functools.cache
def is_slow(dtype: torch.dtype) -> bool:
    """Whether the C kernel multiplies such numbers here, since oneDNN cannot, or not as fast."""
    return dtype == torch.bfloat16 and not _has_products(dtype) and has_kernel()


def _has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies such numbers with this CPU's instructions, and they are fast."""
    if dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if dtype != torch.bfloat16:
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not has_slow_dots()


@functools.lru_cache
def packed_class(dtype: torch.dtype) -> type[PackedLinear] | None:
    """What computes with packed weights of `dtype` in this torch, on this machine."""
    if not is_slow(dtype) and not _has_products(dtype):
        return None
    kind = PairedLinear if is_slow(dtype) else PackedLinear
    try:
        linear = nn.Linear(32, 64, bias=False, dtype=dtype).requires_grad_(False)
        linear.weight.copy_(torch.arange(64 * 32).reshape(64, 32).remainder(7))
        with torch.inference_mode():
            found = kind(linear)(torch.eye(32, dtype=dtype))
        return kind if torch.equal(found, linear.weight.t()) else None
    except (AttributeError, RuntimeError) as error:
        _log.warning("weights stay unpacked: %s", error)
        return None


def can_pack(dtype: torch.dtype) -> bool:
    """Whether linear layers of `dtype` are packed on this machine."""
    return packed_class(dtype) is not None


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of a model on the CPU; returns how many.

    Left as they are: weights that another module holds, too (a head tied to the embeddings), layers
    of other classes (their forward is their own) or with hooks, and dtypes that cannot be packed.
    """
    holders = _holders(model)
    kinds: dict[torch.dtype, type[PackedLinear] | None] = {}
    # Places alone: a list of modules would keep every plain weight until the last one is packed.
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_plain(child, holders)
    ]
    num_packed = 0
    for parent, name in places:
        linear = getattr(parent, name)
        dtype = linear.weight.dtype
        if dtype not in kinds:
            kinds[dtype] = packed_class(dtype)
        kind = kinds[dtype]
        if kind is not None and (kind is PackedLinear or linear.in_features % 2 == 0):
            setattr(parent, name, kind(linear).eval())
            num_packed += 1
    return num_packed


def own_rest(model: nn.Module) -> None:
    """Copies what was not packed out of the checkpoint's mapped files: a single tensor keeps a
    whole file mapped, which then counts beside the packed copy of its weights."""
    packed = [one for one in model.modules() if isinstance(one, Repacked)]
    own = {id(getattr(module, name)) for module in packed for name in module.own}
    for one in itertools.chain(model.parameters(), model.buffers()):
        if id(one) not in own:
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
        and linear.out_features > 1  # a single row lies as the kernels take it
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and has_like_bias(linear)
    )


def has_like_bias(linear: nn.Linear) -> bool:
    return linear.bias is None or linear.bias.dtype == linear.weight.dtype


def fill_kernel_cache(dtype: str, width: int) -> None:
    """Computes with as many shapes as the caches of compiled kernels hold (model/cpu/threads.py).

    For measuring what they take when they are full; `width` is the model's own.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if packed_class(kind) is not PackedLinear:
        return
    linear = PackedLinear(nn.Linear(width, width, bias=False, dtype=kind))
    with torch.inference_mode():
        for rows in range(1, KERNEL_CACHE_ENTRIES + 2):
            linear(torch.zeros(rows, width, dtype=kind))
