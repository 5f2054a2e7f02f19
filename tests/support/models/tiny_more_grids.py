"""Tiny cases of further families with flat patches and grids; some have plain rope positions."""

from __future__ import annotations

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    CLIP,
    END,
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
    marked,
    noise,
)
from tests.support.models.tiny_grids import (
    GLM_ROPE,
    GLM_TOKENS,
    GLM_VISION,
    MROPE,
    QWEN3_VISION,
    QWEN_TEXT,
    QWEN_TOKENS,
    WINDOW_VISION,
    grid_item,
    grid_kwargs,
    video_item,
)

HYBRID = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}


def square_patches(seed: int) -> MediaItem:
    """Patches as (n, channels, side, side) instead of flat rows."""
    height, width = [(4, 4), (4, 8), (6, 4)][seed % 3]
    ids = [START] + [IMG_TOKEN] * (height * width // 4) + [END]
    fields = {
        "pixel_values": noise(seed, height * width, 3, 4, 4),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return marked(IMAGE, ids, IMG_TOKEN, fields)


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
        vision_config={**GLM_VISION},
        **GLM_TOKENS,
    ),
    {IMAGE: grid_item},
    grid_kwargs,
)
CASES["exaone4_5"] = Case(
    lambda: hf.Exaone4_5_Config(
        text_config={"model_type": "exaone4", **TEXT, **HYBRID},
        vision_config={
            **WINDOW_VISION,
            "num_key_value_heads": 1,
        },
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
