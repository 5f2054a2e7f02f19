"""Tiny cases of families with towers, experts or rope axes that no other has."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    AUD_TOKEN,
    CASES,
    CLIP,
    END,
    IMAGE,
    IMG_TOKEN,
    LLAMA,
    MARK,
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
    pixels,
    plain_item,
)
from tests.support.models.tiny_grids import grid_item, grid_kwargs
from tests.support.models.tiny_images import tiles_in_row

CASES["fast_vlm"] = Case(  # timm's FastViT
    lambda: hf.FastVlmConfig(
        text_config=QWEN2,
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "fastvit_t8",
            "do_pooling": True,
            "global_pool": "avg",
            "hidden_size": 128,
            "model_args": {
                "inference_mode": True,
                "layers": [1, 1, 1, 1],
                "embed_dims": [8, 16, 32, 64],
            },
        },
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: pixels(4, 64)},
)


def tiles(seed: int) -> MediaItem:
    count = 1 + seed % 3
    return plain_item(4 * count, {"pixel_values": noise(seed, 1, count, 3, 32, 32)})


def frames(seed: int) -> MediaItem:
    return plain_item(8, {"pixel_values_videos": noise(seed, 1, 2, 3, 32, 32)}, VID_TOKEN)


CASES["perception_lm"] = Case(  # timm's perception encoder
    lambda: hf.PerceptionLMConfig(
        text_config=LLAMA,
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "do_pooling": True,
            "global_pool": "",
            "hidden_size": 24,
            "model_args": {
                "embed_dim": 24,
                "depth": 2,
                "num_heads": 2,
                "img_size": [32, 32],
                "patch_size": 8,
                "global_pool": "",
                "init_values": 0.1,
                "ref_feat_shape": [4, 4],
                "use_post_transformer_norm": False,
            },
        },
        projector_pooling_ratio=2,
        vision_use_cls_token=True,
        image_token_id=IMG_TOKEN,
        video_token_id=VID_TOKEN,
        tie_word_embeddings=False,
    ),
    {IMAGE: tiles, VIDEO: frames},
    tiles_in_row,
)


def lined_item(seed: int) -> MediaItem:
    """A row of embeddings ends with one more, and two are around all."""
    height, width = [(4, 4), (4, 8), (6, 4)][seed % 3]
    count = height // 2 * (width // 2 + 1) + 2
    fields = {
        "pixel_values": noise(seed, height * width, 48),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return marked(IMAGE, [START, *[IMG_TOKEN] * count, END], IMG_TOKEN, fields)


def _hunyuan(*sections: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return hf.HunYuanVLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "text_hidden_size": 32,
            "max_image_size": 64,
        },
        image_token_id=IMG_TOKEN,
    )


CASES["hunyuan_vl"] = Case(lambda: _hunyuan(1, 1, 1, 1), {IMAGE: lined_item}, grid_kwargs)
CASES["hunyuan_vl_three_axes"] = Case(lambda: _hunyuan(2, 1, 1), {IMAGE: lined_item}, grid_kwargs)


def seen_item(seed: int) -> MediaItem:
    """The marks are among the tokens that are never said: in an answer, transformers would have
    words' experts for them."""
    item = grid_item(seed, patch_values=48)
    return marked(IMAGE, [AUD_TOKEN, *item.ids[1:-1], AUD_TOKEN], IMG_TOKEN, item.fields)


def expert_kwargs(prompt: Prompt) -> dict[str, Any]:
    """As ERNIE's processor says which experts take which token, the marks, too."""
    types = torch.isin(torch.tensor([prompt.ids]), torch.tensor([IMG_TOKEN, AUD_TOKEN])).int()
    return {**grid_kwargs(prompt), "moe_mm_token_type_ids": types}


CASES["ernie4_5_vl_moe"] = Case(
    lambda: hf.Ernie4_5_VLMoeConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [24, 16],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        image_token_id=IMG_TOKEN,
        image_start_token_id=AUD_TOKEN,
        image_end_token_id=AUD_TOKEN,
        video_token_id=VID_TOKEN,
        video_start_token_id=AUD_TOKEN,
        video_end_token_id=AUD_TOKEN,
        tie_word_embeddings=False,
    ),
    {IMAGE: seen_item},
    expert_kwargs,
)


def two_views(seed: int) -> MediaItem:
    """The whole image and up to two cut-outs, which come first."""
    cuts = seed % 3
    ids = [one for _ in range(cuts) for one in (START, *[IMG_TOKEN] * 4, END)]
    fields = {
        "pixel_values": noise(seed, 1, 3, 48, 48),
        "num_local_patches": torch.tensor([cuts]),
    }
    if cuts:
        fields["pixel_values_local"] = noise(seed + 1, cuts, 3, 32, 32)
    return marked(IMAGE, [*ids, MARK, *[IMG_TOKEN] * 9, MARK], IMG_TOKEN, fields)


CASES["step3p7"] = Case(
    lambda: hf.Step3p7Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "num_sliding_attention_heads": 6,
            "sliding_window": 12,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "share_expert_dim": 24,
            "swiglu_limits": [0.0, 0.0, 1.0, 0.0],
            "rope_theta": [10000.0, 5000.0, 5000.0, 10000.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        },
        vision_config={**CLIP, "image_size": 48, "mlp_ratio": 1.5, "max_position_embeddings": 144},
        image_token_id=IMG_TOKEN,
    ),
    {IMAGE: two_views},
)


GRANITE4_VISION = {**CLIP, "hidden_size": 64, "image_size": 32, "num_hidden_layers": 3}


def tiled_item(seed: int) -> MediaItem:
    """The whole image and two tiles of it, beside or above each other, 4 x 4 embeddings each; a row
    of those of the tiles ends with one more."""
    height, width = [(32, 64), (64, 32)][seed % 2]
    fields = {
        "pixel_values": noise(seed, 1, 3, 3, 32, 32),
        "image_sizes": torch.tensor([[height, width]]),
    }
    return plain_item(16 + 32 + height // 8, fields)


CASES["granite4_vision"] = Case(
    lambda: hf.Granite4VisionConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 6,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
        vision_config={"model_type": "siglip_vision_model", **GRANITE4_VISION},
        image_token_index=IMG_TOKEN,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        deepstack_layer_map=[[1, 1], [-1, 0]],
        spatial_vision_layer=-1,
        spatial_target_layers=[2, 3, 4, 5],
        tie_word_embeddings=False,
    ),
    {IMAGE: tiled_item},
)
