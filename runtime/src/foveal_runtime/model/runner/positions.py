"""Rope positions of a request: three rows for families with mrope, a plain count for the others.

Called by the runner when it first sees a request. Needs token ids and grids only, never pixels.
Never calls a core's compute_3d_position_ids, which keeps state between requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foveal_runtime.engine.types.step import NewRequest
from foveal_runtime.model.adapters import Adapter
from foveal_runtime.model.runner.encoder import check_grid, field_tensor
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.wire.item import BadItem, Item, view_item

_TYPE_IDS = {"image": 1, "video": 2}


def prompt_positions(
    core: Any, adapter: Adapter, request: NewRequest
) -> tuple[torch.Tensor | None, int]:
    """Positions i64 (3, num_prompt_tokens) on the host and the delta of later tokens.

    (None, 0) for families without mrope. Raises BadItem when an item's value is not usable.
    """
    if not adapter.rope or not request.mm_inputs:
        return None, 0
    length = request.num_prompt_tokens
    ids = torch.tensor([request.token_ids[:length]])
    types = torch.zeros(1, length, dtype=torch.int)
    for one in request.mm_inputs:
        kind = _TYPE_IDS.get(MODALITIES[one.modality])
        if kind is None or MODALITIES[one.modality] not in adapter.encoders:
            raise BadItem(f"{MODALITIES[one.modality]} has no place in this model's positions")
        for start, count in one.placeholder.embed_runs:
            begin = one.placeholder.offset + start
            types[0, begin : begin + count] = kind
    items = [view_item(value) for value in request.values]
    for one, item in zip(request.mm_inputs, items, strict=True):
        spec = adapter.encoders[MODALITIES[one.modality]]
        check_grid(item, spec, one.placeholder.num_embeds, core.config)
    try:
        positions, delta = core.get_rope_index(
            input_ids=ids, mm_token_type_ids=types, **_rope_kwargs(adapter, items)
        )
    except (ValueError, RuntimeError, TypeError, StopIteration) as error:
        raise BadItem(f"grids do not fit the prompt: {error}") from error
    return positions[:, 0].contiguous(), int(delta.item())


def _rope_kwargs(adapter: Adapter, items: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Grids in prompt order, images and videos apart."""
    kwargs = {}
    for keyword, (modality, name) in adapter.rope.items():
        holders = [item for item in items if item.modality == modality]
        if holders and all(name in item.fields for item in holders):
            kwargs[keyword] = field_tensor(holders, name)
    return kwargs
