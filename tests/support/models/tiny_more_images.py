"""Tiny cases of further families whose images have no grid, and of frames without one."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    AUD_TOKEN,
    CASES,
    CLIP,
    CLIP_VISION,
    IMAGE,
    IMG_TOKEN,
    LLAMA,
    MARK,
    QWEN2,
    QWEN3,
    SIGLIP,
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
    stacked,
)
from tests.support.models.tiny_images import (
    GOT_VISION,
    PINPOINTS,
    anyres_item,
    internvl_item,
    tiles_in_row,
)


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
)
CASES["qianfan_ocr"] = Case(
    lambda: hf.QianfanOCRConfig(
        text_config=QWEN3,
        vision_config={**CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMG_TOKEN,
        image_seq_length=4,
    ),
    {IMAGE: internvl_item},
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
)
CASES["llava_next_video"] = Case(
    lambda: hf.LlavaNextVideoConfig(
        text_config=LLAMA,
        vision_config=CLIP_VISION,
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
        vision_config=CLIP_VISION,
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
    {IMAGE: pixels(4, 128)},
)


def whole_tiles(seed: int, per_tile: int = 4) -> MediaItem:
    """2 or 3 tiles; the mask says which of them are none, and not which of their pixels."""
    pixels = noise(seed, 1, 2 + seed % 2, 3, 16, 16)
    tiles = pixels.shape[1]
    fields = {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, tiles).bool()}
    return marked(IMAGE, ([MARK] + [IMG_TOKEN] * per_tile) * tiles, IMG_TOKEN, fields)


def fine_tiles(seed: int) -> MediaItem:
    """As the processor makes them when it is told of dense print: four times the embeddings."""
    item = whole_tiles(seed, 16)
    item.fields["tile_fine_mask"] = torch.ones(1, 1).bool()
    return item


def _docling() -> Any:
    return hf.GraniteDoclingConfig(
        text_config={**TEXT, "num_hidden_layers": 3, "embedding_multiplier": 2.0},
        vision_config={
            **CLIP,
            "out_hidden_size": 32,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMG_TOKEN,
    )


CASES["granite_docling"] = Case(_docling, {IMAGE: whole_tiles}, tiles_in_row)
CASES["granite_docling_fine"] = Case(_docling, {IMAGE: fine_tiles}, tiles_in_row)


def marked_tiles(seed: int) -> MediaItem:
    """1 to 3 tiles of 4 embeddings; the marks around them, whose rows are the tower's, are among
    the tokens that are never said, since in an answer they would be words."""
    tiles = 1 + seed % 3
    inside = [one for _ in range(tiles) for one in (*[IMG_TOKEN] * 4, AUD_TOKEN)]
    fields = {"pixel_values": noise(seed, tiles, 3, 16, 16)}
    return marked(IMAGE, [VID_TOKEN, *inside], IMG_TOKEN, fields)


CASES["ovis2"] = Case(
    lambda: hf.Ovis2Config(
        text_config=QWEN2,
        vision_config={
            **CLIP,
            "vocab_size": 40,
            "hidden_stride": 2,
            "num_visual_indicator_tokens": 2,
        },
        image_token_id=IMG_TOKEN,
        visual_indicator_token_ids=[VID_TOKEN, AUD_TOKEN],
        vocab_size=TEXT["vocab_size"],
        hidden_size=TEXT["hidden_size"],
        tie_word_embeddings=False,
    ),
    {IMAGE: marked_tiles},
)


def two_views(seed: int) -> MediaItem:
    """The whole image and one cut-out, or none; the tower answers each with 144 rows."""
    cuts = seed % 2
    fields = {
        "pixel_values": noise(seed, 1, 3, 64, 64),
        "num_local_patches": torch.tensor([cuts]),
    }
    if cuts:
        fields["pixel_values_local"] = noise(seed + 1, cuts, 3, 48, 48)
    return plain_item(144 * (1 + cuts) + 1, fields)


CASES["deepseek_ocr2"] = Case(
    lambda: hf.DeepseekOcr2Config(
        text_config={
            **TEXT,
            "max_position_embeddings": 4096,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
        vision_config={
            "sam_config": {
                **GOT_VISION,
                "image_size": 64,
                "patch_size": 4,
                "downsample_channels": [16, 24],
            },
            "encoder_config": {**TEXT, "hidden_size": 24, "num_attention_heads": 2},
        },
        image_token_id=IMG_TOKEN,
    ),
    {IMAGE: two_views},
    budget=171,
    num_blocks=256,
)
