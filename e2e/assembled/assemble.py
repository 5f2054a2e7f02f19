"""Checkpoints of real parts and a projector trained here: SmolLM2-135M-Instruct that hears or sees.

    python -m e2e.assembled.assemble audio          # prints the folder; made at the first call
    foveal serve "$(python -m e2e.assembled.assemble audio)" --name smollm2-audio

The checkpoint lies in the user's cache folder: its towers and text model come from published
packages (`parts.py`), the projector from this folder. Raises packages.Unavailable, or
packages.Mismatch for other parts than these.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from e2e.assembled import parts
from tests.support import packages
from tests.support.models import smollm2

HERE = Path(__file__).parent
AUDIO_PROJECTOR = HERE / "audio-projector.safetensors"
VISION_PROJECTOR = HERE / "vision-projector.safetensors"
BUNDLED = HERE.parents[1] / "examples/tiny-vlm/model"
TOWER_SHA256 = "5dcf9e908d358900624013d880fd914652b49367893a9d8a3ed99c174d71877f"
"""Of the tensors of the bundled model's tower, names before values."""
MARK, PLACEHOLDERS = "<gh_stars>", {"audio": "<sound>", "vision": "<image>"}
"""A mark of code repositories in SmolLM2's vocabulary, which no chat has, is renamed: so the
vocabulary keeps its size."""
MOST_SECONDS = 30
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- 'PLACEHOLDER' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""SmolLM2's own, for messages with parts as well."""


def folder(kind: str) -> Path:
    """The checkpoint, made at the first call and again when anything that it is made of changes."""
    model_of, processor_of, projector, other = KINDS[kind]

    def make(work: Path) -> None:
        (work / "out").mkdir()
        model_of(load_file(projector)).save_pretrained(work / "out")
        processor_of(work / "out").save_pretrained(work / "out")

    made_of = [Path(__file__), projector, smollm2.REQUIREMENTS, other]
    return packages.cached(f"smollm2-{kind}", made_of, make)


def audio_model(projector: dict[str, torch.Tensor] | None = None) -> Any:
    """Audio Flamingo 3's architecture in float32: Whisper's encoder with its outputs averaged in
    pairs, a projector of two layers (seeded noise unless given), a decoder."""
    from transformers import (
        AudioFlamingo3Config,
        AudioFlamingo3EncoderConfig,
        AudioFlamingo3ForConditionalGeneration,
        AutoModelForCausalLM,
    )

    text = AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32)
    tower = load_file(parts.whisper_encoder())
    width, num_bins, _ = tower["conv1.weight"].shape
    config = AudioFlamingo3Config(
        audio_config=AudioFlamingo3EncoderConfig(
            num_mel_bins=num_bins,
            hidden_size=width,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=4 * width,
        ),
        text_config=text.config,
        audio_token_id=_placeholder_id(),
    )
    torch.manual_seed(0)
    model = AudioFlamingo3ForConditionalGeneration(config).float().eval()
    model.model.audio_tower.load_state_dict(tower)
    return _filled(model, text, projector)


def audio_processor(work: Path) -> Any:
    from transformers import AudioFlamingo3Processor, WhisperFeatureExtractor

    return AudioFlamingo3Processor(
        WhisperFeatureExtractor(feature_size=80), tokenizer("audio", work),
        chat_template=_template("audio"),
        audio_token=PLACEHOLDERS["audio"], max_audio_len=MOST_SECONDS,
    )  # fmt: skip


def vision_model(projector: dict[str, torch.Tensor] | None = None) -> Any:
    """LLaVA's architecture in float32: the bundled model's tower, a projector of two layers (seeded
    noise unless given), a decoder."""
    from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

    text = AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32)
    bundled = LlavaConfig.from_pretrained(BUNDLED)
    config = LlavaConfig(
        vision_config=bundled.vision_config,
        text_config=text.config,
        image_token_index=_placeholder_id(),
        image_seq_length=bundled.image_seq_length,
        vision_feature_layer=bundled.vision_feature_layer,
        vision_feature_select_strategy=bundled.vision_feature_select_strategy,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).float().eval()
    model.model.vision_tower.load_state_dict(bundled_tower())
    return _filled(model, text, projector)


def _filled(model: Any, text: Any, projector: dict[str, torch.Tensor] | None) -> Any:
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    if projector is not None:
        wide = {name: tensor.float() for name, tensor in projector.items()}
        model.model.multi_modal_projector.load_state_dict(wide)
    model.generation_config = text.generation_config
    return model


def bundled_tower() -> dict[str, torch.Tensor]:
    """The one that the projector was trained with. Raises packages.Mismatch for another."""
    tensors = load_file(BUNDLED / "model.safetensors")
    tower = {
        name.split("vision_tower.")[1]: tensor
        for name, tensor in sorted(tensors.items())
        if "vision_tower." in name
    }
    content = hashlib.sha256()
    for name, tensor in tower.items():
        content.update(name.encode() + tensor.numpy().tobytes())
    if content.hexdigest() != TOWER_SHA256:
        raise packages.Mismatch(
            f"the tower of {BUNDLED} is another one ({content.hexdigest()}) than the projector was "
            "trained with: train it again (e2e/assembled/train_vision.py), set TOWER_SHA256"
        )
    return tower


def vision_processor(work: Path) -> Any:
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

    bundled = LlavaConfig.from_pretrained(BUNDLED)
    return LlavaProcessor(
        image_processor=CLIPImageProcessor.from_pretrained(BUNDLED),
        tokenizer=tokenizer("vision", work),
        patch_size=bundled.vision_config.patch_size,
        vision_feature_select_strategy=bundled.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        image_token=PLACEHOLDERS["vision"],
        chat_template=_template("vision"),
    )


def tokenizer(kind: str, work: Path) -> Any:
    """SmolLM2's with the placeholder's name; leaves its files in `work`."""
    from transformers import AutoTokenizer

    source = smollm2.folder()
    text = (source / "tokenizer.json").read_text(encoding="utf-8")
    assert f'"{MARK}"' in text
    text = text.replace(f'"{MARK}"', f'"{PLACEHOLDERS[kind]}"')
    (work / "tokenizer.json").write_text(text, "utf-8")
    config = (source / "tokenizer_config.json").read_bytes()
    (work / "tokenizer_config.json").write_bytes(config)
    made = AutoTokenizer.from_pretrained(work)
    made.model_max_length = 8192
    return made


def _template(kind: str) -> str:
    return CHAT_TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[kind])


def _placeholder_id() -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(smollm2.folder()).convert_tokens_to_ids(MARK))


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Path], Any], Path, Path]] = {
    "audio": (audio_model, audio_processor, AUDIO_PROJECTOR, parts.WHISPER),
    "vision": (vision_model, vision_processor, VISION_PROJECTOR, BUNDLED / "model.safetensors"),
}
"""Model and processor, the projector's weights, and what else the checkpoint is made of."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(KINDS))
    try:
        print(folder(parser.parse_args().kind))
    except (packages.Unavailable, packages.Mismatch) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
