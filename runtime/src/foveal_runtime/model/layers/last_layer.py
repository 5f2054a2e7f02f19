"""The last decoder layer, for the rows alone that logits are made from, on CPUs.

Made by the runner. Of the other tokens of a prompt the last layer only leaves keys and values:
nobody reads what its attention and its MLP would add to them. That is most of one layer's work, a
twelfth of a small decoder and a thirty-second of a large one.

Fits layers that are made like Llama's; whether one computes the same is tried with its own weights,
and one that does anything else keeps its forward.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from foveal_runtime.model.attention import ForwardContext, LayerGeometry
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.layers.layer_parts import (
    ATTENTION,
    Unlike,
    check_decoder,
    deepstack_levels,
    parts_of,
    trying,
)
from foveal_runtime.model.layers.trial import Trial

_log = logging.getLogger(__name__)
_call = threading.local()


class WantedRows(NamedTuple):
    """Rows of a batch, i64 (n) on the device, and how many tokens each of them sees."""

    index: torch.Tensor
    kv_lens: list[int]


@contextmanager
def only_rows(wanted: WantedRows | None, context: ForwardContext | None) -> Iterator[None]:
    """A short last layer called within returns the hidden states of these rows only; None: of
    all. Layers on GPUs that know no context are computed by their modules."""
    _call.wanted, _call.context = wanted, context
    try:
        yield
    finally:
        _call.wanted = _call.context = None


def current_call() -> tuple[WantedRows | None, ForwardContext | None]:
    """What `only_rows` was given, by the thread that asks."""
    return getattr(_call, "wanted", None), getattr(_call, "context", None)


class LastLayer:
    """Stands where the layer's forward stood."""

    def __init__(self, layer: Any, geometry: LayerGeometry) -> None:
        """Raises Unlike."""
        self._parts = parts_of(layer, [{**ATTENTION, "mlp": "mlp"}], whole="mlp")
        self._geometry = geometry
        self._original = layer.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted, context = current_call()
        if wanted is None or context is None:
            return self._original(hidden_states, *args, **kwargs)
        return self._run(hidden_states, kwargs["position_embeddings"], wanted, context)

    def _run(
        self,
        hidden: torch.Tensor,
        embeddings: tuple[torch.Tensor, torch.Tensor],
        wanted: WantedRows,
        context: ForwardContext,
    ) -> torch.Tensor:
        """hidden (1, T, E) to (1, n, E); writes keys and values of all T tokens."""
        rows = wanted.index
        parts, layer = self._parts, self._geometry
        backend, dtype = context.backend, context.pool.compute_dtype
        cos, sin = (one[0, :, None] for one in embeddings)  # (T, 1, R)
        normed = parts["before"](hidden)
        key = _heads(normed, parts["k"], parts.get("key"), layer.key_dim)
        value = _heads(normed, parts["v"], None, layer.value_dim)
        backend.write_kv(layer, _rotated(key, cos, sin).to(dtype), value.to(dtype), context)
        if not len(rows):
            return hidden[:, :0]
        query = _heads(normed[:, rows], parts["q"], parts.get("query"), layer.key_dim)
        query = _rotated(query, cos[rows], sin[rows])
        out = backend.attend(layer, query.to(dtype), _as_decode(context, wanted))
        few = hidden[:, rows]
        few = few + parts["o"](out.to(few.dtype).reshape(1, len(rows), -1))
        added: torch.Tensor = few + parts["mlp"](parts["after"](few))
        return added


def _heads(rows: torch.Tensor, linear: Any, norm: Any, dim: int) -> torch.Tensor:
    """(1, T, E) to (T, H, D)."""
    heads = linear(rows)[0].unflatten(-1, (-1, dim))
    return heads if norm is None else norm(heads)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (T, H, D), of the first dimensions where it has fewer than D."""
    turned, rest = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _as_decode(context: ForwardContext, wanted: WantedRows) -> ForwardContext:
    """The same step as seen by one token of some of its sequences."""
    rows = wanted.index
    place = context.pos_of_token[rows]
    owners = context.seq_of_token[rows].long()
    numbers = torch.arange(len(rows) + 1, dtype=torch.int32)
    return dataclasses.replace(
        context,
        q_start=numbers,
        seq_lens=place + 1,
        block_table=context.block_table[owners],
        slots=context.slots[rows],
        windowed=tuple(
            one[index] for one, index in zip(context.windowed, (owners, rows), strict=False)
        ),
        seq_of_token=numbers[:-1],
        pos_of_token=place,
        q_lens=[1] * len(rows),
        kv_lens=wanted.kv_lens,
    )


def shorten_last_layer(loaded: LoadedModel, layers: Sequence[LayerGeometry]) -> bool:
    """Gives the last layer such a forward; False where it computes another thing; logs which."""
    try:
        check_decoder(loaded, len(layers), layers)
        if deepstack_levels(loaded) >= len(layers):
            raise Unlike("it takes something of images behind the last layer")
        decoder: Any = loaded.decoder
        if isinstance(decoder.layers[-1].forward, LastLayer):
            return True
        made = LastLayer(decoder.layers[-1], layers[-1])
        with trying():
            _try(made, loaded, layers)
    except Unlike as reason:
        _log.info("the last layer is computed for all rows: %s", reason)
        return False
    decoder.layers[-1].forward = made
    return True


def _try(made: LastLayer, loaded: LoadedModel, layers: Sequence[LayerGeometry]) -> None:
    """Against the layer's own forward on random rows: results, keys and values. Raises Unlike."""
    trial = Trial(loaded, layers, q_lens=(3, 1, 5), kv_lens=(3, 16, 21))
    number = len(layers) - 1
    embeddings = trial.embeddings(number)
    if embeddings[0].dim() != 3:
        raise Unlike("its rotary embedding is not one of (1, T, R)")
    last = torch.tensor([2, 8])
    rows = WantedRows(last, [3, 21])
    wanted = trial.added_by(number)[last]
    pools = (trial.pool.keys[number], trial.pool.values[number])
    written = [pool.clone() for pool in pools]
    for pool in pools:
        pool[trial.context.slots] = 0
    with only_rows(rows, trial.context):
        found = made(trial.rows[None], position_embeddings=embeddings)[0]
    trial.check_same("what it adds", found.double() - trial.rows[last].double(), wanted)
    for pool, other in zip(pools, written, strict=True):
        trial.check_same("what it keeps", pool, other)
