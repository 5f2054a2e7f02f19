"""The multimodal cases of tiny_checkpoints: configurations, items as their processors make them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from foveal_tests_model_tiny_checkpoints import (
    AUD_TOKEN,
    AUDIO,
    CASES,
    CLIP,
    END,
    IMAGE,
    IMG_TOKEN,
    MARK,
    START,
    TEXT,
    VID_TOKEN,
    VIDEO,
    Case,
    MediaItem,
    Prompt,
    mm_fields,
    noise,
    plain_item,
)

LLAMA = {"model_type": "llama", **TEXT}
QWEN2 = {"model_type": "qwen2", **TEXT}
SIGLIP = {"model_type": "siglip_vision_model", **CLIP, "vision_use_head": False}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOKENS = {
    "image_token_id": IMG_TOKEN,
    "video_token_id": VID_TOKEN,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def stacked(*names: str):
    """Keyword arguments of a forward that wants items padded to the largest neighbour."""

    def kwargs(prompt: Prompt) -> dict[str, Any]:
        found: dict[str, list[torch.Tensor]] = {}
        for item in prompt.items:
            for name, tensor in item.fields.items():
                found.setdefault(name, []).append(tensor)
        for name in names:
            shapes = [t.shape for t in found.get(name, [])]
            largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
            padded = []
            for tensor in found.get(name, []):
                whole = tensor.new_zeros(1, *largest[1:])
                whole[tuple(slice(0, n) for n in tensor.shape)] = tensor
                padded.append(whole)
            found[name] = padded
        return {name: torch.cat(tensors) for name, tensors in found.items() if tensors}

    return kwargs


def runs_of(ids: list[int], token: int) -> tuple[tuple[int, int], ...]:
    runs, start = [], None
    for place, one in enumerate([*ids, -1]):
        if one == token and start is None:
            start = place
        elif one != token and start is not None:
            runs.append((start, place - start))
            start = None
    return tuple(runs)


def marked(modality: int, ids: list[int], token: int, fields: dict[str, torch.Tensor]) -> MediaItem:
    return MediaItem(modality, ids, runs_of(ids, token), fields)


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
        vision_config={"model_type": "clip_vision_model", **CLIP},
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
CASES["mistral3"] = Case(
    lambda: hf.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=IMG_TOKEN,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    ),
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
    names = {name for item in prompt.items for name in item.fields}
    return {name: torch.cat([i.fields[name] for i in prompt.items], dim=1) for name in names}


def _idefics(kind: str) -> Any:
    vision = {**CLIP, "num_channels": 3}
    return getattr(hf, kind)(
        text_config=LLAMA, vision_config=vision, image_token_id=IMG_TOKEN, scale_factor=2
    )


CASES["idefics3"] = Case(lambda: _idefics("Idefics3Config"), {IMAGE: tiled_item}, tiles_in_row)
CASES["smolvlm"] = Case(lambda: _idefics("SmolVLMConfig"), {IMAGE: tiled_item}, tiles_in_row)


def internvl_item(seed: int) -> MediaItem:
    tiles = 1 + seed % 3
    ids = [START] + [IMG_TOKEN] * 4 * tiles + [END]
    return marked(IMAGE, ids, IMG_TOKEN, {"pixel_values": noise(seed, tiles, 3, 16, 16)})


CASES["internvl"] = Case(
    lambda: hf.InternVLConfig(
        text_config=QWEN2,
        vision_config={**CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMG_TOKEN,
        image_seq_length=4,
    ),
    {IMAGE: internvl_item},
    mm_fields,
)


def crops_item(seed: int) -> MediaItem:
    """1 or 2 crops of 4 embeddings each."""
    crops = 1 + seed % 2
    return plain_item(4 * crops, {"pixel_values": noise(seed, crops, 3, 16, 16)})


CASES["aya_vision"] = Case(
    lambda: hf.AyaVisionConfig(
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 12, "logit_scale": 0.5},
        vision_config=SIGLIP,
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: crops_item},
    mm_fields,
)
CASES["cohere2_vision"] = Case(
    lambda: hf.Cohere2VisionConfig(
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 12, "logit_scale": 0.5},
        vision_config=SIGLIP,
        image_token_id=IMG_TOKEN,
        alignment_intermediate_size=64,
    ),
    {IMAGE: crops_item},
    mm_fields,
)
CASES["got_ocr2"] = Case(
    lambda: hf.GotOcr2Config(
        text_config=QWEN2,
        vision_config={
            "hidden_size": 16,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 128,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 24,
        },
        image_token_index=IMG_TOKEN,
        image_seq_length=4,
        tie_word_embeddings=False,
    ),
    {IMAGE: lambda seed: plain_item(4, {"pixel_values": noise(seed, 1, 3, 128, 128)})},
    mm_fields,
)
CASES["vipllava"] = Case(
    lambda: hf.VipLlavaConfig(
        text_config=LLAMA,
        vision_config={"model_type": "clip_vision_model", **CLIP},
        vision_feature_layer=[-2, -1],
        image_token_index=IMG_TOKEN,
    ),
    {IMAGE: lambda seed: plain_item(16, {"pixel_values": noise(seed, 1, 3, 16, 16)})},
    mm_fields,
)
CASES["llama4"] = Case(
    lambda: hf.Llama4Config(
        text_config={
            **TEXT,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "attention_chunk_size": 12,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "floor_scale": 8,
        },
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
    mm_fields,
)
CASES["lighton_ocr"] = Case(
    lambda: hf.LightOnOcrConfig(
        text_config={"model_type": "qwen3", **TEXT, "head_dim": 8},
        vision_config=PIXTRAL,
        image_token_id=IMG_TOKEN,
        spatial_merge_size=2,
    ),
    {IMAGE: pixtral_item},
    stacked("pixel_values"),
)


# Flat patches, grids and mrope: the Qwen-VL line and GLM-4V


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
        vision_config={
            **VISION,
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
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
            "moe_intermediate_size": 16,
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


def paligemma_item(seed: int) -> MediaItem:
    return plain_item(16, {"pixel_values": noise(seed, 1, 3, 16, 16)})


CASES["paligemma"] = Case(
    lambda: _paligemma({"model_type": "gemma"}),
    {IMAGE: paligemma_item},
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
    {IMAGE: paligemma_item},
    paligemma_kwargs,
    budget=75,
)


# Sound: voxtral, audioflamingo3, qwen2_audio


SOUND = {
    "num_mel_bins": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_source_positions": 16,
}


def voxtral_item(seed: int) -> MediaItem:
    chunks = 1 + seed % 2
    return plain_item(4 * chunks, {"input_features": noise(seed, chunks, 8, 32)}, AUD_TOKEN)


CASES["voxtral"] = Case(
    lambda: hf.VoxtralConfig(
        text_config=LLAMA,
        audio_config={"model_type": "voxtral_encoder", **SOUND},
        audio_token_id=AUD_TOKEN,
    ),
    {AUDIO: voxtral_item},
    mm_fields,
)


def sound_item(seed: int, mask_name: str, windows: int) -> MediaItem:
    """Windows of 32 frames; only the first frames of the last one are sound."""
    mask = torch.ones(windows, 32, dtype=torch.long)
    valid = 20 + 4 * (seed % 3)
    mask[-1, valid:] = 0
    features = noise(seed, windows, 8, 32) * mask[:, None]
    count = 8 * (windows - 1) + ((valid - 1) // 2 + 1 - 2) // 2 + 1
    return plain_item(count, {"input_features": features, mask_name: mask}, AUD_TOKEN)


CASES["audioflamingo3"] = Case(
    lambda: hf.AudioFlamingo3Config(
        text_config=QWEN2,
        audio_config={"model_type": "audioflamingo3_encoder", **SOUND},
        audio_token_id=AUD_TOKEN,
    ),
    {AUDIO: lambda seed: sound_item(seed, "input_features_mask", 1 + seed % 2)},
    mm_fields,
)
CASES["qwen2_audio"] = Case(
    lambda: hf.Qwen2AudioConfig(
        text_config=QWEN2,
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "max_source_positions": 16,
        },
        audio_token_index=AUD_TOKEN,
    ),
    {AUDIO: lambda seed: sound_item(seed, "feature_attention_mask", 1)},
    mm_fields,
)
