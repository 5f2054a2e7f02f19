"""Small steps of Llama-like decoders in one call of a C kernel, on CPUs.

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
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foveal_runtime.model.attention import ForwardContext, KVPool, LayerGeometry
from foveal_runtime.model.attention.cpu import Rows, is_supported
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.cpu.fusing import DTYPES, FusedNorm, activation_of
from foveal_runtime.model.cpu.kernels import (
    DONE,
    NO_MEMORY,
    DecodeKernel,
    DecodeStep,
    Layer,
    Product,
    RmsNorm,
    load_decode_kernel,
)
from foveal_runtime.model.cpu.packing import Activation, PackedLinear, layout_of, raw_address
from foveal_runtime.model.layers.layer_parts import (
    Trial,
    Unlike,
    check_decoder,
    children_of,
    llama_parts,
    trying,
)

MAX_ROWS = 64
"""Tokens of a step that is computed this way; with more, oneDNN's products are as fast."""
MAX_CHUNK_VISIBLE = 12_288
"""The most that the tokens of a prompt may see, added up: each reads its context by itself here.
Both limits are measured in docs/decisions/decode-in-one-call.md."""

_KERNEL_ACTIVATIONS = {
    Activation("swish"): 0,
    Activation("gelu", "tanh"): 1,
    Activation("gelu", "none"): 2,
    Activation("relu"): 3,
}
_NORMS = {
    "before": "input_layernorm",
    "after": "post_attention_layernorm",
    "query": "q_norm",
    "key": "k_norm",
}
_WHOLE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference over mean size after all layers: shows what is done around the layers (a scaled
embedding), not last bits, which the trials of single layers show."""
_log = logging.getLogger(__name__)


class DecodeLayers:
    """The layers of one decoder and one KV pool, as the kernel takes them."""

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[LayerGeometry], kernel: DecodeKernel
    ) -> None:
        """Raises Unlike."""
        check_decoder(loaded, layers)
        if not all(is_supported(one, loaded.dtype) for one in layers):
            raise Unlike("its heads have no kernel")
        decoder: Any = loaded.decoder
        self._kernel = kernel
        self._decoder = decoder
        self._geometry = layers
        self._parts = [_LayerParts(layer, loaded.dtype) for layer in decoder.layers]
        first = self._parts[0]
        self._shape = {
            "dtype": DTYPES[loaded.dtype],
            "width": first.products["q"].ins,
            "mlp_width": first.products["gate"].outs,
            "num_heads": layers[0].num_heads,
            "num_kv_heads": layers[0].num_kv_heads,
            "head_dim": layers[0].key_dim,
            "activation": first.activation,
        }
        for parts, layer in zip(self._parts, layers, strict=True):
            parts.check(self._shape, layer)
        self._pool: KVPool | None = None
        self._layers: Any = None

    def bind(self, pool: KVPool) -> None:
        """Decodes with this pool from now on."""
        self._pool = pool
        filled = [
            parts.fill(layer, pool)
            for parts, layer in zip(self._parts, self._geometry, strict=True)
        ]
        self._layers = (Layer * len(filled))(*filled)

    def takes(self, positions: torch.Tensor, context: ForwardContext) -> bool:
        """Whether a step has few tokens, at plain positions, that see not too much: prompts read
        their context once for each token here."""
        count = len(context.slots)
        if count > MAX_ROWS or context.groups is not None:
            return False
        if count > len(context.q_lens):
            pairs = zip(context.q_lens, context.kv_lens, strict=True)
            if sum(q_len * kv_len for q_len, kv_len in pairs) > MAX_CHUNK_VISIBLE:
                return False
        return positions.dim() == 2 or bool((positions == positions[:1]).all())

    def run(
        self, embeds: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """embeds (T, E) to hidden states (T, E) after the last norm; writes keys and values."""
        hidden = embeds.clone(memory_format=torch.contiguous_format)
        cos, sin = self.rotary(hidden, positions)
        self.run_layers(hidden, cos, sin, context, range(len(self._parts)))
        normed: torch.Tensor = self._decoder.norm(hidden)
        return normed

    def rotary(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (T, R) of the rotary embedding, in float32."""
        pair = self._decoder.rotary_emb(hidden[None], positions)
        cos, sin = (one.reshape(-1, *one.shape[-2:])[0].float().contiguous() for one in pair)
        return cos, sin

    def run_layers(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context: ForwardContext,
        which: range,
    ) -> None:
        """Hidden states (T, E) through some consecutive layers, in place."""
        assert self._pool is context.pool
        table = context.block_table
        assert table.dtype == torch.int32
        assert table.stride(1) == 1 or table.shape[1] == 1
        rows = rows_of(context)
        step = DecodeStep(
            **self._shape,
            num_threads=torch.get_num_threads(),
            num_layers=len(which),
            num_rows=len(hidden),
            rope_dim=cos.shape[1],
            block_size=context.pool.block_size,
            layers=ctypes.addressof(self._layers[which.start]),
            rows=hidden.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=context.slots.data_ptr(),
            block_table=table.data_ptr(),
            table_stride=table.stride(0),
            row_number=rows.token.ctypes.data,
            row_sequence=rows.sequence.ctypes.data,
            row_length=rows.length.ctypes.data,
        )
        code = self._kernel.run(step)
        if code == NO_MEMORY:
            raise MemoryError("decode step: no memory for intermediate results")
        if code != DONE:
            raise Unlike("its packed weights are laid out in a way the kernel cannot read")


