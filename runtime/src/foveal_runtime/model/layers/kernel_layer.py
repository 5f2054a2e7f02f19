"""One decoder layer as the C kernel takes it: its norms, products, and attention or a state.

Made by decoder_layers of a layer's modules. Addresses are good while the modules live.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.attention import KVPool, LayerGeometry
from foveal_runtime.model.checkpoint.blocked import product_of
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.cpu.experts import Experts
from foveal_runtime.model.cpu.fusing import FusedNorm, activation_of
from foveal_runtime.model.cpu.kernels import (
    NORMS,
    PRODUCTS,
    Expert,
    Layer,
    Product,
    RmsNorm,
    Routing,
)
from foveal_runtime.model.cpu.packing import KERNEL_ACTIVATIONS, Activation, PackedLinear
from foveal_runtime.model.layers.delta_rule import DeltaRule, Parts
from foveal_runtime.model.layers.layer_parts import (
    EXPERTS,
    FORMS,
    Unlike,
    has_weights,
    parts_of,
)

SILU = Activation("swish")
_MLP = ("gate", "up", "down")


class LayerParts:
    """One decoder layer's modules, known to be those of a layer that the kernel computes."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        """Raises Unlike."""
        parts = parts_of(layer, FORMS, EXPERTS)
        self.routed = _Routed(parts, dtype) if "router" in parts else None
        self.activation = -1
        if self.routed is None:
            self.activation = KERNEL_ACTIVATIONS[_activation_of(layer, parts["gate"])]
        self.norms = {name: _norm(parts.get(name)) for name in NORMS}
        own = [name for name in PRODUCTS if name in parts and not (self.routed and name in _MLP)]
        self.products = {name: _product(parts[name], dtype) for name in own}
        self.conv = parts.get("conv")
        self.rule: DeltaRule | None = None
        if "gated" in parts:
            self.rule = getattr(layer.linear_attn.forward, "rule", None)
            if self.rule is None:
                raise Unlike("its delta rule is computed by modules")
        if self.conv is not None and self.conv.weight.dtype != dtype:
            raise Unlike("its convolution has another dtype")

    def state(
        self, width: int, dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What the kernel keeps of a sequence in this layer, as StateShape says it."""
        if self.rule is not None:
            return self.rule.state
        return {} if self.conv is None else {"conv": ((width, self.conv.weight.shape[-1]), dtype)}

    @property
    def is_quantised(self) -> bool:
        each = self.routed.experts if self.routed else []
        experts = [one for expert in each for one in (expert.gate, expert.up, expert.down)]
        return any(one.bits for one in (*self.products.values(), *experts))

    def check(self, shape: dict[str, int], layer: LayerGeometry | None) -> None:
        """Whether it is as large as the first; `layer`: None for one without attention. Raises
        Unlike."""
        width, mlp = shape["width"], shape["mlp_width"]
        ends = {"gate": (width, mlp), "up": (width, mlp), "down": (mlp, width)}
        if self.routed is not None:
            ends = {}
            if any((one.gate.ins, one.down.outs) != (width, width) for one in self.routed.experts):
                raise Unlike("its experts differ in size")
        found = {name: (p.ins, p.outs) for name, p in self.products.items()}
        if layer is None:
            mixer = {"q": (width, 3 * width), "o": (width, width)}
            if self.rule is not None:
                mixer = self.rule.products(width)
            if found != {**ends, **mixer}:
                raise Unlike("its layers differ in size")
            return
        queries = layer.num_heads * layer.key_dim
        kvs = layer.num_kv_heads * layer.key_dim
        self.is_gated = found["q"] == (width, 2 * queries)
        asked = 2 * queries if self.is_gated else queries
        mixer = {"q": (width, asked), "k": (width, kvs), "v": (width, kvs), "o": (queries, width)}
        if found != {**ends, **mixer}:
            raise Unlike("its layers differ in size")
        heads = (layer.num_heads, layer.num_kv_heads, layer.key_dim)
        if heads != tuple(shape[name] for name in ("num_heads", "num_kv_heads", "head_dim")) or (
            self.activation not in (-1, shape["activation"])
        ):
            raise Unlike("its layers differ")

    @property
    def _common(self) -> dict[str, Any]:
        routing = self.routed and ctypes.addressof(self.routed.routing)
        return {**self.norms, **self.products, "routing": routing}

    def fill_state(self, states: Parts) -> Layer:
        """A layer that has states, one of each slot, instead of keys and values."""
        if self.rule is not None:
            self._job = self.rule.job(states)
            return Layer(**self._common, delta=ctypes.addressof(self._job))
        assert self.conv is not None
        bias = self.conv.bias
        return Layer(
            **self._common,
            taps=states["conv"].shape[-1],
            conv_weight=self.conv.weight.data_ptr(),
            conv_bias=None if bias is None else bias.data_ptr(),
            past=states["conv"].data_ptr(),
        )

    def fill_attention(self, layer: LayerGeometry, pool: KVPool, place: int) -> Layer:
        return Layer(
            **self._common,
            keys=pool.keys[layer.index].data_ptr(),
            values=pool.values[layer.index].data_ptr(),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            window=layer.sliding_window or 0,
            chunk=layer.chunk_size or 0,
            place=place,
            gated=self.is_gated,
        )


class _Routed:
    """Experts that rows are sent to, one more that all of them go to included.

    Attributes:
        experts: of each the products.
        router, routing: the module, and what the kernel takes of it.
    """

    def __init__(self, parts: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Raises Unlike."""
        self.router = parts["router"]
        whole = getattr(parts["experts"], "whole", None)
        if not isinstance(whole, Experts):
            raise Unlike("its experts are computed by modules")
        self.experts = list(whole.each)
        if (shared := parts.get("shared")) is not None:
            self.experts.append(Expert(*(_product(parts[name], dtype) for name in _MLP)))
        weights = [getattr(parts[name], "weight", None) for name in ("router", "shared")
                   if name in parts]  # fmt: skip
        if any(one is None or one.dtype != dtype or not one.is_contiguous() for one in weights):
            raise Unlike("its router is another")
        self._made = (Expert * len(self.experts))(*self.experts)
        num_used, normalises, kept_as = _used_by(self.router)
        self.routing = Routing(
            scores=self.router.weight.data_ptr(),
            shared=None if shared is None else shared.weight.data_ptr(),
            experts=ctypes.addressof(self._made),
            num_experts=len(whole.each),
            num_used=num_used,
            activation=whole.activation,
            normalises=normalises,
            rounds=kept_as == dtype,
        )

    @property
    def size(self) -> tuple[object, ...]:
        """What is the same in all layers of a model."""
        ends = (self.experts[0].gate, self.experts[-1].gate)
        sizes = [(product.ins, product.outs, product.wide) for product in ends]
        routing = self.routing
        return (
            *sizes,
            len(self.experts),
            routing.num_used,
            routing.activation,
            routing.shared is None,
        )


def _used_by(router: Any) -> tuple[int, bool, torch.dtype]:
    """How many experts a row goes to, whether their factors add up to 1, and the factors' type.
    Raises Unlike."""
    weight: Any = getattr(router, "weight", None)
    if [name for name, _ in router.named_parameters()] != ["weight"] or weight.dim() != 2:
        raise Unlike("its router is another")
    rows = torch.randn(4, weight.shape[1]).to(weight.dtype)
    found = router(rows)
    if not isinstance(found, tuple) or len(found) != 3 or found[1].shape != found[2].shape:
        raise Unlike("its router is another")
    num_used = found[2].shape[-1]
    factors = functional.linear(rows, weight).float().softmax(-1).topk(num_used).values
    apart = [
        float((found[1].float().sort(descending=True).values - one).abs().max())
        for one in (factors, factors / factors.sum(-1, keepdim=True))
    ]
    return num_used, apart[1] < apart[0], found[1].dtype


def _activation_of(layer: nn.Module, gate: nn.Module) -> Activation:
    """That of the MLP which `gate` belongs to; one that is no module, SiLU, if trials agree."""
    mlp = next(one for one in layer.children() if gate in list(one.children()))
    found = [activation_of(one) for one in mlp.children() if not has_weights(one)]
    known = [one for one in found or [SILU] if one in KERNEL_ACTIVATIONS]
    if len(found) > 1 or not known:
        raise Unlike("its MLP's activation is another")
    return known[0]


def _norm(module: nn.Module | None) -> RmsNorm:
    if module is None:
        return RmsNorm()
    fused = module.__dict__.get("forward")
    if not isinstance(fused, FusedNorm):
        raise Unlike(f"{type(module).__name__} is no RMS norm of the kernel's")
    return fused.parameters()


def _product(module: Any, dtype: torch.dtype) -> Product:
    bias = getattr(module, "bias", None)
    if bias is not None and bias.dtype != dtype:
        raise Unlike("its biases have another dtype")
    if isinstance(module, QuantizedLinear):
        if (product := product_of(module)) is None:
            raise Unlike(f"its weights are quantised ({module.layout.kind})")
        return product
    if not isinstance(module, PackedLinear) or module.weight.dtype != dtype:
        raise Unlike("its linear layers are not packed")
    if (packed := module.product()) is None:
        raise Unlike("its packed weights are laid out in a way that is not known here")
    return packed
