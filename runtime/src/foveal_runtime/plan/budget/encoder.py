"""Encoder limits: outputs that one step may compute, and outputs that the encoder cache holds.

Called by the engine at start-up, and by the budget planner (so by operator and CLI too): what an
engine would refuse, the operator refuses first. Counts, never bytes; never reads a model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

_LOG = logging.getLogger(__name__)


class LargestItem(NamedTuple):
    """The most expensive item of one modality under the per-prompt limits.

    Attributes:
        num_tokens: prompt positions that its placeholder expands to (markers included).
        num_embeds: encoder outputs among them; at most num_tokens.
    """

    num_tokens: int
    num_embeds: int


class EncoderBudget(NamedTuple):
    """compute_embeds: per step; cache_embeds: the encoder cache. Both count embeddings."""

    compute_embeds: int
    cache_embeds: int


def compute_encoder_budget(
    *,
    is_multimodal: bool,
    largest: Mapping[str, LargestItem],
    max_num_batched_tokens: int,
    max_num_encoder_input_tokens: int,
    encoder_cache_size: int,
    disable_chunked_mm_input: bool = False,
) -> EncoderBudget:
    """Both budgets, never smaller than the largest single item, so that each item can run.

    Args:
        is_multimodal: False for a text-only model, which needs neither.
        largest: the largest item of each *enabled* modality; a modality whose limit per prompt is
            0 is left out. Empty for a multimodal model means that every modality is disabled.
        max_num_encoder_input_tokens: embeddings asked for per step.
        encoder_cache_size: embeddings asked for in the cache.
        disable_chunked_mm_input: an item's tokens must then fit one step together.

    Raises:
        ValueError: chunked multimodal input is off and some item has more prompt *tokens* than a
            step has. Tokens, not embeddings: markers between the rows of an image take prompt
            positions without taking encoder outputs.
    """
    if not is_multimodal:
        return EncoderBudget(0, 0)
    if not largest:
        _LOG.warning(
            "every modality of this multimodal model is disabled by its limit per prompt: "
            "no encoder cache, text only"
        )
        return EncoderBudget(0, 0)
    modality, item = max(largest.items(), key=lambda entry: entry[1].num_tokens)
    if disable_chunked_mm_input and item.num_tokens > max_num_batched_tokens:
        raise ValueError(
            f"chunked multimodal input is disabled, but the largest {modality} takes "
            f"{item.num_tokens} tokens and max_num_batched_tokens is {max_num_batched_tokens}: "
            f"raise max_num_batched_tokens to at least {item.num_tokens} or allow chunking"
        )
    num_embeds = max(entry.num_embeds for entry in largest.values())
    return EncoderBudget(
        compute_embeds=max(max_num_encoder_input_tokens, num_embeds),
        cache_embeds=max(encoder_cache_size, num_embeds),
    )
