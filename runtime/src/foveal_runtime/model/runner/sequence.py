"""The state of a running request, and its rope positions.

A sequence is made at NewRequest and dropped when the plan names it finished. Its token ids grow by
the tokens this runner sampled; a preempted request arrives again as a NewRequest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foveal_runtime.engine.types.step import MMInput, NewRequest
from foveal_runtime.model.adapters import Adapter
from foveal_runtime.model.runner.encoder import ITEM_ERRORS, check_grid, field_tensor
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import BadItem, Item, view_item

if TYPE_CHECKING:
    from foveal_runtime.model.layers.lora import Lora

PENDING = -1
"""Stands in token_ids for a token that the device is drawing."""


@dataclass(slots=True)
class SequenceState:
    """One request on this runner.

    Attributes:
        token_ids: expanded prompt, then the output tokens; the last may be PENDING.
        pending_row: where in the last step's draw a PENDING token is.
        positions: (axes, num_prompt_tokens) rope positions of a model with mrope, else None.
        position_delta: rope position of an output token minus its index.
        scratch: what the sampler keeps of this sequence between steps (counts, masks).
        pool: f64 (E) sum of the hidden states that an embedding is made of, as far as computed.
        lora: the adapter it is computed with; it stays with this sequence when it is unloaded.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    mm_inputs: tuple[MMInput, ...]
    sampling: SamplingParams
    positions: np.ndarray | None = None
    position_delta: float = 0
    pending_row: int = 0
    scratch: dict[str, object] = field(default_factory=dict)
    pool: np.ndarray | float = 0.0
    lora: Lora | None = None
    _blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    _num_blocks: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def block_row(self, block_ids: Sequence[int]) -> np.ndarray:
        """The block table as i32, converted once: a running request's blocks are only added to."""
        known, count = self._num_blocks, len(block_ids)
        if known > count or (known and self._blocks[known - 1] != block_ids[known - 1]):
            known = 0
        if count > len(self._blocks):
            grown = np.zeros(max(16, 2 * count), np.int32)
            grown[:known] = self._blocks[:known]
            self._blocks = grown
        if count > known:
            self._blocks[known:count] = block_ids[known:]
        self._num_blocks = count
        return self._blocks[:count]


_TYPE_IDS = {"image": 1, "video": 2}
"""Of get_rope_index; sounds have a place only where a family's own `positions` says which."""


def prompt_positions(
    core: Any, adapter: Adapter, request: NewRequest
) -> tuple[torch.Tensor | None, float]:
    """Positions (axes, num_prompt_tokens) on the host and the delta of later tokens.

    Needs token ids and grids only. A core's compute_3d_position_ids is never called: it keeps state
    between requests. (None, 0) for families without mrope. Raises BadItem when an item's value
    is not usable.
    """
    if not adapter.rope or not request.mm_inputs:
        return None, 0
    length = request.num_prompt_tokens
    ids = torch.tensor([request.token_ids[:length]])
    types = torch.zeros(1, length, dtype=torch.int)
    for one in request.mm_inputs:
        kind = 0 if adapter.positions else _TYPE_IDS.get(MODALITIES[one.modality])
        if kind is None or MODALITIES[one.modality] not in adapter.encoders:
            raise BadItem(f"{MODALITIES[one.modality]} has no place in this model's positions")
        for start, count in one.placeholder.embed_runs:
            begin = one.placeholder.offset + start
            types[0, begin : begin + count] = kind
    items = [view_item(value) for value in request.values]
    for one, item in zip(request.mm_inputs, items, strict=True):
        spec = adapter.encoders[MODALITIES[one.modality]]
        if spec.grid:
            check_grid(item, spec, one.placeholder.num_embeds, core.config)
    if adapter.positions is not None:
        return _own_positions(core.config, adapter, request, items)
    try:
        positions, delta = core.get_rope_index(
            input_ids=ids, mm_token_type_ids=types, **_rope_kwargs(adapter, items)
        )
    except (*ITEM_ERRORS, StopIteration) as error:
        raise BadItem(f"grids do not fit the prompt: {error}") from error
    return positions[:, 0].contiguous(), int(delta.item())


def _own_positions(
    config: Any, adapter: Adapter, request: NewRequest, items: Sequence[Item]
) -> tuple[torch.Tensor, float]:
    """The same of a family that has a function of its own. Raises BadItem."""
    assert adapter.positions is not None
    places = []
    for one, item in zip(request.mm_inputs, items, strict=True):
        if not adapter.encoders[MODALITIES[one.modality]].grid:
            continue
        if len(one.placeholder.embed_runs) != 1:
            raise BadItem(f"{item.modality} takes more than one stretch of the prompt")
        places.append((one.placeholder.offset + one.placeholder.embed_runs[0][0], item))
    length = request.num_prompt_tokens
    try:
        found = adapter.positions(config, length, places, adapter.has_fractions)
    except ITEM_ERRORS as error:
        raise BadItem(f"grids or times do not fit the prompt: {error}") from error
    delta = float(found.max()) + 1 - length
    if adapter.has_fractions:
        return torch.from_numpy(found), delta
    return torch.from_numpy(found.astype(np.int64)), int(delta)


def _rope_kwargs(adapter: Adapter, items: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Grids in prompt order, images and videos apart."""
    kwargs = {}
    for keyword, (modality, name) in adapter.rope.items():
        holders = [item for item in items if item.modality == modality]
        if holders and all(name in item.fields for item in holders):
            kwargs[keyword] = field_tensor(holders, name)
    return kwargs
