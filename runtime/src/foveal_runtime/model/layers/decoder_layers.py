"""Steps of many decoders in one call of a C kernel, on CPUs.

Made by the runner once the KV pool is there. transformers computes a layer in some twenty
operators, each of which wakes threads and waits for them; for a few tokens that takes longer than
reading the weights, and beside other processes one thread often waits for the other. The kernel
(kernels/decoder_layers.c) goes through all layers with threads that are woken once and take work
whenever they are free, and reads the weights where oneDNN packed them.

That a decoder has the parts of such a layer is read from its modules; that these parts compute what
the kernel computes is tried, layer by layer and then as a whole, with the model's own weights. A
decoder that is anything else keeps its modules. So do long steps where oneDNN's products are faster
than the kernel's.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from foveal_runtime.model.attention import ForwardContext, KVPool, LayerGeometry
from foveal_runtime.model.attention.cpu import MAX_ROWS, Rows, is_supported
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.cpu.kernels import (
    DONE,
    NO_MEMORY,
    DecoderKernel,
    DecoderStep,
    Layer,
    Place,
    load_decoder_kernel,
)
from foveal_runtime.model.cpu.packing import DTYPES, PairedLinear, packed_class
from foveal_runtime.model.layers.delta_rule import Parts
from foveal_runtime.model.layers.kernel_layer import LayerParts
from foveal_runtime.model.layers.last_layer import WantedRows, only_rows
from foveal_runtime.model.layers.layer_parts import (
    Unlike,
    check_decoder,
    last_norm,
    rotate,
    rotation_of,
    trying,
)
from foveal_runtime.model.layers.state import States, segments_of
from foveal_runtime.model.layers.trial import Trial


class Limits(NamedTuple):
    """Of small steps, measured in docs/decisions/decode-in-one-call.md: all their tokens attend by
    themselves. In longer ones those of a prompt share what they read of their context."""

    rows: int
    """Tokens of a step."""
    visible: int
    """What the tokens of prompts see, added up: each reads its context by itself here."""


LIMITS = Limits(64, 12_288)
FAST_LIMITS = Limits(128, 32_768)
"""Where the kernel multiplies bfloat16 numbers as fast as oneDNN."""
TILE_LIMITS = Limits(128, 2_048)
"""Likewise with AMX, which makes shared contexts cheaper."""

MOST_ROWS = 1024
"""Tokens in one call, which has memory for that many: more take several, one after the other."""
SHORT_LAST = 16
"""As many times fewer rows wanted than computed make the short last layer worth its modules."""

MASK, LEVELS = "visual_pos_masks", "deepstack_visual_embeds"
DEEPSTACK = frozenset((MASK, LEVELS))
"""What the first layers take of images: (1, T), and of each layer (n, E)."""

_TRIED = ((3, 4), (1, 16), (7, 21))
"""New tokens of a trial's sequences, and how many there are then."""
_log = logging.getLogger(__name__)