class _LayerParts:
    """One decoder layer's modules, known to be those of a Llama-like layer."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        """Raises Unlike."""
        parts = llama_parts(layer)
        mlp = children_of(parts["mlp"], {"gate_proj", "up_proj", "down_proj"})
        found = [
            activation_of(child)
            for child in parts["mlp"].children()
            if not list(child.parameters())
        ]
        known = [one for one in found if one in _KERNEL_ACTIVATIONS]
        if len(found) != 1 or not known:
            raise Unlike("its MLP's activation is another")
        self.activation = _KERNEL_ACTIVATIONS[known[0]]
        self.norms = {name: _norm(parts.get(child)) for name, child in _NORMS.items()}
        self.products = {
            name.removesuffix("_proj"): _product(child, dtype)
            for name, child in (parts | mlp).items()
            if name.endswith("_proj")
        }

    def check(self, shape: dict[str, int], layer: LayerGeometry) -> None:
        """Whether it is as large as the first. Raises Unlike."""
        queries = layer.num_heads * layer.key_dim
        kvs = layer.num_kv_heads * layer.key_dim
        width, mlp = shape["width"], shape["mlp_width"]
        wanted = {
            "q": (width, queries),
            "k": (width, kvs),
            "v": (width, kvs),
            "o": (queries, width),
            "gate": (width, mlp),
            "up": (width, mlp),
            "down": (mlp, width),
        }
        if {name: (p.ins, p.outs) for name, p in self.products.items()} != wanted:
            raise Unlike("its layers differ in size")
        heads = (layer.num_heads, layer.num_kv_heads, layer.key_dim, self.activation)
        if heads != tuple(
            shape[name] for name in ("num_heads", "num_kv_heads", "head_dim", "activation")
        ):
            raise Unlike("its layers differ")

    def fill(self, layer: LayerGeometry, pool: KVPool) -> Layer:
        return Layer(
            **self.norms,
            **self.products,
            keys=pool.keys[layer.index].data_ptr(),
            values=pool.values[layer.index].data_ptr(),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            window=layer.sliding_window or 0,
            chunk=layer.chunk_size or 0,
        )


def rows_of(context: ForwardContext) -> Rows:
    windows, start = [], 0
    for i, (q_len, kv_len) in enumerate(zip(context.q_lens, context.kv_lens, strict=True)):
        windows.append((i, start, q_len, kv_len))
        start += q_len
    return Rows.of(windows)


def make_decode_layers(
    loaded: LoadedModel, layers: Sequence[LayerGeometry], pool: KVPool
) -> DecodeLayers | None:
    """The kernel's way of decoding with this model and pool, or None where it computes another
    thing; logs which."""
    kernel = load_decode_kernel()
    if isinstance(kernel, str):
        _log.info("small steps are computed by modules: %s", kernel)
        return None
    try:
        made = DecodeLayers(loaded, layers, kernel)
        if pool.dtype != loaded.dtype or pool.compute_dtype != loaded.dtype:
            raise Unlike("the KV cache has another dtype than the model")
        with trying():
            _try(made, loaded, layers)
    except Unlike as reason:
        _log.info("small steps are computed by modules: %s", reason)
        return None
    made.bind(pool)
    _log.info("steps of up to %d tokens are computed in one call", MAX_ROWS)
    return made


def _try(made: DecodeLayers, loaded: LoadedModel, layers: Sequence[LayerGeometry]) -> None:
    """Each layer, then all, against the modules, on random rows and contexts. Raises Unlike."""
    trial = Trial(loaded, layers, q_lens=(1, 1, 1), kv_lens=(1, 16, 21))
    made.bind(trial.pool)
    cos, sin = made.rotary(trial.rows, trial.positions)
    for number in range(len(layers)):
        wanted = trial.added_by(number)
        got = trial.rows.clone()
        made.run_layers(got, cos, sin, trial.context, range(number, number + 1))
        trial.check_same(f"layer {number}", got.double() - trial.rows.double(), wanted)
    wanted = trial.after_all().double()
    got = made.run(trial.rows, trial.positions, trial.context).double()
    apart = float((got - wanted).abs().mean() / wanted.abs().mean())
    if not apart <= _WHOLE_TOLERANCE[loaded.dtype]:
        raise Unlike(f"something around its layers differs by {apart:.2g}")


def _norm(module: nn.Module | None) -> RmsNorm:
    if module is None:
        return RmsNorm()
    fused = module.__dict__.get("forward")
    if not isinstance(fused, FusedNorm):
        raise Unlike(f"{type(module).__name__} is no RMS norm of the kernel's")
    return fused.parameters()


def _product(module: Any, dtype: torch.dtype) -> Product:
    if isinstance(module, QuantizedLinear):
        raise Unlike("its weights are quantised")
    if not isinstance(module, PackedLinear) or module.weight.dtype != dtype:
        raise Unlike("its linear layers are not packed")
    layout = layout_of(module.out_features, module.in_features, dtype)
    if layout is None:
        raise Unlike("its packed weights are laid out in a way that is not known here")
    bias = module.bias
    if bias is not None and bias.dtype != dtype:
        raise Unlike("its biases have another dtype")
    return Product(
        weight=raw_address(module.weight),
        bias=None if bias is None else bias.data_ptr(),
        ins=module.in_features,
        outs=module.out_features,
        **layout._asdict(),
    )
