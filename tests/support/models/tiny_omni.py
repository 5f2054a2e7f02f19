"""Tiny cases of Qwen's Omni families: images, videos and sounds in three-row rope positions."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    AUD_TOKEN,
    AUDIO,
    CASES,
    IMAGE,
    IMG_TOKEN,
    START,
    VID_TOKEN,
    VIDEO,
    Case,
    MediaItem,
    Prompt,
    marked,
    noise,
)
from tests.support.models.tiny_grids import (
    QWEN3_VISION,
    QWEN_TEXT,
    WINDOW_VISION,
    grid_item,
    video_item,
)
from tests.support.models.tiny_sounds import QWEN_SOUND

SOUND_START, SOUND_END = 9, 10
AUDIO_TOWER = {**QWEN_SOUND, "output_dim": 32}
MARKS = {"vision_start_token_id": START, "audio_start_token_id": SOUND_START}


def clip_item(seed: int, shortest: float = 1.5) -> MediaItem:
    """Of `shortest` seconds or more for each pair of frames."""
    item = video_item(seed)
    item.fields["video_second_per_grid"] = torch.tensor([shortest + seed % 3])
    return item


def sound_item(frames: int, count: int, seed: int) -> MediaItem:
    ids = [SOUND_START, *[AUD_TOKEN] * count, SOUND_END]
    mask = torch.ones(1, frames, dtype=torch.long)
    fields = {"input_features": noise(seed, 1, 8, frames), "feature_attention_mask": mask}
    return marked(AUDIO, ids, AUD_TOKEN, fields)


def short_sound(seed: int) -> MediaItem:
    """One window of 16 frames or more; two make a position, and two of these an embedding."""
    frames = 14 + 9 * (seed % 3)
    return sound_item(frames, ((frames - 1) // 2 + 1 - 2) // 2 + 1, seed)


def omni_kwargs(prompt: Prompt) -> dict[str, Any]:
    """Sounds padded to their longest neighbour; without a mask of the prompt transformers gives
    items the positions of text."""
    lengths = [i.fields["input_features"].shape[-1] for i in prompt.items if i.modality == AUDIO]
    for item in prompt.items if lengths else ():
        for name in ("input_features", "feature_attention_mask"):
            if name in item.fields:
                missing = max(lengths) - item.fields[name].shape[-1]
                item.fields[name] = torch.nn.functional.pad(item.fields[name], (0, missing))
    return {**prompt.fields(), "attention_mask": torch.ones(1, len(prompt.ids), dtype=torch.long)}


THINKER_2_5: dict[str, Any] = {
    "text_config": {k: v for k, v in QWEN_TEXT.items() if k != "model_type"},
    "vision_config": WINDOW_VISION,
    "audio_config": {**AUDIO_TOWER, "n_window": 8},
    "image_token_index": IMG_TOKEN,
    "video_token_index": VID_TOKEN,
    "audio_token_index": AUD_TOKEN,
    "position_id_per_seconds": 3,
    **MARKS,
}
ITEMS = {IMAGE: grid_item, VIDEO: clip_item, AUDIO: short_sound}
CASES["qwen2_5_omni_thinker"] = Case(
    lambda: hf.Qwen2_5OmniThinkerConfig(**THINKER_2_5), ITEMS, omni_kwargs
)
CASES["qwen2_5_omni"] = Case(
    lambda: hf.Qwen2_5OmniConfig(thinker_config=THINKER_2_5, enable_audio_output=False),
    ITEMS,
    omni_kwargs,
)


def long_sound(seed: int) -> MediaItem:
    """Windows of 100 frames, of each of which eight frames or fewer make an embedding."""
    frames = (70, 100, 240)[seed % 3]
    last = ((((frames % 100 - 1) // 2 + 1) - 1) // 2 + 1 - 1) // 2 + 1
    return sound_item(frames, 13 * (frames // 100) + last, seed)


THINKER_3: dict[str, Any] = {
    "text_config": {
        **QWEN_TEXT,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "vision_config": QWEN3_VISION,
    "audio_config": {
        **AUDIO_TOWER,
        "n_window": 50,
        "n_window_infer": 200,
        "downsample_hidden_size": 4,
    },
    "image_token_id": IMG_TOKEN,
    "video_token_id": VID_TOKEN,
    "audio_token_id": AUD_TOKEN,
    "position_id_per_seconds": 13,
    **MARKS,
}
ITEMS_3 = {
    IMAGE: grid_item,
    VIDEO: lambda seed: clip_item(seed, 0.3),  # times that are no whole positions
    AUDIO: long_sound,
}
CASES["qwen3_omni_moe_thinker"] = Case(
    lambda: hf.Qwen3OmniMoeThinkerConfig(**THINKER_3), ITEMS_3, omni_kwargs
)
CASES["qwen3_omni_moe"] = Case(
    lambda: hf.Qwen3OmniMoeConfig(thinker_config=THINKER_3, enable_audio_output=False),
    ITEMS_3,
    omni_kwargs,
)
