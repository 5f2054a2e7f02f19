"""A small Qwen3.5 with random weights that reads the bundled model's questions and pictures.

    python -m tests.support.processes.hybrid_model FOLDER

For running tests of processes with a model that keeps a recurrent state:

    FOVEAL_TEST_MODEL=FOLDER FOVEAL_TEST_TOKENS=6 make faults FAULTS=8

Its replies mean nothing, but depend on every token and pixel before them, and never end early.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf

BUNDLED = Path(__file__).resolve().parents[3] / "examples/tiny-vlm/model"
START, IMAGE, VIDEO, END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
PATCH = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
PIXELS = {"size": {"shortest_edge": 48 * 48, "longest_edge": 96 * 96}}
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "partial_rotary_factor": 1.0,
    },
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_position_embeddings": 144,
    "out_hidden_size": 128,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def make_processor() -> Any:
    tokenizer = hf.AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_tokens([hf.AddedToken(one, special=True) for one in (START, IMAGE, VIDEO, END)])
    template = (BUNDLED / "chat_template.jinja").read_text()
    return hf.Qwen3VLProcessor(
        hf.Qwen2VLImageProcessor(**PATCH, **PIXELS),
        tokenizer,
        hf.Qwen3VLVideoProcessor(**PATCH, **PIXELS),
        chat_template=template.replace("<image>", START + IMAGE + END),
    )


def make_config(tokenizer: Any) -> Any:
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    names = {"image": IMAGE, "video": VIDEO, "vision_start": START, "vision_end": END}
    return hf.Qwen3_5Config(
        text_config={**TEXT, **ids, "vocab_size": len(tokenizer)},
        vision_config=VISION,
        tie_word_embeddings=False,
        **{f"{k}_token_id": tokenizer.convert_tokens_to_ids(one) for k, one in names.items()},
    )


def draw_weights(model: Any, mute: list[int]) -> None:
    """Wide enough that replies depend on what was said; `mute` tokens are never said."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                width = 1.0 if "embed" in name else 2 / math.sqrt(weight[0].numel())
                weight.normal_(0.0, width, generator=generator)
        model.get_output_embeddings().weight[mute] = 0.0  # logit 0 never wins


def save(folder: Path) -> None:
    processor = make_processor()
    tokenizer = processor.tokenizer
    model = hf.Qwen3_5ForConditionalGeneration(make_config(tokenizer)).eval()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    strange = [n for n, text in enumerate(texts) if not (text.isascii() and text.isprintable())]
    draw_weights(model, [*tokenizer.all_special_ids, *strange])
    model.generation_config.update(do_sample=False, eos_token_id=tokenizer.eos_token_id)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
