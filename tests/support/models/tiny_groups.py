"""Tiny cases whose image or prompt tokens see each other both ways: gemma3, paligemma."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    END,
    IMAGE,
    IMG_TOKEN,
    MARK,
    SIGLIP,
    START,
    TEXT,
    Case,
    MediaItem,
    Prompt,
    marked,
    noise,
    pixels,
)

# Bidirectional groups: gemma3, paligemma


def gemma3_item(seed: int) -> MediaItem:
    ids = [MARK, START] + [IMG_TOKEN] * 9 + [END, MARK]
    return marked(IMAGE, ids, IMG_TOKEN, {"pixel_values": noise(seed, 1, 3, 24, 24)})


def gemma3_kwargs(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.fields(), "token_type_ids": prompt.type_ids()}


CASES["gemma3"] = Case(
    lambda: hf.Gemma3Config(
        text_config={
            **TEXT,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={**SIGLIP, "image_size": 24},
        mm_tokens_per_image=9,
        image_token_index=IMG_TOKEN,
        boi_token_index=START,
        eoi_token_index=END,
    ),
    {IMAGE: gemma3_item},
    gemma3_kwargs,
    budget=19,
)


def paligemma_kwargs(prompt: Prompt) -> dict[str, Any]:
    """The prefix is what make_prompt wrote; tokens after it are causal (type 1)."""
    types = torch.zeros(1, len(prompt.ids), dtype=torch.long)
    types[0, prompt.prefix :] = 1
    return {**prompt.fields(), "token_type_ids": types}


def _paligemma(text: dict[str, Any]) -> Any:
    return hf.PaliGemmaConfig(
        text_config={**TEXT, "head_dim": 8, **text},
        vision_config={**SIGLIP, "projection_dim": 32},
        projection_dim=32,
        image_token_index=IMG_TOKEN,
    )


CASES["paligemma"] = Case(
    lambda: _paligemma({"model_type": "gemma"}),
    {IMAGE: pixels()},
    paligemma_kwargs,
    budget=75,
)
CASES["paligemma2"] = Case(
    lambda: _paligemma(
        {
            "model_type": "gemma2",
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        }
    ),
    {IMAGE: pixels()},
    paligemma_kwargs,
    budget=75,
)