class DecoderLayers:
    """The layers of one decoder and one KV pool, as the kernel takes them."""

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[LayerGeometry],
        kernel: DecoderKernel,
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
        self._parts = [LayerParts(layer, loaded.dtype) for layer in decoder.layers]
        is_half = loaded.dtype == torch.bfloat16
        is_quantised = any(parts.is_quantised for parts in self._parts)
        is_fast = kernel.is_fast_in_bfloat16 if is_half else kernel.is_fast_in_float32
        is_alone = is_half and packed_class(loaded.dtype) is PairedLinear
        has_tiles = kernel.has_tiles and is_half
        is_whole = not is_quantised or (kernel.has_dots and is_half)
        self.takes_long = (is_fast or is_alone) and (kernel.has_chunks or is_whole)
        fast = TILE_LIMITS if has_tiles else FAST_LIMITS
        self.limits = fast if is_half and is_fast and is_whole else LIMITS
        self._geometry = {one.layer if one.layer >= 0 else one.index: one for one in layers}
        self._rotations = {number: rotation_of(decoder, number) for number in self._geometry}
        routed = [parts.routed for parts in self._parts if parts.routed is not None]
        if len({one.size for one in routed}) > 1:
            raise Unlike("its layers have other experts")
        mlp = next((parts for parts in self._parts if parts.routed is None), None)
        self._shape = {
            "dtype": DTYPES[loaded.dtype],
            "width": self._parts[0].products["o"].outs,
            "mlp_width": mlp.products["gate"].outs if mlp else 0,
            "num_heads": layers[0].num_heads,
            "num_kv_heads": layers[0].num_kv_heads,
            "head_dim": layers[0].key_dim,
            "activation": mlp.activation if mlp else 0,
        }
        for number, parts in enumerate(self._parts):
            parts.check(self._shape, self._geometry.get(number))
        for shape in shapes:
            if shape.parts != self._parts[shape.layer].state(self._shape["width"], loaded.dtype):
                raise Unlike("its recurrent states are others")
        self._is_plain = self._has_one_turn(int(self._shape["width"]), bool(loaded.adapter.rope))
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
        """Whether a step is small, or long ones are as fast as by modules. `extra`: what layers
        take of images (deepstack), where a step has such."""
        if context.groups is not None or not extra.keys() <= DEEPSTACK:
            return False
        if not self.takes_long and not self.is_small(context):
            return False
        return self._is_plain or bool((positions == positions[:1]).all())

    def each_way(self) -> Iterator[None]:
        """For trials: all steps as small ones, and then as long ones."""
        yield
        if self.takes_long:
            limits, self.limits = self.limits, Limits(0, 0)
            try:
                yield
            finally:
                self.limits = limits

    def is_small(self, context: ForwardContext) -> bool:
        """Whether a step has few tokens that see not too much: each reads its context by itself."""
        count = len(context.slots)
        if count > self.limits.rows:
            return False
        pairs = zip(context.q_lens, context.kv_lens, strict=True)
        return (
            count == len(context.q_lens)
            or sum(q_len * kv_len for q_len, kv_len in pairs) <= self.limits.visible
        )

    def run(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        extra: Mapping[str, Any] = MappingProxyType({}),
        few: WantedRows | None = None,
    ) -> torch.Tensor:
        """embeds (T, E) to hidden states (T, E) after the last norm; writes keys and values.

        `few`: of these rows only (n, E), if the decoder's last layer can be short.
        """
        hidden = embeds.clone(memory_format=torch.contiguous_format)
        every = range(len(self._parts))
        for level in extra.get(LEVELS, ()):
            self.run_layers(hidden, positions, context, every[:1])
            hidden[extra[MASK][0]] += level
            every = every[1:]
        if few is not None and len(hidden) >= SHORT_LAST * len(few.index):
            self.run_layers(hidden, positions, context, every[:-1])
            turn = rotate(self._decoder, hidden, positions, self._rotations[every[-1]])
            with only_rows(few, context):
                last = self._decoder.layers[-1]
                hidden = last.forward(hidden[None], position_embeddings=turn)[0]
        else:
            self.run_layers(hidden, positions, context, every)
            if few is not None:
                hidden = hidden[few.index]
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
        if not which:
            return
        turns = [self._rotary(hidden, positions, kind) for _, kind in self._places]
        rope_dim = turns[0].shape[-1]
        if any(one.shape[-1] != rope_dim for one in turns):
            raise Unlike("its layers turn heads by different numbers of dimensions")
        pairs = list(zip(self._places, turns, strict=True))
        is_small = self.is_small(context)
        for low in range(0, len(hidden), MOST_ROWS):
            high = min(low + MOST_ROWS, len(hidden))
            places = [_place(context, layer, turn, low) for (layer, _), turn in pairs]
            held = (Place * len(places))(*places)
            rows = _rows_of(context, low, high, MOST_ROWS if is_small else MAX_ROWS)
            segments = _segments_of(context, low, high)
            step = DecoderStep(
                **self._shape,
                num_threads=torch.get_num_threads(),
                num_layers=len(which),
                num_rows=high - low,
                rope_dim=rope_dim,
                block_size=context.pool.block_size,
                layers=ctypes.addressof(self._layers[which.start]),
                rows=hidden[low:].data_ptr(),
                places=ctypes.addressof(held),
                row_token=rows.all.token.ctypes.data,
                row_sequence=rows.all.sequence.ctypes.data,
                row_length=rows.all.length.ctypes.data,
                num_single=rows.num_single,
                num_chunks=len(rows.chunk_rows),
                chunk_rows=rows.chunk_rows.ctypes.data,
                num_segments=len(segments),
                segments=segments.data_ptr(),
            )
            code = self._kernel.run(step)
            if code == NO_MEMORY:
                raise MemoryError("a step's layers: no memory for intermediate results")
            if code != DONE:
                raise Unlike("its packed weights are laid out in a way the kernel cannot read")

    def _has_one_turn(self, width: int, has_axes: bool) -> bool:
        """Whether a token's rotary embedding is one, even where its places on several axes (time,
        height and width of an image) differ."""
        rows = torch.zeros(1, width)
        places = torch.tensor([[[1]], [[2]], [[3]]]) if has_axes else torch.tensor([[1]])
        turns = [rotate(self._decoder, rows, places, kind) for kind in self._rotations.values()]
        return all(math.prod(one.shape[:-1]) == 1 for pair in turns for one in pair)

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> torch.Tensor:
        """Cosines and sines (2, T, R) of a rotary embedding, in float32."""
        pair = rotate(self._decoder, hidden, positions, kind)
        return torch.stack([one.reshape(-1, *one.shape[-2:])[0].float() for one in pair])


