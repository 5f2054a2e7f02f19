"""Tiny cases of further families whose images have no grid, and of frames without one."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    CLIP,
    IMAGE,
    IMG_TOKEN,
    LLAMA,
    QWEN2,
    SIGLIP,
    TEXT,
    VID_TOKEN,
    VIDEO,
    Case,
    MediaItem,
    Prompt,
    mm_fields,
    noise,
    plain_item,
    stacked,
)
from tests.support.models.tiny_images import GOT_VISION, PINPOINTS, anyres_item, internvl_item

QWEN3 = {"model_type": "qwen3", **TEXT, "head_dim": 8}


def pixels(count: int = 16, side: int = 16) -> Any:
    return lambda seed: plain_item(count, {"pixel_values": noise(seed, 1, 3, side, side)})


def clip_frames(count: int) -> Any:
    """A clip of two or three frames; `count` embeddings a frame."""

    def make(seed: int) -> MediaItem:
        frames = 2 + seed % 2
        fields = {"pixel_values_videos": noise(seed, 1, frames, 3, 16, 16)}
        return plain_item(count * frames, fields, VID_TOKEN)

    return make


CASES["deepseek_vl"] = Case(
    lambda: hf.DeepseekVLConfig(
        text_config=LLAMA, vision_config=SIGLIP, image_token_id=IMG_TOKEN, tie_word_embeddings=False
    ),
    {IMAGE: pixels()},
    mm_fields,
)


def two_resolutions(seed: int) -> MediaItem:
    fields = {
        "pixel_values": noise(seed, 1, 3, 16, 16),
        "high_res_pixel_values": noise(seed + 1, 1, 3, 64, 64),
    }
    return plain_item(16, fields)


CASES["deepseek_vl_hybrid"] = Case(
    lambda: hf.DeepseekVLHybridConfig(
        text_config=LLAMA,
        vision_config=SIGLIP,
        high_res_vision_config={
            "model_type": "sam_vision_model",
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 24,
        },
        image_token_id=IMG_TOKEN,
        tie_word_embeddings=False,
    ),
    {IMAGE: two_resolutions},
    mm_fields,
)
CASES["janus"] = Case(
    lambda: hf.JanusConfig(
        text_config=LLAMA,
        vision_config={
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 32,
            "mlp_ratio": 2.0,
            "num_image_tokens": 16,
        },
        vq_config={
            "embed_dim": 4,
            "num_embeddings": 16,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 8,
            "image_token_embed_dim": 8,
        },
        image_token_id=IMG_TOKEN,
        tie_word_embeddings=False,
    ),
    {IMAGE: pixels()},
    mm_fields,
)
CASES["qianfan_ocr"] = Case(
    lambda: hf.QianfanOCRConfig(
        text_config=QWEN3,
        vision_config={**CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMG_TOKEN,
        image_seq_length=4,
    ),
    {IMAGE: internvl_item},
    mm_fields,
)


def masked_pixels(seed: int) -> MediaItem:
    fields = {
        "pixel_values": noise(seed, 1, 3, 16, 16),
        "pixel_mask": torch.ones(1, 16, 16, dtype=torch.bool),
    }
    return plain_item(6, fields)


CASES["aria"] = Case(
    lambda: hf.AriaConfig(
        text_config={**TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        vision_config={"model_type": "idefics3_vision", **CLIP},
        projector_patch_to_query_dict={16: 6},
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: masked_pixels},
    mm_fields,
)
CASES["llava_next_video"] = Case(
    lambda: hf.LlavaNextVideoConfig(
        text_config=LLAMA,
        vision_config={"model_type": "clip_vision_model", **CLIP},
        image_grid_pinpoints=PINPOINTS,
        image_token_index=IMG_TOKEN,
        video_token_index=VID_TOKEN,
        vision_feature_layer=-2,
        spatial_pool_stride=2,
    ),
    {IMAGE: anyres_item, VIDEO: clip_frames(4)},
    stacked("pixel_values", "pixel_values_videos"),
)


def image_pixels(prompt: Prompt) -> dict[str, Any]:
    """The forward's own name of the field, which the processor calls `pixel_values_images`."""
    fields = prompt.fields()
    if "pixel_values_images" in fields:
        fields["pixel_values"] = fields.pop("pixel_values_images")
    return fields


CASES["video_llava"] = Case(
    lambda: hf.VideoLlavaConfig(
        text_config=LLAMA,
        vision_config={"model_type": "clip_vision_model", **CLIP},
        image_token_index=IMG_TOKEN,
        video_token_index=VID_TOKEN,
        vision_feature_layer=-2,
    ),
    {
        IMAGE: lambda seed: plain_item(16, {"pixel_values_images": noise(seed, 1, 3, 16, 16)}),
        VIDEO: clip_frames(17),
    },
    image_pixels,
)
CASES["pp_chart2table"] = Case(
    lambda: hf.PPChart2TableConfig(
        text_config=QWEN2, vision_config=GOT_VISION, image_token_index=IMG_TOKEN, image_seq_length=4
    ),
    {IMAGE: lambda seed: plain_item(4, {"pixel_values": noise(seed, 1, 3, 128, 128)})},
    mm_fields,
)
