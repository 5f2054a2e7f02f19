"""Small steps of many decoders in one call of a C kernel, on CPUs.

Made by the runner once the KV pool is there. transformers computes a layer in some twenty
operators, each of which wakes threads and waits for them; for a few tokens that takes longer than
reading the weights. The kernel (kernels/decode_layers.c) goes through all layers with threads that
are woken once, and reads the weights where oneDNN packed them.

That a decoder has the parts of such a layer is read from its modules; that these parts compute what
the kernel computes is tried, layer by layer and then as a whole, with the model's own weights. A
decoder that is anything else keeps its modules, and so does every step of more tokens.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from foveal_runtime.model.attention import ForwardContext, KVPool, LayerGeometry
from foveal_runtime.model.attention.cpu import Rows, is_supported
from foveal_runtime.model.checkpoint.blocked import product_of
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.cpu.fusing import DTYPES, FusedNorm, activation_of
from foveal_runtime.model.cpu.kernels import (
    DONE,
    NO_MEMORY,
    NORMS,
    PRODUCTS,
    DecodeKernel,
    DecodeStep,
    Layer,
    Place,
    Product,
    RmsNorm,
    load_decode_kernel,
)
from foveal_runtime.model.cpu.packing import Activation, PackedLinear, layout_of, raw_address
from foveal_runtime.model.layers.delta_rule import DeltaRule, Parts
from foveal_runtime.model.layers.layer_parts import (
    FORMS,
    Trial,
    Unlike,
    check_decoder,
    has_weights,
    last_norm,
    parts_of,
    rotate,
    rotation_of,
    trying,
)
from foveal_runtime.model.layers.state import States, segments_of


class Limits(NamedTuple):
    """Of steps that are computed this way, measured in docs/decisions/decode-in-one-call.md."""

    rows: int
    """Tokens of a step; with more, modules are as fast."""
    visible: int
    """What the tokens of prompts see, added up: each reads its context by itself here."""


LIMITS = Limits(64, 12_288)
FAST_LIMITS = Limits(128, 32_768)
"""Where the kernel multiplies bfloat16 numbers as fast as oneDNN."""

SILU = Activation("swish")
_KERNEL_ACTIVATIONS = {
    SILU: 0,
    Activation("gelu", "tanh"): 1,
    Activation("gelu", "none"): 2,
    Activation("relu"): 3,
}
_TRIED = (3, 1, 1)
"""New tokens of a trial's sequences."""
_WHOLE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference over mean size after all layers: shows what is done around the layers (a scaled
embedding), not last bits, which the trials of single layers show."""
_log = logging.getLogger(__name__)


class DecodeLayers:
    """The layers of one decoder and one KV pool, as the kernel takes them."""

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[LayerGeometry],
        kernel: DecodeKernel,
        states: States | None = None,
    ) -> None:
        """Raises Unlike."""
        shapes = states.shapes if states is not None else ()
        check_decoder(loaded, len(layers) + len(shapes), layers)
        if not all(is_supported(one, loaded.dtype) for one in layers):
            raise Unlike("its heads have no kernel")
        decoder: Any = loaded.decoder
        self._kernel = kernel
        self._decoder = decoder
        self._norm = last_norm(decoder)
        self._states = states
        self._parts = [_LayerParts(layer, loaded.dtype) for layer in decoder.layers]
        is_fast = kernel.is_fast_in_bfloat16 and loaded.dtype == torch.bfloat16
        is_quantised = any(one.bits for parts in self._parts for one in parts.products.values())
        self.limits = FAST_LIMITS if is_fast and not is_quantised else LIMITS
        self._geometry = {one.layer if one.layer >= 0 else one.index: one for one in layers}
        self._rotations = {number: rotation_of(decoder, number) for number in self._geometry}
        first = self._parts[0]
        self._shape = {
            "dtype": DTYPES[loaded.dtype],
            "width": first.products["down"].outs,
            "mlp_width": first.products["gate"].outs,
            "num_heads": layers[0].num_heads,
            "num_kv_heads": layers[0].num_kv_heads,
            "head_dim": layers[0].key_dim,
            "activation": first.activation,
        }
        for number, parts in enumerate(self._parts):
            parts.check(self._shape, self._geometry.get(number))
        for shape in shapes:
            if shape.parts != self._parts[shape.layer].state(self._shape["width"], loaded.dtype):
                raise Unlike("its recurrent states are others")
        self._pool: KVPool | None = None
        self._layers: Any = None
        self._places: list[tuple[LayerGeometry, str]] = []

    def bind(self, pool: KVPool) -> None:
        """Decodes with this pool, and the states that there are now, from now on."""
        self._pool = pool
        kinds = {
            number: (layer.index in pool.windowed, self._rotations[number])
            for number, layer in self._geometry.items()
        }
        examples = {kinds[number]: layer for number, layer in self._geometry.items()}
        self._places = [(layer, rotation) for (_, rotation), layer in examples.items()]
        known = list(examples)
        filled = [
            parts.fill_attention(self._geometry[number], pool, known.index(kinds[number]))
            if number in kinds
            else parts.fill_state(self._tensors[number])
            for number, parts in enumerate(self._parts)
        ]
        self._layers = (Layer * len(filled))(*filled)

    @property
    def _tensors(self) -> Mapping[int, Parts]:
        assert self._states is not None
        assert self._states.pool is not None
        return self._states.pool.tensors

    def takes(
        self, positions: torch.Tensor, context: ForwardContext, extra: Mapping[str, Any]
    ) -> bool:
        """Whether a step has few tokens, at plain positions, that see not too much: prompts read
        their context once for each token here. `extra`: what layers take of images (deepstack),
        where a step has such."""
        count = len(context.slots)
        if count > self.limits.rows or context.groups is not None or extra:
            return False
        if count > len(context.q_lens):
            pairs = zip(context.q_lens, context.kv_lens, strict=True)
            if sum(q_len * kv_len for q_len, kv_len in pairs) > self.limits.visible:
                return False
        return positions.dim() == 2 or bool((positions == positions[:1]).all())

    def run(
        self, embeds: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """embeds (T, E) to hidden states (T, E) after the last norm; writes keys and values."""
        hidden = embeds.clone(memory_format=torch.contiguous_format)
        self.run_layers(hidden, positions, context, range(len(self._parts)))
        normed: torch.Tensor = self._norm(hidden)
        return normed

    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        which: range,
    ) -> None:
        """Hidden states (T, E) through some consecutive layers, in place. Raises Unlike."""
        assert self._pool is context.pool
        turns = [self._rotary(hidden, positions, kind) for _, kind in self._places]
        rope_dim = turns[0].shape[-1]
        if any(one.shape[-1] != rope_dim for one in turns):
            raise Unlike("its layers turn heads by different numbers of dimensions")
        pairs = zip(self._places, turns, strict=True)
        places = [_place(context, layer, turn) for (layer, _), turn in pairs]
        held = (Place * len(places))(*places)
        rows = rows_of(context)
        segments = segments_of(context)
        step = DecodeStep(
            **self._shape,
            num_threads=torch.get_num_threads(),
            num_layers=len(which),
            num_rows=len(hidden),
            rope_dim=rope_dim,
            block_size=context.pool.block_size,
            layers=ctypes.addressof(self._layers[which.start]),
            rows=hidden.data_ptr(),
            places=ctypes.addressof(held),
            row_number=rows.token.ctypes.data,
            row_sequence=rows.sequence.ctypes.data,
            row_length=rows.length.ctypes.data,
            num_segments=len(segments),
            segments=segments.data_ptr(),
        )
        code = self._kernel.run(step)
        if code == NO_MEMORY:
            raise MemoryError("decode step: no memory for intermediate results")
        if code != DONE:
            raise Unlike("its packed weights are laid out in a way the kernel cannot read")

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> torch.Tensor:
        """Cosines and sines (2, T, R) of a rotary embedding, in float32."""
        pair = rotate(self._decoder, hidden, positions, kind)
        return torch.stack([one.reshape(-1, *one.shape[-2:])[0].float() for one in pair])


def _place(context: ForwardContext, layer: LayerGeometry, turn: torch.Tensor) -> Place:
    table = context.table_of(layer)
    assert table.dtype == torch.int32
    assert table.stride(1) == 1 or table.shape[1] == 1
    return Place(
        cos=turn[0].data_ptr(),
        sin=turn[1].data_ptr(),
        slots=context.slots_of(layer).data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
    )


class _LayerParts:
    """One decoder layer's modules, known to be those of a layer that the kernel computes."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        """Raises Unlike."""
        parts = parts_of(layer, FORMS)
        self.activation = _KERNEL_ACTIVATIONS[_activation_of(layer, parts["gate"])]
        self.norms = {name: _norm(parts.get(name)) for name in NORMS}
        self.products = {name: _product(parts[name], dtype) for name in PRODUCTS if name in parts}
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

    def check(self, shape: dict[str, int], layer: LayerGeometry | None) -> None:
        """Whether it is as large as the first; `layer`: None for one without attention. Raises
        Unlike."""
        width, mlp = shape["width"], shape["mlp_width"]
        ends = {"gate": (width, mlp), "up": (width, mlp), "down": (mlp, width)}
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
        heads = (layer.num_heads, layer.num_kv_heads, layer.key_dim, self.activation)
        if heads != tuple(
            shape[name] for name in ("num_heads", "num_kv_heads", "head_dim", "activation")
        ):
            raise Unlike("its layers differ")

    def fill_state(self, states: Parts) -> Layer:
        """A layer that has states, one of each slot, instead of keys and values."""
        if self.rule is not None:
            self._job = self.rule.job(states)
            return Layer(**self.norms, **self.products, delta=ctypes.addressof(self._job))
        assert self.conv is not None
        bias = self.conv.bias
        return Layer(
            **self.norms,
            **self.products,
            taps=states["conv"].shape[-1],
            conv_weight=self.conv.weight.data_ptr(),
            conv_bias=None if bias is None else bias.data_ptr(),
            past=states["conv"].data_ptr(),
        )

    def fill_attention(self, layer: LayerGeometry, pool: KVPool, place: int) -> Layer:
        return Layer(
            **self.norms,
            **self.products,
            keys=pool.keys[layer.index].data_ptr(),
            values=pool.values[layer.index].data_ptr(),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            window=layer.sliding_window or 0,
            chunk=layer.chunk_size or 0,
            place=place,
            gated=self.is_gated,
        )