def _place(context: ForwardContext, layer: LayerGeometry, turn: torch.Tensor, low: int) -> Place:
    """For the rows from `low` on."""
    table = context.table_of(layer)
    assert table.dtype == torch.int32
    assert table.stride(1) == 1 or table.shape[1] == 1
    return Place(
        cos=turn[0, low:].data_ptr(),
        sin=turn[1, low:].data_ptr(),
        slots=context.slots_of(layer)[low:].data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
    )


class _Rows(NamedTuple):
    """Rows of one call: first those that attend by themselves, then those of chunks."""

    all: Rows
    num_single: int
    chunk_rows: np.ndarray


def _rows_of(context: ForwardContext, low: int, high: int, most_single: int) -> _Rows:
    """Rows [low, high) of a step; those of a sequence with more than `most_single` are a chunk."""
    single: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int, int, int]] = []
    start = 0
    for i, (q_len, kv_len) in enumerate(zip(context.q_lens, context.kv_lens, strict=True)):
        first, end = max(start, low), min(start + q_len, high)
        start += q_len
        if first < end:
            window = (i, first - low, end - first, kv_len - (start - end))
            (single if q_len <= most_single else chunks).append(window)
    counts = np.array([count for _, _, count, _ in chunks], np.int32)
    return _Rows(Rows.of(single + chunks), sum(count for _, _, count, _ in single), counts)


def _segments_of(context: ForwardContext, low: int, high: int) -> torch.Tensor:
    """As segments_of, of rows [low, high)."""
    whole = segments_of(context)
    if not len(whole):
        return whole
    first = whole[:, 0].clamp(min=low)
    count = (whole[:, 0] + whole[:, 1]).clamp(max=high) - first
    return torch.stack([first - low, count, whole[:, 2]], 1)[count > 0].contiguous()


def make_decoder_layers(
    loaded: LoadedModel,
    layers: Sequence[LayerGeometry],
    pool: KVPool,
    states: States | None = None,
) -> DecoderLayers | None:
    """The kernel's way of decoding with this model, pool and states, or None where it computes
    another thing; logs which."""
    kernel = load_decoder_kernel()
    if isinstance(kernel, str):
        _log.info("small steps are computed by modules: %s", kernel)
        return None
    try:
        if pool.dtype != loaded.dtype or pool.compute_dtype != loaded.dtype:
            raise Unlike("the KV cache has another dtype than the model")
        with trying():
            made = DecoderLayers(loaded, layers, kernel, states)
            q_lens, kv_lens = zip(*_TRIED, strict=True)
            _try(made, Trial(loaded, layers, q_lens=q_lens, kv_lens=kv_lens, states=states))
    except Unlike as reason:
        _log.info("small steps are computed by modules: %s", reason)
        return None
    made.bind(pool)
    if made.takes_long:
        _log.info("steps are computed in one call")
    else:
        _log.info("steps of up to %d tokens are computed in one call", made.limits.rows)
    return made


def _try(made: DecoderLayers, trial: Trial) -> None:
    """Each layer, then all, against the modules, on random rows, contexts and states. Raises
    Unlike."""
    with trial.random_states() as states:
        made.bind(trial.pool)
        before = [one.clone() for one in states]
        for number, parts in enumerate(made._parts):
            with trial.clear_choices(parts.routed and parts.routed.router) as clear:
                wanted = trial.added_by(number)
            after = _swap(states, before)
            for _ in made.each_way():
                got = trial.rows.clone()
                made.run_layers(got, trial.positions, trial.context, range(number, number + 1))
                added = got.double() - trial.rows.double()
                trial.check_same(f"layer {number}", added[clear], wanted[clear])
                for mine, modules in zip(_swap(states, before), after, strict=True):
                    trial.check_same(f"the state of layer {number}", mine, modules)
        wanted = trial.after_all()
        _swap(states, before)
        got = made.run(trial.rows, trial.positions, trial.context, trial.extra)
    trial.check_whole(got, wanted, has_choices=any(parts.routed for parts in made._parts))


def _swap(states: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sets states to `others`; returns what they were."""
    kept = [one.clone() for one in states]
    for one, other in zip(states, others, strict=True):
        one.copy_(other)
    return kept
