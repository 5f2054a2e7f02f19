"""Tiny cases of families that listen."""

from __future__ import annotations

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    AUD_TOKEN,
    AUDIO,
    CASES,
    LLAMA,
    QWEN2,
    Case,
    MediaItem,
    noise,
    plain_item,
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
)