def _activation_of(layer: nn.Module, gate: nn.Module) -> Activation:
    """That of the MLP which `gate` belongs to; one that is no module, SiLU, if trials agree."""
    mlp = next(one for one in layer.children() if gate in list(one.children()))
    found = [activation_of(one) for one in mlp.children() if not has_weights(one)]
    known = [one for one in found or [SILU] if one in _KERNEL_ACTIVATIONS]
    if len(found) > 1 or not known:
        raise Unlike("its MLP's activation is another")
    return known[0]


def rows_of(context: ForwardContext) -> Rows:
    windows, start = [], 0
    for i, (q_len, kv_len) in enumerate(zip(context.q_lens, context.kv_lens, strict=True)):
        windows.append((i, start, q_len, kv_len))
        start += q_len
    return Rows.of(windows)


def make_decode_layers(
    loaded: LoadedModel,
    layers: Sequence[LayerGeometry],
    pool: KVPool,
    states: States | None = None,
) -> DecodeLayers | None:
    """The kernel's way of decoding with this model, pool and states, or None where it computes
    another thing; logs which."""
    kernel = load_decode_kernel()
    if isinstance(kernel, str):
        _log.info("small steps are computed by modules: %s", kernel)
        return None
    try:
        made = DecodeLayers(loaded, layers, kernel, states)
        if pool.dtype != loaded.dtype or pool.compute_dtype != loaded.dtype:
            raise Unlike("the KV cache has another dtype than the model")
        with trying():
            _try(made, Trial(loaded, layers, q_lens=_TRIED, kv_lens=(4, 16, 21), states=states))
    except Unlike as reason:
        _log.info("small steps are computed by modules: %s", reason)
        return None
    made.bind(pool)
    _log.info("steps of up to %d tokens are computed in one call", made.limits.rows)
    return made


