"""Tiny cases of families whose images have no grid: crops, tiles, any resolution, row breaks."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    CASES,
    CHUNKED,
    CLIP,
    CLIP_VISION,
    END,
    IMAGE,
    IMG_TOKEN,
    LATENT,
    LLAMA,
    MARK,
    QWEN2,
    QWEN3,
    SIGLIP,
    SMALL_4,
    START,
    TEXT,
    VID_TOKEN,
    VIDEO,
    Case,
    MediaItem,
    Prompt,
    as_video,
    marked,
    noise,
    pixels,
    plain_item,
    stacked,
)

# Any-resolution tiles: llava_next, llava_onevision


def anyres_item(seed: int) -> MediaItem:
    """An image of 16x32 or 32x32: base view and tiles, one newline embedding a row."""
    height = 16 if seed % 2 else 32
    tiles = 1 + height // 16 * 2
    count = 16 + height // 4 * (8 + 1)
    fields = {
        "pixel_values": noise(seed, 1, tiles, 3, 16, 16),
        "image_sizes": torch.tensor([[height, 32]]),
    }
    return plain_item(count, fields)


PINPOINTS = [[16, 32], [32, 16], [32, 32]]
CASES["llava_next"] = Case(
    lambda: hf.LlavaNextConfig(
        text_config=LLAMA,
        vision_config=CLIP_VISION,
        image_grid_pinpoints=PINPOINTS,
        image_token_index=IMG_TOKEN,
        vision_feature_layer=-2,
    ),
    {IMAGE: anyres_item},
    stacked("pixel_values"),
)


def frames_item(seed: int) -> MediaItem:
    """Frames of 16 patches pooled to 4, and one newline embedding at the end."""
    frames = 2 + seed % 2
    fields = {"pixel_values_videos": noise(seed, 1, frames, 3, 16, 16)}
    return plain_item(4 * frames + 1, fields, VID_TOKEN)


CASES["llava_onevision"] = Case(
    lambda: hf.LlavaOnevisionConfig(
        text_config=QWEN2,
        vision_config=SIGLIP,
        image_grid_pinpoints=PINPOINTS,
        image_token_index=IMG_TOKEN,
        video_token_index=VID_TOKEN,
        vision_feature_layer=-1,
    ),
    {IMAGE: anyres_item, VIDEO: frames_item},
    stacked("pixel_values"),
)


# Row breaks: mistral3 (Pixtral)


def pixtral_item(seed: int) -> MediaItem:
    width = 16 if seed % 2 else 24
    rows, columns = 2, width // 8
    ids = ([IMG_TOKEN] * columns + [MARK]) * (rows - 1) + [IMG_TOKEN] * columns + [END]
    fields = {
        "pixel_values": noise(seed, 1, 3, 16, width),
        "image_sizes": torch.tensor([[16, width]]),
    }
    return marked(IMAGE, ids, IMG_TOKEN, fields)


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 4,
}


def _mistral3(text: dict[str, Any]) -> Any:
    return hf.Mistral3Config(
        text_config=text,
        vision_config=PIXTRAL,
        image_token_index=IMG_TOKEN,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


CASES["mistral3"] = Case(
    lambda: _mistral3({"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None}),
    {IMAGE: pixtral_item},
    stacked("pixel_values"),
)
CASES["mistral3_latent"] = Case(  # as Mistral Small 4 is published
    lambda: _mistral3({"model_type": "mistral4", **TEXT, **LATENT, "rope_parameters": SMALL_4}),
    {IMAGE: pixtral_item},
    stacked("pixel_values"),
)


# Tiles with markers between: idefics3, smolvlm, internvl


def tiled_item(seed: int) -> MediaItem:
    """2 or 3 tiles of 4 embeddings, each after a marker."""
    tiles = 2 + seed % 2
    fields = {
        "pixel_values": noise(seed, 1, tiles, 3, 16, 16),
        "pixel_attention_mask": torch.ones(1, tiles, 16, 16, dtype=torch.long),
    }
    return marked(IMAGE, ([MARK] + [IMG_TOKEN] * 4) * tiles, IMG_TOKEN, fields)


def tiles_in_row(prompt: Prompt) -> dict[str, Any]:
    """As if of one image: each has another number of them."""
    return {name: torch.cat(tensors, dim=1) for name, tensors in prompt.by_name().items()}


def _idefics(kind: str) -> Any:
    vision = {**CLIP, "num_channels": 3}
    return getattr(hf, kind)(
        text_config=LLAMA, vision_config=vision, image_token_id=IMG_TOKEN, scale_factor=2
    )


CASES["idefics3"] = Case(lambda: _idefics("Idefics3Config"), {IMAGE: tiled_item}, tiles_in_row)
CASES["smolvlm"] = Case(
    lambda: _idefics("SmolVLMConfig"),
    {IMAGE: tiled_item, VIDEO: as_video(tiled_item)},
    tiles_in_row,
)


def internvl_item(seed: int) -> MediaItem:
    tiles = 1 + seed % 3
    ids = [START] + [IMG_TOKEN] * 4 * tiles + [END]
    return marked(IMAGE, ids, IMG_TOKEN, {"pixel_values": noise(seed, tiles, 3, 16, 16)})


CASES["internvl"] = Case(
    lambda: hf.InternVLConfig(
        # As published: scaling of positions that begins past the model's own length.
        text_config={
            **QWEN2,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        vision_config={**CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMG_TOKEN,
        image_seq_length=4,
    ),
    {IMAGE: internvl_item, VIDEO: as_video(internvl_item)},
)


def crops_item(seed: int) -> MediaItem:
    """1 or 2 crops of 4 embeddings each."""
    crops = 1 + seed % 2
    return plain_item(4 * crops, {"pixel_values": noise(seed, crops, 3, 16, 16)})


COHERE2 = {"model_type": "cohere2", **TEXT, "sliding_window": 12, "logit_scale": 0.5}
CASES["aya_vision"] = Case(
    lambda: hf.AyaVisionConfig(
        text_config=COHERE2,
        vision_config=SIGLIP,
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: crops_item},
)
CASES["cohere2_vision"] = Case(
    lambda: hf.Cohere2VisionConfig(
        text_config=COHERE2,
        vision_config=SIGLIP,
        image_token_id=IMG_TOKEN,
        alignment_intermediate_size=64,
    ),
    {IMAGE: crops_item},
)
GOT_VISION = {
    "hidden_size": 16,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 128,
    "window_size": 4,
    "global_attn_indexes": [1],
    "mlp_dim": 24,
}
CASES["got_ocr2"] = Case(
    lambda: hf.GotOcr2Config(
        text_config=QWEN2,
        vision_config=GOT_VISION,
        image_token_index=IMG_TOKEN,
        image_seq_length=4,
        tie_word_embeddings=False,
    ),
    {IMAGE: pixels(4, 128)},
)
CASES["vipllava"] = Case(
    lambda: hf.VipLlavaConfig(
        text_config=LLAMA,
        vision_config=CLIP_VISION,
        vision_feature_layer=[-2, -1],
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: pixels()},
)
CASES["llama4"] = Case(
    lambda: hf.Llama4Config(
        text_config={**TEXT, **CHUNKED},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vision_output_dim": 24,
            "image_size": 16,
            "patch_size": 4,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: crops_item},
)
CASES["lighton_ocr"] = Case(
    lambda: hf.LightOnOcrConfig(
        text_config=QWEN3,
        vision_config=PIXTRAL,
        image_token_id=IMG_TOKEN,
        spatial_merge_size=2,
    ),
    {IMAGE: pixtral_item},
    stacked("pixel_values"),
)
