"""Experts whose weights stay quantised: a few linear layers for each, where transformers stacks
those of all experts into one parameter.

Placed like single layers (`placement`), and read here once the rest of the model is loaded, since
transformers would stack them. Each expert's layers are `QuantizedLinear` ones, so layouts, kernels
and bytes are those of any quantised layer; only experts that a token of the step goes to compute.
Files have the layers one by one (`experts.3.gate_proj.weight`), or stacked: FP8 as Qwen3-VL's, and
MXFP4 as GPT-OSS's (`gate_up_proj_blocks`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers.integrations.moe import _default_apply_gate
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from foveal_runtime.model.checkpoint.blocked import block_layer, product_of
from foveal_runtime.model.checkpoint.dequantize import (
    Kind,
    QuantizedLinear,
    quantize_linear,
    quantize_linears,
)
from foveal_runtime.model.checkpoint.quantized import StoredAs
from foveal_runtime.model.checkpoint.weights import StoredTensor, file_header, weight_files
from foveal_runtime.model.cpu.experts import BLOCK, Experts, kernel_activation
from foveal_runtime.model.cpu.kernels import Product
from foveal_runtime.model.cpu.packing import DTYPES
from foveal_runtime.telemetry.memory import trim_heap

_SINGLE = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)")
_WHOLE = re.compile(r"(.+\.(gate_up_proj|down_proj))(_blocks)?")
_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names of layers → those of all others."""
_STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""ExpertLayer of an expert → the parameter that transformers stacks it into."""
_LAYERS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
"""What an expert has, one or the other."""
Read = Callable[[str], torch.Tensor]
_log = logging.getLogger(__name__)


class Slice(NamedTuple):
    """One expert's part of a stored tensor.

    Attributes:
        name: of the tensor in the files.
        header: as if the file had the part alone, in the order of a linear layer.
        number: the expert's in a stacked tensor; None for a tensor of its own.
        is_flipped: inputs come before outputs there.
    """

    name: str
    header: StoredTensor
    number: int | None = None
    is_flipped: bool = False

    def read(self, read: Read) -> torch.Tensor:
        whole = read(self.name)
        one = whole if self.number is None else whole[self.number]
        return one.t().contiguous() if self.is_flipped and one.dim() > 1 else one


class ExpertLayer(NamedTuple):
    """A linear layer of expert `number`: a plain one of its sizes, which has no weights and stands
    for those of all experts, and where its tensors are, by buffer."""

    number: int
    name: str
    linear: nn.Linear
    layout: StoredAs
    slices: Mapping[str, Slice]
    bias: tuple[str, torch.dtype] | None


class QuantizedExperts(nn.ModuleList):  # type: ignore[misc]
    """Stands where transformers' experts stood; empty until `fill`.

    As with theirs, each of `hidden_states` (T, E) goes to the experts of `top_k_index` (T, k), and
    their outputs are added up with `top_k_weights` (T, k), in float32 and in the experts' order,
    whatever else is in the step. Which experts those are is read on the host.

    Attributes:
        whole: what computes all of them in one call, on CPUs.
    """

    def __init__(self, experts: Any, layers: Iterable[ExpertLayer] = ()) -> None:
        super().__init__()
        self._pending = list(layers)
        gate = getattr(experts, "_apply_gate", None)
        self._apply_gate = gate or (lambda rows: _default_apply_gate(experts, rows))
        self._find_activation = functools.partial(kernel_activation, experts)
        self.whole: Experts | None = None
        self._dtype: torch.dtype | None = None
        experts._parameters.clear()

    def fill(self, read: Read) -> None:
        """Makes the layers of what `read` gives for a name in the files."""
        found: dict[int, dict[str, nn.Module]] = {}
        for one in self._pending:
            stored = {suffix: part.read(read) for suffix, part in one.slices.items()}
            layer = QuantizedLinear(one.linear, one.layout, stored)
            if one.bias is not None:
                bias = read(one.bias[0])[one.number].to(one.bias[1])
                layer.bias = nn.Parameter(bias, requires_grad=False)
            found.setdefault(one.number, {})[one.name] = layer
        self.extend(nn.ModuleDict(found[number]) for number in sorted(found))
        self._pending.clear()

    def use_kernel(self, dtype: torch.dtype) -> bool:
        """Whether rows of `dtype` are computed by one call of the C kernel from now on, which reads
        the layers' buffers where they are."""
        self._dtype = dtype
        found = [_products(layers, dtype) for layers in self]
        products = [one for one in found if one is not None]
        sizes = {tuple((p.ins, p.outs, p.wide, p.bits) for p in one) for one in products}
        activation = self._find_activation()
        fits = len(products) == len(found) and len(sizes) == 1 and not BLOCK % products[0][-1].wide
        if activation is not None and fits and dtype in DTYPES:
            self.whole = Experts(products, activation)
        return self.whole is not None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if hidden_states.is_meta:
            return torch.empty_like(hidden_states)
        if self.whole is not None and hidden_states.dtype == self._dtype:
            return self.whole(hidden_states, top_k_index, top_k_weights)
        numbers, places = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(numbers, minlength=len(self)).tolist()
        weights = top_k_weights.flatten()[places].float().unsqueeze(1)
        tokens = places // top_k_index.shape[-1]
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        start = 0
        for number, count in enumerate(counts):
            some = slice(start, start + count)
            if count:
                found = self.compute(number, hidden_states[tokens[some]])
                out.index_add_(0, tokens[some], found * weights[some])
            start += count
        return out.to(hidden_states.dtype)

    def compute(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """rows (n, E) through one expert, (n, E)."""
        layers = self[number]
        if "gate_up_proj" in layers:
            gated = layers["gate_up_proj"](rows)
        else:
            gated = torch.cat([layers["gate_proj"](rows), layers["up_proj"](rows)], -1)
        out: torch.Tensor = layers["down_proj"](self._apply_gate(gated))
        return out


def _products(layers: Any, dtype: torch.dtype) -> tuple[Product, ...] | None:
    """An expert's (gate, up, down) as the C kernel takes them; None where it cannot."""
    if any(one.bias is not None and one.bias.dtype != dtype for one in layers.values()):
        return None
    names = ("gate_proj", "up_proj", "down_proj")
    found = [product_of(layers[name]) for name in names if name in layers]
    known = tuple(one for one in found if one is not None)
    return known if len(known) == len(names) else None


class RepeatedExperts(QuantizedExperts):
    """Llama 4's: `hidden_states` (experts * T, E) has all tokens for each expert, those that do
    not go there as zeros, whose outputs are zeros."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        if hidden_states.is_meta:
            return torch.empty_like(hidden_states)
        rows = hidden_states.unflatten(0, (len(self), -1))
        out = torch.zeros_like(rows)
        for number, hit in enumerate(rows.any(-1)):
            if len(some := hit.nonzero().squeeze(1)):
                out[number, some] = self.compute(number, rows[number, some])
        return out.flatten(0, 1)


def quantize_decoder(decoder: nn.Module, kind: Kind, device: str, *, lays_out: bool = True) -> None:
    """A loaded decoder's linear layers, and on CPUs the experts that it has stacked: on GPUs they
    would run one by one then, and torch's grouped products of plain weights are faster. Raises
    StartupError as `dequantize.quantizable`."""
    is_cpu = torch.device(device).type == "cpu"
    lay_out = block_layer if is_cpu and lays_out else None
    num_layers = quantize_experts(decoder, kind, lay_out) if is_cpu else 0
    count = quantize_linears(decoder, kind, device, lay_out)
    if lays_out:
        more = f" and the experts of {num_layers} layers" if num_layers else ""
        _log.info("%d linear layers%s of the decoder are now %s", count, more, kind)


def quantize_experts(
    decoder: nn.Module, kind: Kind, lay_out: Callable[[QuantizedLinear], object] | None = None
) -> int:
    """As `dequantize.quantize_linears`, of stacked experts; returns of how many layers. What is
    held beyond the result is one layer's."""
    places = [
        (parent, name)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if _is_quantizable(child)
    ]
    for parent, name in places:
        experts = getattr(parent, name)
        layers = list(_quantized_layers(experts, kind, lay_out))
        made = (QuantizedExperts if hasattr(experts, "_apply_gate") else RepeatedExperts)(experts)
        made.extend(layers)
        setattr(parent, name, made)
        trim_heap()
    return len(places)


def _is_quantizable(experts: Any) -> bool:
    stacks = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(one, nn.Parameter) and one.dim() == 3 for one in stacks):
        return False
    linears = [linear_of(experts, name) for name in ("gate_proj", "down_proj")]
    if any(one.out_features % 16 | one.in_features % 32 for one in linears):
        return False
    return not why_unknown(experts, dict.fromkeys(range(len(experts.down_proj)), _LAYERS[1]))


