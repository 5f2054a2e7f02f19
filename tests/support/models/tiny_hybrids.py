"""Tiny cases of hybrid decoders: layers with recurrent state between layers with attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    CLIP,
    END,
    IMAGE,
    IMG_TOKEN,
    START,
    TEXT,
    VID_TOKEN,
    VIDEO,
    Case,
    MediaItem,
    Prompt,
    marked,
    noise,
    plain_item,
    text_case,
)
from tests.support.models.tiny_grids import (
    MROPE,
    QWEN3_VISION,
    QWEN_TOKENS,
    grid_item,
    grid_kwargs,
    video_item,
)

STATE = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,  # what the kernel takes
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ROPE = {**MROPE, "partial_rotary_factor": 1.0}
VISION = {k: v for k, v in QWEN3_VISION.items() if k != "deepstack_visual_indexes"}
CASES["qwen3_5"] = Case(
    lambda: hf.Qwen3_5Config(
        text_config={**TEXT, **STATE, "rope_parameters": ROPE},
        vision_config=VISION,
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item, VIDEO: lambda seed: video_item(seed, per_frame=True)},
    grid_kwargs,
)
CASES["qwen3_5_moe"] = Case(
    lambda: hf.Qwen3_5MoeConfig(
        text_config={**TEXT, **STATE, **EXPERTS, "rope_parameters": ROPE},
        vision_config=VISION,
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item},
    grid_kwargs,
)
LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": False,
}


def flexible_item(seed: int) -> MediaItem:
    """24 patches at most, as rows of 3 x 4 x 4 values; four patches make an embedding."""
    height, width = [(4, 4), (4, 6), (2, 8)][seed % 3]
    mask = (torch.arange(24) < height * width).int()[None]
    fields = {
        "pixel_values": noise(seed, 1, 24, 48) * mask[..., None],
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": mask,
    }
    return plain_item(height * width // 4, fields)


CASES["lfm2_vl"] = Case(
    lambda: hf.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **TEXT, **LFM2},
        vision_config={**CLIP, "num_patches": 16, "vision_use_head": False},
        image_token_id=IMG_TOKEN,
        projector_hidden_size=32,
        downsample_factor=2,
        tie_word_embeddings=False,
    ),
    {IMAGE: flexible_item},
)
CASES["lfm2"] = text_case("Lfm2Config", **LFM2)
LFM3 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "conv_L_cache": 5,
    "head_dim": 8,
    "sliding_window": 12,
    "tie_word_embeddings": False,
}
CASES["lfm3"] = text_case("Lfm3Config", **LFM3)
CASES["lfm3_vl"] = Case(
    lambda: hf.Lfm3VlConfig(
        text_config={"model_type": "lfm3", **TEXT, **LFM3},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "patch_size": 4,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["conv", "full_attention"],
        },
        projector_hidden_size=24,
        tie_word_embeddings=False,
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item, VIDEO: lambda seed: video_item(seed, per_frame=True)},
)
SLICE, SLICE_END, NEWLINE = 9, 10, 11


def sliced_item(seed: int, merge: int, *, is_video: bool = False) -> MediaItem:
    """An image and, by its seed, two rows of one or two slices of it; or two frames. The number of
    MiniCPM-V's images is in the text before them."""
    token = VID_TOKEN if is_video else IMG_TOKEN
    cut = [(8, 8), (4, 8)][seed % 2]
    num_columns = 0 if is_video else seed % 3
    sizes = [(4, 4 + 4 * (seed % 2))] * (2 if is_video else 1)
    ids = [one for h, w in sizes for one in (START, *[token] * (h * w // merge**2), END)]
    row = [SLICE, *[token] * (math.prod(cut) // merge**2), SLICE_END] * num_columns
    if num_columns:
        ids += [*row, NEWLINE, *row]
        sizes += [cut] * (2 * num_columns)
    length = 4 * sum(height * width for height, width in sizes)
    suffix = "_videos" if is_video else ""
    fields = {
        f"pixel_values{suffix}": noise(seed, 1, 3, 4, length),
        f"target_sizes{suffix}": torch.tensor(sizes, dtype=torch.int32),
    }
    return marked(VIDEO if is_video else IMAGE, ids, token, fields)


def patches_in_row(prompt: Prompt) -> dict[str, Any]:
    """All patches of a prompt are one row."""
    return dict(prompt.fields(in_row="pixel_values"))


def minicpm(kind: str, mode: str = "16x", kwargs: Any = patches_in_row, **marks: int) -> Case:
    merge = {"16x": 4, "4x": 2}[mode]
    return Case(
        lambda: getattr(hf, kind)(
            text_config={"model_type": "qwen3_5_text", **TEXT, **STATE, "rope_parameters": ROPE},
            vision_config={**CLIP, "image_size": 32},
            image_token_id=IMG_TOKEN,
            video_token_id=VID_TOKEN,
            insert_layer_id=0,
            downsample_mode=mode,
            tie_word_embeddings=False,
            **marks,
        ),
        {
            IMAGE: lambda seed: sliced_item(seed, merge),
            VIDEO: lambda seed: sliced_item(seed, merge, is_video=True),
        },
        kwargs,
    )


def canvas_kwargs(prompt: Prompt) -> dict[str, Any]:
    types = {"mm_token_type_ids": prompt.type_ids()} if prompt.items else {}
    return {**patches_in_row(prompt), **types}


CASES["minicpmv4_6"] = minicpm("MiniCPMV4_6Config")
CASES["minicpm_ocr"] = minicpm("MiniCPMOcrConfig", "4x")
CASES["minicpmv4_7"] = minicpm(
    "MiniCPMV4_7Config",
    kwargs=canvas_kwargs,
    image_start_id=START,
    image_end_id=END,
    slice_start_id=SLICE,
    slice_end_id=SLICE_END,
    newline_id=NEWLINE,
)
CASES["qwen3_next"] = text_case("Qwen3NextConfig", **STATE, **EXPERTS)
