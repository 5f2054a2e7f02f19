"""Decoder layers made like Llama's, in nine kernels instead of forty, on GPUs.

Made before the KV pool is. transformers computes a norm in eight small kernels and a rotary
embedding in five, each of which takes two microseconds to read next to nothing, and forty calls on
the host where a step is not recorded. Here queries, keys and values are one product, gate and up
are another, what stands between two products is one Triton kernel, and products add to the hidden
state themselves.

That a layer has these parts is read from its modules; that they compute the same is tried with its
own weights. A layer that does anything else keeps its forward.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from foveal_runtime.model.attention import (
    FP8,
    FP8_MAX,
    AttentionBackend,
    ForwardContext,
    LayerGeometry,
)
from foveal_runtime.model.checkpoint.blocked import product_on_gpu
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.cpu.fusing import TOLERANCE, activation_of
from foveal_runtime.model.cpu.packing import DTYPES, Activation
from foveal_runtime.model.gpu import kernels
from foveal_runtime.model.gpu.codes import MOST_FEW
from foveal_runtime.model.gpu.launch import next_power_of_2
from foveal_runtime.model.gpu.products import MAX_ROWS, GpuProduct, PlainProduct
from foveal_runtime.model.layers.last_layer import current_call, only_rows
from foveal_runtime.model.layers.layer_parts import (
    LLAMA_LIKE,
    Unlike,
    deepstack_levels,
    has_weights,
    last_norm,
    parts_of,
    trying,
)
from foveal_runtime.model.layers.trial import Trial

_ACTIVATIONS = {
    Activation("swish"): "swish",
    Activation("gelu", "tanh"): "gelu_tanh",
    Activation("gelu", "none"): "gelu",
    Activation("relu"): "relu",
}
_MOST_WIDTH = 32768
"""Of a row that one program norms."""
_MORE, _MANY = MAX_ROWS + 4, MOST_FEW + 4
_FEW_TRIALS = ((3, 1, 5), (3, 16, 21), False), ((1,), (21,), False)
_PLAIN_TRIALS = (*_FEW_TRIALS, ((_MORE,), (_MORE + 4,), True))
_CODED_TRIALS = (*_FEW_TRIALS, ((_MORE,), (_MORE + 4,), False), ((_MANY,), (_MANY + 4,), True))
"""(query tokens, context, whether an item is among them) of each sequence: products of few rows and
of one, of as many as codes are still read for in place, and of prompts; so no kernel of these
layers is compiled while clients wait."""
_log = logging.getLogger(__name__)


class _Norm(NamedTuple):
    """An RMS norm: the weight is added to `offset`."""

    weight: torch.Tensor
    eps: float
    offset: float

    def __call__(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """rows (T, E) normed, plus the rows of `residual`."""
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        count, width = rows.shape
        kernels.norm_kernel[count,](
            rows, self.weight, rows if residual is None else residual, out, rows.stride(0),
            self.eps, WIDTH=width, OFFSET=self.offset, HAS_RESIDUAL=residual is not None,
            BLOCK=next_power_of_2(width), num_warps=8 if width > 2048 else 4,
            **kernels.early_start(rows.device),
        )  # fmt: skip
        return out


class GpuLayer:
    """Stands where the layer's forward stood.

    Attributes:
        original: the layer's own forward.
        is_short: of wanted rows alone: nobody reads what else the last layer computes.
    """

    def __init__(self, layer: Any, geometry: LayerGeometry, dtype: torch.dtype) -> None:
        """Lays the weights of products that become one side by side. Raises Unlike."""
        parts = parts_of(layer, LLAMA_LIKE)
        if geometry.reads_only or geometry.has_sinks or geometry.key_dim != geometry.value_dim:
            raise Unlike("its attention is another")
        self.is_short = False
        self._geometry = geometry
        self.original = layer.forward
        self._before, self._after = _norm(parts["before"]), _norm(parts["after"])
        self._of_attention = _norm(parts["of_attention"]) if "of_attention" in parts else None
        self._of_mlp = _norm(parts["of_mlp"]) if "of_mlp" in parts else None
        self._query = _norm(parts["query"]) if "query" in parts else None
        self._key = _norm(parts["key"]) if "key" in parts else None
        heads = [one for one in (self._query, self._key) if one is not None]
        if (
            any(len(one.weight) != geometry.key_dim for one in heads)
            or len({one.offset for one in heads}) > 1
        ):
            raise Unlike("its norms of heads are others")
        activation = _activation_name(layer, parts["gate"])
        if any(parts[name].bias is not None for name in ("o", "down")):
            raise Unlike("its products back to the hidden state have biases")
        width = geometry.key_dim * (geometry.num_heads + 2 * geometry.num_kv_heads)
        self._qkv = _product([parts[name] for name in "qkv"], dtype)
        self._pair = _product([parts["gate"], parts["up"]], dtype, activation)
        self._out, self._down = (_product([parts[name]], dtype) for name in ("o", "down"))
        if self._qkv.size != width or self._before.weight.numel() > _MOST_WIDTH:
            raise Unlike("its products have other sizes")

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted, context = current_call()
        if context is None:
            return self.original(hidden_states, *args, **kwargs)
        rows = hidden_states[0]
        turn = kwargs["position_embeddings"]
        out = self._attend(self._before(rows), turn, context)
        if wanted is not None and self.is_short:
            rows, out = rows[wanted.index], out[wanted.index]
        return self._mlp(self._added(rows, out, self._out, self._of_attention))[None]

    def _attend(
        self,
        normed: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
    ) -> torch.Tensor:
        """(T, E) to (T, H * D); writes keys and values."""
        layer, pool = self._geometry, context.pool
        merged = self._qkv(normed)
        count, dim = len(merged), layer.key_dim
        cos, sin = (one.reshape(count, -1).contiguous() for one in turn)
        query = merged.new_empty((count, layer.num_heads, dim), dtype=pool.compute_dtype)
        keys, values = pool.keys[layer.index], pool.values[layer.index]
        none = _Norm(merged, 0.0, 0.0)
        asked, kept = self._query or none, self._key or none
        kernels.heads_kernel[count, layer.num_heads + 2 * layer.num_kv_heads](
            merged, cos, sin, asked.weight, kept.weight, context.slots_of(layer), query, keys,
            values, asked.eps, kept.eps,
            NUM_HEADS=layer.num_heads, NUM_KV_HEADS=layer.num_kv_heads, DIM=dim,
            TURNED=cos.shape[1], HAS_QUERY_NORM=self._query is not None,
            HAS_KEY_NORM=self._key is not None, OFFSET=max(asked.offset, kept.offset),
            LARGEST=FP8_MAX if keys.dtype == FP8 else 0.0,
            BLOCK=next_power_of_2(dim), num_warps=1, **kernels.early_start(merged.device),
        )  # fmt: skip
        out = context.backend.attend(layer, query, context)
        return out.to(normed.dtype).reshape(count, -1)

    def _mlp(self, rows: torch.Tensor) -> torch.Tensor:
        """(T, E) with what the MLP adds; `rows` are nobody else's."""
        opened = self._pair(self._after(rows))
        return self._added(rows, opened, self._down, self._of_mlp, is_own=True)

    def _added(
        self, rows: torch.Tensor, x: torch.Tensor, product: GpuProduct, norm: _Norm | None,
        is_own: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """rows (T, E) plus the product of x (T, K), normed where it is to be. `is_own`: nobody
        needs `rows` afterwards."""
        if norm is not None:
            return norm(product(x), residual=rows)
        return product(x, rows, is_own)


def _activation_name(layer: nn.Module, gate: nn.Module) -> str:
    mlp = next(one for one in layer.children() if gate in list(one.children()))
    found = [activation_of(one) for one in mlp.children() if not has_weights(one)]
    if len(found) != 1 or found[0] not in _ACTIVATIONS:
        raise Unlike("its MLP's activation is another")
    return _ACTIVATIONS[found[0]]


def _norm(module: Any) -> _Norm:
    """What the module computes, tried on random rows. Raises Unlike."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        raise Unlike(f"{type(module).__name__} is no RMS norm")
    # A mean far from 0: a layer norm, which takes it away, must not look alike.
    rows = (3 * torch.randn(4, len(weight)) + 5).to(weight.dtype)
    wanted = module(rows.to(weight.device)).cpu().double()
    wide, factors = rows.double(), weight.cpu().double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        apart = (scaled * (factors + offset) - wanted).abs().max()
        if float(apart) <= TOLERANCE[weight.dtype] * float(wanted.abs().max()):
            return _Norm(weight, eps, offset)
    raise Unlike(f"{type(module).__name__} is no RMS norm")


def _product(linears: Sequence[Any], dtype: torch.dtype, activation: str = "") -> GpuProduct:
    """One product with the weights of linear layers of the same inputs; the layers keep views.
    Raises Unlike."""
    bias = _merged_bias(linears, dtype)
    made: GpuProduct | None = None
    if all(isinstance(one, QuantizedLinear) for one in linears):
        made = product_on_gpu(linears, bias, activation)
    elif all(_is_plain(one, dtype) for one in linears):
        weight = linears[0].weight
        if len(linears) > 1:
            weight = torch.cat([one.weight for one in linears])
            views = weight.split([len(one.weight) for one in linears])
            for one, view in zip(linears, views, strict=True):
                one.weight.data = view
        made = PlainProduct(weight, bias, activation)
    if made is None:
        raise Unlike("its linear layers are neither plain nor of the same codes")
    if len(linears) > 1 and torch.cuda.is_available():
        torch.cuda.empty_cache()  # or the old weights' memory is kept for what never fits into it
    return made


def _is_plain(module: Any, dtype: torch.dtype) -> bool:
    is_linear = type(module) is nn.Linear and "forward" not in module.__dict__
    return is_linear and module.weight.dtype == dtype and not hasattr(module.weight, "to_local")


def _merged_bias(linears: Sequence[Any], dtype: torch.dtype) -> torch.Tensor | None:
    """Biases one behind the other, zeros for those that there are not."""
    biases = [getattr(one, "bias", None) for one in linears]
    found = next((one for one in biases if one is not None), None)
    if found is None:
        return None
    return torch.cat(
        [found.new_zeros(one.out_features) if bias is None else bias.data
         for one, bias in zip(linears, biases, strict=True)]
    ).to(dtype)  # fmt: skip


def replace_layers(
    loaded: LoadedModel, layers: Sequence[LayerGeometry], backend: AttentionBackend
) -> list[GpuLayer]:
    """Gives layers such a forward where it computes the same; returns these, and logs why others
    are left. `backend`: for trials, which then compile what will be used."""
    decoder: Any = loaded.decoder
    made: dict[int, GpuLayer] = {}
    reasons: set[str] = set()
    try:
        if loaded.dtype not in DTYPES or loaded.adapter.correct_query is not None:
            raise Unlike(f"its dtype is {loaded.dtype}, or its family does more between the layers")
        is_coded = any(isinstance(one, QuantizedLinear) for one in decoder.modules())
        with trying():
            trials = [
                Trial(
                    loaded, layers, q_lens=q_lens, kv_lens=kv_lens, backend=backend, has_item=item
                )
                for q_lens, kv_lens, item in (_CODED_TRIALS if is_coded else _PLAIN_TRIALS)
            ]
        for geometry in layers:
            number = geometry.layer if geometry.layer >= 0 else geometry.index
            try:
                with trying():
                    one = GpuLayer(decoder.layers[number], geometry, loaded.dtype)
                    for trial in trials:
                        _try(one, trial, number, geometry)
                made[number] = one
            except Unlike as reason:
                reasons.add(str(reason))
        _replace(loaded, made, trials[0])
    except Unlike as reason:
        made.clear()
        reasons.add(str(reason))
    if made:
        _replace_ends(loaded)
    why = f"; others by modules: {'; '.join(sorted(reasons))}" if reasons else ""
    _log.info("%d decoder layers are computed in few kernels%s", len(made), why)
    return list(made.values())


def _try(made: GpuLayer, trial: Trial, number: int, geometry: LayerGeometry) -> None:
    """Against the layer's own forward on random rows: results, keys and values. Raises Unlike."""
    embeddings = trial.embeddings(number)
    if embeddings[0].numel() != len(trial.rows) * embeddings[0].shape[-1]:
        raise Unlike("its rotary embedding is not one of (1, T, R)")
    wanted = trial.added_by(number)
    pools = (trial.pool.keys[geometry.index], trial.pool.values[geometry.index])
    written = [pool.clone() for pool in pools]
    for pool in pools:
        pool[trial.context.slots] = 0
    with only_rows(None, trial.context):
        found = made(trial.rows[None].clone(), position_embeddings=embeddings)[0]
    added = found.cpu().double() - trial.rows.cpu().double()
    trial.check_same("what it adds", added, wanted)
    for pool, other in zip(pools, written, strict=True):
        trial.check_same("what it keeps", pool, other)


def _replace(loaded: LoadedModel, made: dict[int, GpuLayer], trial: Trial) -> None:
    """Gives the layers their new forwards, if the whole decoder then says the same. Raises
    Unlike."""
    decoder: Any = loaded.decoder
    last = len(decoder.layers) - 1
    try:
        with trying():
            wanted = trial.after_all()
            for number, one in made.items():
                decoder.layers[number].forward = one
            with only_rows(None, trial.context):
                got = trial.after_all()
        trial.check_whole(got, wanted)
    except Unlike:
        for number, one in made.items():
            decoder.layers[number].forward = one.original
        raise
    if last in made and deepstack_levels(loaded) <= last:
        made[last].is_short = True


def _replace_ends(loaded: LoadedModel) -> None:
    """Gives the norm and the head behind the layers the same kernels, where they are like those
    of layers."""
    with contextlib.suppress(Unlike), trying():
        last: Any = last_norm(loaded.decoder)
        norm = _norm(last)
        last.forward = lambda rows: norm(rows.flatten(0, -2)).view_as(rows)
    head: Any = getattr(loaded.model, "lm_head", None)
    if _is_plain(head, loaded.dtype):
        product = PlainProduct(head.weight, head.bias)
        head.forward = lambda rows: product(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])