def _quantized_layers(
    experts: Any, kind: Kind, lay_out: Callable[[QuantizedLinear], object] | None
) -> Iterator[nn.ModuleDict]:
    """Of each expert; gates by themselves where they are not between the rows that they gate."""
    names = ["gate_proj", "up_proj", "down_proj"]
    if not getattr(experts, "is_concatenated", True):
        names = ["gate_up_proj", "down_proj"]
    is_flipped = has_inputs_first(experts)
    first: dict[str, QuantizedLinear] = {}  # on torch's meta device all others are like it
    for number in range(len(experts.down_proj)):
        layers: dict[str, nn.Module] = {}
        for name in names:
            linear = linear_of(experts, name)
            stack = _STACKS.get(name, name)
            start = linear.out_features if name == "up_proj" else 0
            some = slice(start, start + linear.out_features)
            weight = getattr(experts, stack)[number]
            weight = (weight.t() if is_flipped else weight)[some]
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if (bias := getattr(experts, f"{stack}_bias", None)) is not None:
                linear.bias = nn.Parameter(bias[number, some].clone(), requires_grad=False)
            if (like := first.get(name)) is not None and weight.is_meta:
                buffers = dict(like.named_buffers(recurse=False))
                layers[name] = QuantizedLinear(linear, like.layout, buffers)
                continue
            layers[name] = first[name] = quantize_linear(linear, kind)
            if lay_out is not None:
                lay_out(layers[name])
        yield nn.ModuleDict(layers)