def _try(made: DecodeLayers, trial: Trial) -> None:
    """Each layer, then all, against the modules, on random rows, contexts and states. Raises
    Unlike."""
    with trial.random_states() as states:
        made.bind(trial.pool)
        before = [one.clone() for one in states]
        for number in range(len(made._parts)):
            wanted = trial.added_by(number)
            after = _swap(states, before)
            got = trial.rows.clone()
            made.run_layers(got, trial.positions, trial.context, range(number, number + 1))
            trial.check_same(f"layer {number}", got.double() - trial.rows.double(), wanted)
            for mine, modules in zip(_swap(states, before), after, strict=True):
                trial.check_same(f"the state of layer {number}", mine, modules)
        wanted = trial.after_all().double()
        _swap(states, before)
        got = made.run(trial.rows, trial.positions, trial.context).double()
    apart = float((got - wanted).abs().mean() / wanted.abs().mean())
    if not apart <= _WHOLE_TOLERANCE[trial.rows.dtype]:
        raise Unlike(f"something around its layers differs by {apart:.2g}")


def _swap(states: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sets states to `others`; returns what they were."""
    kept = [one.clone() for one in states]
    for one, other in zip(states, others, strict=True):
        one.copy_(other)
    return kept


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
    layout = layout_of(module.out_features, module.in_features, dtype)
    if layout is None:
        raise Unlike("its packed weights are laid out in a way that is not known here")
    return Product(
        weight=raw_address(module.weight),
        bias=None if bias is None else bias.data_ptr(),
        ins=module.in_features,
        outs=module.out_features,
        **layout._asdict(),
    )
