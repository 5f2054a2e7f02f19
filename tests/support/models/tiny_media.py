"""Checkpoints of models that listen or watch: random weights, a processor, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.support import tiny_processors
from tests.support.models.tiny_checkpoints import QWEN2, widen
from tests.support.models.tiny_grids import QWEN_TEXT, VISION
from tests.support.models.tiny_sounds import QWEN_SOUND

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% else %}PLACEHOLDER{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}what {% endif %}"
)


def save_tiny_audio(path: Path) -> None:
    """Qwen2-Audio's architecture; the processor makes 3,000 frames of eight bins of any sound."""
    processor = tiny_processors.qwen2_audio()
    _save_processor(processor, path, "<|audio_bos|><|AUDIO|><|audio_eos|>")
    text = {**QWEN2, "max_position_embeddings": 2048, "eos_token_id": None}
    config = hf.Qwen2AudioConfig(
        text_config=text,
        audio_config={
            "model_type": "qwen2_audio_encoder",
            **QWEN_SOUND,
            "max_source_positions": 1500,
        },
        audio_token_index=processor.tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    _save_model(hf.Qwen2AudioForConditionalGeneration, config, path)


def save_tiny_video(path: Path) -> None:
    """Qwen2-VL's architecture; a clip is 64 patches or fewer for each pair of frames."""
    processor = tiny_processors.qwen2_vl()
    _save_processor(processor, path, "<|vision_start|><|video_pad|><|vision_end|>")
    token = processor.tokenizer.convert_tokens_to_ids
    config = hf.Qwen2VLConfig(
        text_config={**QWEN_TEXT, "max_position_embeddings": 2048, "eos_token_id": None},
        vision_config={**VISION, "depth": 2, "embed_dim": 16, "hidden_size": 32},
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    _save_model(hf.Qwen2VLForConditionalGeneration, config, path)


def _save_processor(processor: Any, path: Path, placeholder: str) -> None:
    template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    processor.tokenizer.chat_template = processor.chat_template = template
    processor.save_pretrained(path)


def _save_model(kind: Any, config: Any, path: Path) -> None:
    torch.manual_seed(1)
    model = kind(config).float().eval()
    widen(model)
    # Only words are said: no marks, and nothing that ends the text.
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[:6] = 0.0
        head[len(tiny_processors.WORDS) :] = 0.0
    model.save_pretrained(path)
