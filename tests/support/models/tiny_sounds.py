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
    QWEN3,
    Case,
    MediaItem,
    noise,
    plain_item,
)

SOUND = {
    "num_mel_bins": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_source_positions": 16,
}
QWEN_SOUND = {
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
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
        audio_config={"model_type": "qwen2_audio_encoder", **QWEN_SOUND},
        audio_token_index=AUD_TOKEN,
    ),
    {AUDIO: lambda seed: sound_item(seed, "feature_attention_mask", 1)},
)


def _masked(frames: int, valid: int, features: torch.Tensor, count: int) -> MediaItem:
    mask = (torch.arange(frames) < valid).long()[None]
    return plain_item(count, {"input_features": features, "input_features_mask": mask}, AUD_TOKEN)


def glmasr_item(seed: int) -> MediaItem:
    """32 mel frames, 16 encoder positions, four of them an embedding."""
    valid = 20 + 4 * (seed % 3)
    positions = (valid - 1) // 2 + 1
    return _masked(32, valid, noise(seed, 1, 8, 32), (positions - 4) // 4 + 1)


CASES["glmasr"] = Case(
    lambda: hf.GlmAsrConfig(
        text_config=LLAMA,
        audio_config={
            "model_type": "glmasr_encoder",
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_mel_bins": 8,
            "max_position_embeddings": 16,
        },
        audio_token_id=AUD_TOKEN,
        tie_word_embeddings=False,
    ),
    {AUDIO: glmasr_item},
)


def stacked_frames(seed: int) -> MediaItem:
    """12 stacked frames, the first of which are sound; one embedding each."""
    valid = 8 + seed % 4
    return _masked(12, valid, noise(seed, 1, 12, 16), valid)


CASES["fun_asr_nano"] = Case(
    lambda: hf.FunAsrNanoConfig(
        text_config=QWEN3,
        audio_config={
            "model_type": "fun_asr_nano_encoder",
            "num_mel_bins": 8,
            "num_stacked_frames": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_timestamp_prediction_layers": 1,
            "fsmn_kernel_size": 3,
            "max_position_embeddings": 64,
        },
        adaptor_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "projector_hidden_size": 24,
        },
        audio_token_id=AUD_TOKEN,
        tie_word_embeddings=False,
    ),
    {AUDIO: stacked_frames},
)


def chunk_item(seed: int) -> MediaItem:
    """One window of 100 frames through the tower's own lengths; computed by the model's helper."""
    valid = 60 + 8 * (seed % 3)
    return _masked(100, valid, noise(seed, 1, 8, 100), asr_length(valid))


def asr_length(valid: int) -> int:
    """Three convolutions of stride two over windows of 100 frames (Qwen3-ASR)."""
    for _ in range(3):
        valid = (valid - 1) // 2 + 1
    return valid


CASES["qwen3_asr"] = Case(
    lambda: hf.Qwen3ASRConfig(
        text_config=QWEN3,
        audio_config={
            "model_type": "qwen3_asr_encoder",
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "d_model": 16,
            "n_window": 50,
            "n_window_infer": 100,
            "output_dim": 32,
            "downsample_hidden_size": 8,
        },
        audio_token_id=AUD_TOKEN,
        tie_word_embeddings=False,
    ),
    {AUDIO: chunk_item},
)


def windows(seed: int) -> MediaItem:
    """A whole window of 32 frames and part of one, or that alone; four of the tower's positions,
    two frames each, make an embedding."""
    lengths = [32] * (seed % 2) + [19 + 4 * (seed % 3)]
    mask = torch.arange(32) < torch.tensor(lengths)[:, None]
    fields = {
        "input_features": noise(seed, len(lengths), 8, 32),
        "input_features_mask": mask.int(),
    }
    return plain_item(sum(-(-((one + 1) // 2) // 4) for one in lengths), fields, AUD_TOKEN)


CASES["moss_transcribe_diarize"] = Case(
    lambda: hf.MossTranscribeDiarizeConfig(
        text_config=QWEN3,
        audio_config={
            "num_mel_bins": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "hidden_size": 16,
            "max_source_positions": 16,
        },
        audio_token_id=AUD_TOKEN,
        tie_word_embeddings=False,
    ),
    {AUDIO: windows},
)
