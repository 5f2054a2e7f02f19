"""Tiny cases of hybrid decoders: layers with recurrent state between layers with attention."""

from __future__ import annotations

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    CLIP,
    IMAGE,
    IMG_TOKEN,
    TEXT,
    VIDEO,
    Case,
    MediaItem,
    mm_fields,
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
    mm_fields,
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
    mm_fields,
)
CASES["qwen3_next"] = text_case("Qwen3NextConfig", **STATE, **EXPERTS)
