"""Tiny cases with flat patches and grids, most of them with three-row rope positions."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    CLIP,
    END,
    HYBRID,
    IMAGE,
    IMG_TOKEN,
    LATENT,
    QWEN2,
    START,
    TEXT,
    VID_TOKEN,
    VIDEO,
    Case,
    MediaItem,
    Prompt,
    marked,
    noise,
)

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOKENS = {
    "image_token_id": IMG_TOKEN,
    "video_token_id": VID_TOKEN,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def grid_item(seed: int, patch_values: int = 96) -> MediaItem:
    height, width = [(4, 4), (4, 8), (6, 4)][seed % 3]
    ids = [START] + [IMG_TOKEN] * (height * width // 4) + [END]
    fields = {
        "pixel_values": noise(seed, height * width, patch_values),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return marked(IMAGE, ids, IMG_TOKEN, fields)


def video_item(seed: int, *, seconds: bool = False, per_frame: bool = False) -> MediaItem:
    frames, height, width = 2 + seed % 2, 4, 4
    frame = [START] + [VID_TOKEN] * (height * width // 4) + [END]
    ids = [START] + [VID_TOKEN] * (frames * height * width // 4) + [END]
    if per_frame:
        ids = [one for number in range(frames) for one in (40 + number, *frame)]
    fields = {
        "pixel_values_videos": noise(seed, frames * height * width, 96),
        "video_grid_thw": torch.tensor([[frames, height, width]]),
    }
    if seconds:
        fields["second_per_grid_ts"] = torch.tensor([1.0 + seed % 2])
    return marked(VIDEO, ids, VID_TOKEN, fields)


def grid_kwargs(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.fields(), "mm_token_type_ids": prompt.type_ids()} if prompt.items else {}


VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
QWEN_TEXT = {**TEXT, "rope_parameters": MROPE}
QWEN3_VISION = {
    **VISION,
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
WINDOW_VISION = {
    **VISION,
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
CASES["qwen2_vl"] = Case(
    lambda: hf.Qwen2VLConfig(
        text_config=QWEN_TEXT,
        vision_config={**VISION, "depth": 2, "embed_dim": 16, "hidden_size": 32},
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item, VIDEO: video_item},
    grid_kwargs,
)
CASES["qwen2_5_vl"] = Case(
    lambda: hf.Qwen2_5_VLConfig(
        text_config=QWEN_TEXT,
        vision_config={**WINDOW_VISION, "tokens_per_second": 2},
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item, VIDEO: lambda seed: video_item(seed, seconds=True)},
    grid_kwargs,
)
CASES["qwen3_vl"] = Case(
    lambda: hf.Qwen3VLConfig(
        text_config={**QWEN_TEXT, "head_dim": 8}, vision_config=QWEN3_VISION, **QWEN_TOKENS
    ),
    {IMAGE: grid_item, VIDEO: lambda seed: video_item(seed, per_frame=True)},
    grid_kwargs,
)
CASES["qwen3_vl_moe"] = Case(
    lambda: hf.Qwen3VLMoeConfig(
        text_config={
            **QWEN_TEXT,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        vision_config=QWEN3_VISION,
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item},
    grid_kwargs,
)
GLM_TOKENS = {
    "image_token_id": IMG_TOKEN,
    "video_token_id": VID_TOKEN,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": 9,
    "video_end_token_id": 10,
}
GLM_ROPE = {**MROPE, "partial_rotary_factor": 1.0}
GLM_VISION = {
    **VISION,
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "image_size": 32,
}
CASES["glm4v"] = Case(
    lambda: hf.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": GLM_ROPE}, vision_config=GLM_VISION, **GLM_TOKENS
    ),
    {IMAGE: grid_item},
    grid_kwargs,
)
CASES["glm4v_moe"] = Case(
    lambda: hf.Glm4vMoeConfig(
        text_config={
            **TEXT,
            "rope_parameters": GLM_ROPE,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        vision_config=GLM_VISION,
        **GLM_TOKENS,
    ),
    {IMAGE: grid_item},
    grid_kwargs,
)


def square_patches(seed: int) -> MediaItem:
    """Patches as (n, channels, side, side) instead of flat rows."""
    item = grid_item(seed, 48)
    item.fields["pixel_values"] = item.fields["pixel_values"].view(-1, 3, 4, 4)
    return item


for name, config in (("glm46v", hf.Glm46VConfig), ("glmga", hf.GlmgaConfig)):
    CASES[name] = Case(
        lambda config=config: config(
            text_config={"model_type": "glm4v_text", **TEXT, "rope_parameters": GLM_ROPE},
            vision_config={"model_type": "glm4v_vision", **GLM_VISION},
            **GLM_TOKENS,
        ),
        {IMAGE: grid_item},
        grid_kwargs,
    )
CASES["glm_ocr"] = Case(
    lambda: hf.GlmOcrConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": GLM_ROPE},
        vision_config=GLM_VISION,
        **GLM_TOKENS,
    ),
    {IMAGE: grid_item},
    grid_kwargs,
)
CASES["exaone4_5"] = Case(
    lambda: hf.Exaone4_5_Config(
        text_config={"model_type": "exaone4", **TEXT, **HYBRID},
        vision_config={**WINDOW_VISION, "num_key_value_heads": 1},
        image_token_id=IMG_TOKEN,
        video_token_id=VID_TOKEN,
    ),
    {IMAGE: grid_item, VIDEO: video_item},
)
CASES["cohere_compass"] = Case(
    lambda: hf.CohereCompassConfig(
        text_config={
            **TEXT,
            **HYBRID,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": MROPE, "full_attention": None},
        },
        vision_config=QWEN3_VISION,
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item, VIDEO: lambda seed: video_item(seed, per_frame=True)},
    grid_kwargs,
)
CASES["paddleocr_vl"] = Case(
    lambda: hf.PaddleOCRVLConfig(
        text_config={
            **TEXT,
            "head_dim": 8,
            "rope_parameters": MROPE,
            "tie_word_embeddings": False,
        },
        vision_config={**CLIP, "image_size": 32, "spatial_merge_size": 2},
        tie_word_embeddings=False,
        **QWEN_TOKENS,
    ),
    {IMAGE: square_patches},
    grid_kwargs,
)
CASES["hyperclovax_vision_v2"] = Case(
    lambda: hf.HyperCLOVAXVisionV2Config(
        text_config={"model_type": "hyperclovax", **TEXT, "head_dim": 8, "logits_scaling": 0.25},
        vision_config={
            "model_type": "qwen2_5_vl_vision",
            **WINDOW_VISION,
            "out_hidden_size": 24,
        },
        image_token_id=IMG_TOKEN,
        video_token_id=VID_TOKEN,
    ),
    {IMAGE: grid_item, VIDEO: video_item},
)
CASES["muse_glimmer"] = Case(
    lambda: hf.MuseGlimmerConfig(
        text_config={**TEXT, "head_dim": 8, **HYBRID, "layer_rope_theta": [10000.0, 0]},
        vision_config={
            "patch_size": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "patch_temporal": 2,
            "max_position_embeddings": 64,
            "layer_types": ["window_attention", "full_attention"],
        },
        out_hidden_size=64,
        projector_hidden_size=24,
        image_token_id=IMG_TOKEN,
        video_token_id=VID_TOKEN,
    ),
    {IMAGE: grid_item},
)
CASES["cosmos3_edge"] = Case(
    lambda: hf.Cosmos3EdgeConfig(
        text_config={**QWEN_TEXT, "head_dim": 8},
        vision_config={**CLIP, "num_patches": 64, "spatial_merge_size": 2},
        **QWEN_TOKENS,
    ),
    {IMAGE: lambda seed: grid_item(seed, 48)},
    grid_kwargs,
)
CASES["cosmos3_omni"] = Case(
    lambda: hf.Cosmos3OmniConfig(
        text_config={"model_type": "qwen3_vl_text", **QWEN_TEXT, "head_dim": 8},
        vision_config={"model_type": "qwen3_vl_vision", **QWEN3_VISION},
        **QWEN_TOKENS,
    ),
    {IMAGE: grid_item, VIDEO: lambda seed: video_item(seed, per_frame=True)},
    grid_kwargs,
)
CASES["kimi_k25"] = Case(
    lambda: hf.Kimi_K25Config(
        text_config={
            "model_type": "deepseek_v3",
            **TEXT,
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
        },
        vision_config={
            "patch_size": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "pos_emb_time": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "merge_kernel_size": [2, 2],
        },
        projection_hidden_size=16,
        tie_word_embeddings=False,
        image_token_id=IMG_TOKEN,
        video_token_id=VID_TOKEN,
    ),
    {IMAGE: square_patches},
)


def sized_grid(seed: int) -> MediaItem:
    item = grid_item(seed, 48)
    item.fields["image_merge_sizes"] = torch.tensor([2])
    return item


CASES["video_llama_3"] = Case(
    lambda: hf.VideoLlama3Config(
        text_config=QWEN2, vision_config={**CLIP, "hidden_size": 32}, **QWEN_TOKENS
    ),
    {IMAGE: sized_grid},
)