def quantized_experts(model: nn.Module) -> list[QuantizedExperts]:
    return [one for one in model.modules() if isinstance(one, QuantizedExperts)]


def find_layers(
    tensors: Mapping[str, StoredTensor],
    quantised: Mapping[str, Mapping[str, StoredTensor]],
    owner_of: Callable[[str], tuple[str, nn.Module] | None],
) -> Iterator[tuple[str, str, int, str, dict[str, Slice]]]:
    """Every quantised layer of an expert: its name in the files, its experts' in the model, its
    number, its own name, and its tensors.

    `owner_of`: the name that files would have for a parameter of stacked weights → the name of the
    module that holds it, and the module; None = the model has no such parameter.
    """
    for name, stored in quantised.items():
        if not (match := _SINGLE.fullmatch(name)):
            continue
        layer = _NAMES.get(match[3], match[3])
        if layer in _STACKS and (owner := owner_of(f"{match[1]}.{_STACKS[layer]}")):
            slices = {suffix: Slice(f"{name}.{suffix}", one) for suffix, one in stored.items()}
            yield name, owner[0], int(match[2]), layer, slices
    for name, one in tensors.items():
        if one.dtype not in ("F8_E4M3", "U8") or not (match := _WHOLE.fullmatch(name)):
            continue
        if len(one.shape) < 3 or not (owner := owner_of(match[1])):
            continue
        names = {"weight": name, "weight_scale_inv": f"{match[1]}_scale_inv"}
        # As transformers decides for Qwen3-VL, whose files and modules have them in other orders.
        like = getattr(owner[1], match[2]).shape
        is_flipped = has_inputs_first(owner[1]) == (one.shape == like)
        if match[3]:
            names, is_flipped = {"blocks": name, "scales": f"{match[1]}_scales"}, False
        parts = {
            suffix: tensors[full] for suffix, full in names.items()
            if full in tensors and tensors[full].shape[:1] == one.shape[:1]
        }  # fmt: skip
        for number in range(min(one.shape[0], like[0] + 1)):  # one too many is refused
            yield match[1], owner[0], number, match[2], {
                suffix: Slice(names[suffix], _part(part, is_flipped), number, is_flipped)
                for suffix, part in parts.items()
            }  # fmt: skip


def _part(whole: StoredTensor, is_flipped: bool) -> StoredTensor:
    shape = whole.shape[1:]
    return StoredTensor(whole.dtype, shape[::-1] if is_flipped else shape, whole.data_offsets)


def linear_of(experts: Any, layer: str) -> nn.Linear:
    """A linear layer of the sizes of an expert's, on torch's meta device."""
    shape = getattr(experts, _STACKS.get(layer, layer)).shape[1:]
    outs, ins = reversed(shape) if has_inputs_first(experts) else shape
    outs = outs // 2 if layer in ("gate_proj", "up_proj") else outs
    return nn.Linear(ins, outs, bias=False, device="meta")


def has_inputs_first(experts: Any) -> bool:
    """Whether inputs come before outputs in the stacked parameters."""
    return isinstance(experts, Llama4TextExperts) or bool(getattr(experts, "is_transposed", False))


def why_unknown(experts: Any, names: Mapping[int, set[str]]) -> str:
    """Why these experts cannot be computed layer by layer, of the names of the layers that each
    has; "" = they can."""
    own = {name for name, _ in (*experts.named_parameters(), *experts.named_buffers())}
    is_routed = getattr(experts, "has_gate", False) and not experts.has_post_expert_norm
    if not (is_routed or isinstance(experts, Llama4TextExperts)) or (
        own - {"gate_up_proj_bias", "down_proj_bias"} != {"gate_up_proj", "down_proj"}
    ):
        return f"which {type(experts).__name__} computes in a way that is not known"
    numbers = range(experts.gate_up_proj.shape[0])
    whole = names.get(0) in _LAYERS and set(names) == set(numbers)
    if not whole or any(names[number] != names[0] for number in numbers):
        count = sum(len(one) for one in names.values())
        return f"of which {count} layers are quantised, and others of the same experts are not"
    if "gate_proj" in names[0] and (len(own) > 2 or not getattr(experts, "is_concatenated", True)):
        return "whose gates are stored without what is above them"
    return ""


@contextlib.contextmanager
def opened(path: str) -> Iterator[Read]:
    """Reads tensors of a checkpoint by name, mapped from its files."""
    files = {name: file for file in weight_files(path) for name in file_header(file)}
    with contextlib.ExitStack() as stack:
        found: dict[object, Any] = {}

        def read(name: str) -> torch.Tensor:
            file = files[name]
            if file not in found:
                found[file] = stack.enter_context(safe_open(file, framework="pt"))
            tensor: torch.Tensor = found[file].get_tensor(name)
            return tensor

        yield read
