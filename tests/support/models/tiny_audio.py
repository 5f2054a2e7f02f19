"""A whole checkpoint of a model that listens: random weights, its processor and a chat template.

Qwen2-Audio's architecture; the processor makes 3,000 frames of eight bins of any sound.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf

from tests.support import tiny_processors
from tests.support.models.tiny_checkpoints import QWEN2, widen

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}what {% endif %}"
)


def save_tiny_audio(path: Path) -> None:
    """Writes a directory that a server takes."""
    processor = tiny_processors.qwen2_audio()
    processor.tokenizer.chat_template = processor.chat_template = TEMPLATE
    processor.save_pretrained(path)
    text = {**QWEN2, "max_position_embeddings": 2048, "eos_token_id": None}
    config = hf.Qwen2AudioConfig(
        text_config=text,
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "max_source_positions": 1500,
        },
        audio_token_index=processor.tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    torch.manual_seed(1)
    model = hf.Qwen2AudioForConditionalGeneration(config).float().eval()
    widen(model)
    # Only words are said: no marks, and nothing that ends the text.
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[:6] = 0.0
        head[len(tiny_processors.WORDS) :] = 0.0
    model.save_pretrained(path)
