"""Tiny cases of Gemma 3n and 4: keys and values shared between layers, inputs of single layers,
and images whose tokens see each other in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    AUD_TOKEN,
    AUDIO,
    CASES,
    END,
    IMAGE,
    IMG_TOKEN,
    MARK,
    START,
    TEXT,
    VID_TOKEN,
    VIDEO,
    VOCAB,
    Case,
    MediaItem,
    Prompt,
    marked,
    noise,
)

PAD = 9
"""Not 0: where encoder outputs go, layers take the embedding of padding."""
GRIDS = [(4, 4), (4, 6), (2, 8)]
MOST = 24
"""Patches of an image with its padding."""


def places(height: int, width: int, most: int) -> torch.Tensor:
    """(1, most, 2): column and row of each patch, -1 for padding."""
    found = torch.full((1, most, 2), -1)
    numbers = torch.arange(height * width)
    found[0, : height * width] = torch.stack([numbers % width, numbers // width], -1)
    return found


def patches(seed: int, height: int, width: int, most: int, size: int) -> torch.Tensor:
    """(1, most, size) of values between 0 and 1, zeros for padding."""
    pixels = torch.zeros(1, most, size)
    pixels[:, : height * width] = noise(seed, 1, height * width, size).sigmoid()
    return pixels


def image_item(seed: int, merge: int = 2, size: int = 48) -> MediaItem:
    """`merge` patches a side make an embedding."""
    height, width = GRIDS[seed % 3]
    height, width, most = height * merge // 2, width * merge // 2, MOST * merge * merge // 4
    fields = {
        "pixel_values": patches(seed, height, width, most, size),
        "image_position_ids": places(height, width, most),
    }
    ids = [START] + [IMG_TOKEN] * (height * width // merge**2) + [END]
    return marked(IMAGE, ids, IMG_TOKEN, fields)


def video_item(seed: int, merge: int = 2, size: int = 48) -> MediaItem:
    """Two or three frames, each behind a mark that stands for its time."""
    count, height, width = 2 + seed % 2, 2 * merge, 2 * merge
    most = height * width + merge**2
    frames = [patches(100 * seed + i, height, width, most, size) for i in range(count)]
    fields = {
        "pixel_values_videos": torch.cat(frames),
        "video_position_ids": places(height, width, most).repeat(count, 1, 1),
        "num_frames_per_video": torch.tensor([count]),
    }
    ids = [MARK, START, *[VID_TOKEN] * 4, END] * count
    return marked(VIDEO, ids, VID_TOKEN, fields)


def frames(seed: int, valid: int) -> dict[str, torch.Tensor]:
    """20 mel frames, `valid` of them sound."""
    mask = (torch.arange(20) < valid)[None]
    return {
        "input_features": noise(seed, 1, 20, 8) * mask[..., None],
        "input_features_mask": mask,
    }


def sound_item(seed: int) -> MediaItem:
    """20 mel frames, some of them padding; four make an embedding."""
    valid = 20 - 3 * (seed % 3)
    ids = [MARK, *[AUD_TOKEN] * -(-valid // 4), END]
    return marked(AUDIO, ids, AUD_TOKEN, frames(seed, valid))


def samples_item(seed: int) -> MediaItem:
    """Five stretches of samples, the last of which may be padding; each makes an embedding."""
    valid = 3 + seed % 3
    fields = {
        "input_features": noise(seed, 1, 5, 16),
        "input_features_mask": (torch.arange(5) < valid)[None],
    }
    return marked(AUDIO, [MARK, *[AUD_TOKEN] * valid, END], AUD_TOKEN, fields)


def gemma4_kwargs(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.fields(), "mm_token_type_ids": prompt.type_ids()}


# The last two layers have the keys and values of the two before them.
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
HEADS = {**TEXT, "head_dim": 8, "global_head_dim": 16, "sliding_window": 7}
INPUTS = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB}
SMALL = {**HEADS, **SHARED, **INPUTS, "pad_token_id": PAD, "use_double_wide_mlp": True}
LARGE = {
    **HEADS,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
SOUND = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 24,
}
TOKENS = {
    "image_token_id": IMG_TOKEN,
    "video_token_id": VID_TOKEN,
    "audio_token_id": AUD_TOKEN,
    "boi_token_id": START,
    "eoi_token_id": END,
    "boa_token_id": MARK,
    "eoa_token_index": END,
}


def _gemma4(text: dict[str, Any]) -> Any:
    return hf.Gemma4Config(
        text_config=dict(text), vision_config=dict(VISION), audio_config=dict(SOUND), **TOKENS
    )


CASES["gemma4"] = Case(
    lambda: _gemma4(SMALL),
    {IMAGE: image_item, VIDEO: video_item, AUDIO: sound_item},
    gemma4_kwargs,
)
CASES["gemma4_large"] = replace(CASES["gemma4"], config=lambda: _gemma4(LARGE), budget=27)
CASES["gemma4_moe"] = replace(CASES["gemma4_large"], config=lambda: _gemma4({**LARGE, **EXPERTS}))
# Ids 128 to 131 are of images, 132 to 135 of sound; both have tables of their own.
SPARSE = {
    **TEXT,
    **SHARED,
    "vocab_size": VOCAB + 8,
    "head_dim": 8,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0, 0.5, 0.5, 0.0, 0.0, 0.0],
    "final_logit_softcapping": 30.0,
}
END_IMAGE, IMAGE_ROW, END_SOUND, SOUND_ROW = 128, 129, 132, 133


def gemma3n_image(seed: int) -> MediaItem:
    ids = [START] + [IMAGE_ROW] * 9 + [END_IMAGE]
    return marked(IMAGE, ids, IMAGE_ROW, {"pixel_values": noise(seed, 1, 3, 96, 96)})


def gemma3n_sound(seed: int) -> MediaItem:
    """20 mel frames make two rows; every sound has five, the others are filled up."""
    valid = 20 - 5 * (seed % 3)
    ids = [MARK, *[SOUND_ROW] * 5, END_SOUND]
    return marked(AUDIO, ids, SOUND_ROW, frames(seed, valid))


CASES["gemma3n_text"] = Case(lambda: hf.Gemma3nTextConfig(**SPARSE))
CASES["gemma3n"] = Case(
    lambda: hf.Gemma3nConfig(
        text_config=dict(SPARSE),
        vision_config={
            "architecture": "test_resnet",
            "hidden_size": 96,
            "vocab_offset": VOCAB,
            "vocab_size": 4,
        },
        audio_config={
            "vocab_offset": VOCAB + 4,
            "vocab_size": 4,
            "input_feat_size": 8,
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "conf_attention_chunk_size": 4,
            "conf_attention_context_left": 5,
            "conf_reduction_factor": 2,
            "sscp_conv_channel_size": [4, 4],
        },
        audio_soft_tokens_per_image=5,
        vision_soft_tokens_per_image=9,
        image_token_id=IMAGE_ROW,
        audio_token_id=SOUND_ROW,
        boi_token_id=START,
        eoi_token_id=END_IMAGE,
        boa_token_id=MARK,
        eoa_token_id=END_SOUND,
    ),
    {IMAGE: gemma3n_image, AUDIO: gemma3n_sound},
    lambda prompt: prompt.fields(),
)
CASES["gemma4_text"] = Case(lambda: hf.Gemma4TextConfig(**SMALL))
CASES["gemma4_unified"] = Case(
    lambda: hf.Gemma4UnifiedConfig(
        text_config={**LARGE, "num_hidden_layers": 6, **SHARED},
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 24,
            "mm_posemb_size": 16,
            "output_proj_dims": 24,
        },
        audio_config={"audio_embed_dim": 16},
        **TOKENS,
    ),
    {
        IMAGE: lambda seed: image_item(seed, 1, 192),
        VIDEO: lambda seed: video_item(seed, 1, 192),
        AUDIO: samples_item,
    },
    gemma4_kwargs,
    budget=27,
)
