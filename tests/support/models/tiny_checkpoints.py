"""Random checkpoints of real architectures, small enough to run in milliseconds, and their inputs.

Each case has a configuration, a way to make a media item as its processor would, and the keyword
arguments of transformers' own forward for the same input. Weights are drawn wide (std about
1/sqrt(fan_in)): with the default 0.02 every model says the same token whatever it sees.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from foveal_runtime.model.checkpoint.loader import class_for
from foveal_runtime.plan.media import MODALITIES

MODULES = (
    "tiny_images", "tiny_grids", "tiny_groups", "tiny_sounds", "tiny_more_images", "tiny_hybrids",
    "tiny_gemmas", "tiny_encoders", "tiny_towers", "tiny_mamba", "tiny_omni",
)  # fmt: skip
IMAGE, VIDEO, AUDIO = range(3)
IMG_TOKEN, VID_TOKEN, AUD_TOKEN, START, END, MARK = 3, 4, 5, 6, 7, 8
FIRST_TEXT, VOCAB = 20, 128
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass
class MediaItem:
    """What a processor makes of one image, clip or sound: `ids` replace its placeholder."""

    modality: int
    ids: list[int]
    embed_runs: tuple[tuple[int, int], ...]
    fields: dict[str, torch.Tensor]


@dataclass
class Case:
    """`items` maps a modality index to a maker of items from a seed; `tolerance` bounds the
    difference of any logit from transformers in float32 on a CPU, where float32 is that exact
    (see exact.py)."""

    config: Callable[[], Any]
    items: dict[int, Callable[[int], MediaItem]] = field(default_factory=dict)
    forward_kwargs: Callable[[Prompt], dict[str, Any]] = lambda prompt: prompt.fields()
    budget: int = 17
    num_blocks: int = 128
    tolerance: float = 2e-5


@dataclass
class Prompt:
    """Expanded ids, where the items stand in them, and how many of the ids are prompt."""

    ids: list[int]
    items: list[MediaItem]
    offsets: list[int]
    prefix: int

    def type_ids(self) -> torch.Tensor:
        """0 text, 1 image, 2 video, on embed positions only."""
        types = torch.zeros(1, len(self.ids), dtype=torch.int)
        for item, offset in zip(self.items, self.offsets, strict=True):
            for start, length in item.embed_runs:
                types[0, offset + start : offset + start + length] = item.modality + 1
        return types

    def by_name(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of all items that have one of that name."""
        found: dict[str, list[torch.Tensor]] = {}
        for item in self.items:
            for name, tensor in item.fields.items():
                found.setdefault(name, []).append(tensor)
        return found

    def fields(self, in_row: str = " ") -> dict[str, torch.Tensor]:
        """All items' tensors, each name concatenated along dimension 0, or along the last where it
        begins with `in_row`."""
        return {
            name: torch.cat(tensors, dim=-1 if name.startswith(in_row) else 0)
            for name, tensors in sorted(self.by_name().items())
        }


def load_cases() -> None:
    """Adds the cases of the modules beside this one."""
    for module in MODULES:
        importlib.import_module(f"tests.support.models.{module}")


def make_prompt(case: Case, seed: int, items: list[tuple[int, int]], num_text: int = 5) -> Prompt:
    """Random text with items (modality, item seed) between; two text tokens at the end."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(FIRST_TEXT, VOCAB, (count,), generator=generator).tolist()

    ids, made, offsets = text(num_text), [], []
    for modality, item_seed in items:
        item = case.items[modality](item_seed)
        made.append(item)
        offsets.append(len(ids))
        ids += item.ids + text(3)
    ids += text(2)
    return Prompt(ids, made, offsets, len(ids))


def save(name: str, path: Path) -> None:
    """Writes the random checkpoint of a case to `path`."""
    config = CASES[name].config()
    torch.manual_seed(1)
    model = class_for(config)(config).float().eval()
    widen(model)
    model.save_pretrained(path)


def widen(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "embed" not in name.rsplit(".", 2)[-2]:
                fan_in = weight[0].numel() if weight.dim() != 3 else weight.shape[1]
                weight.normal_(0.0, 1.5 / math.sqrt(fan_in), generator=generator)
            elif weight.dim() >= 2:
                weight.normal_(0.0, 1.0, generator=generator)
            elif "norm" not in name:
                weight.normal_(0.0, 0.3, generator=generator)
        # Placeholders are never said, else an output would count as an item in the reference; nor
        # is what begins a sound, by which Omni's reference counts them.
        whole: Any = getattr(model, "thinker", model)
        head = whole.get_output_embeddings()
        begin = getattr(whole.config, "audio_start_token_id", AUD_TOKEN)
        if head is not None:
            head.weight[[IMG_TOKEN, VID_TOKEN, AUD_TOKEN, begin]] = 0.0


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_item(count: int, fields: dict[str, torch.Tensor], token: int = IMG_TOKEN) -> MediaItem:
    """An item whose replacement is nothing but `count` placeholder tokens."""
    modality = {IMG_TOKEN: IMAGE, VID_TOKEN: VIDEO, AUD_TOKEN: AUDIO}[token]
    assert MODALITIES[modality]
    return MediaItem(modality, [token] * count, ((0, count),), fields)


def pixels(count: int = 16, side: int = 16) -> Callable[[int], MediaItem]:
    """Makes images of one size, `count` placeholder tokens each."""
    return lambda seed: plain_item(count, {"pixel_values": noise(seed, 1, 3, side, side)})


LLAMA = {"model_type": "llama", **TEXT}
QWEN2 = {"model_type": "qwen2", **TEXT}
QWEN3 = {"model_type": "qwen3", **TEXT, "head_dim": 8}
CLIP_VISION = {"model_type": "clip_vision_model", **CLIP}
SIGLIP = {"model_type": "siglip_vision_model", **CLIP, "vision_use_head": False}


def stacked(*names: str):
    """Keyword arguments of a forward that wants items padded to the largest neighbour."""

    def kwargs(prompt: Prompt) -> dict[str, Any]:
        found = prompt.by_name()
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


def as_video(make: Callable[[int], MediaItem]) -> Callable[[int], MediaItem]:
    """For families whose videos are frames in image fields and image tokens."""
    return lambda seed: replace(make(seed), modality=VIDEO)


def _llama() -> Any:
    return transformers.LlamaConfig(**TEXT)


def _llava() -> Any:
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        image_token_index=IMG_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


CASES: dict[str, Case] = {
    "llama": Case(_llama),
    "llava": Case(_llava, {IMAGE: pixels()}),
}


def text_case(kind: str, **changes: Any) -> Case:
    """A text model: TEXT with changes, as the configuration class called `kind`."""
    return Case(lambda: getattr(transformers, kind)(**{**TEXT, **changes}))


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SMALL_4 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,  # queries grow beyond it
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.5,
}
HYBRID = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKED = {  # Llama 4's
    "head_dim": 8,
    "num_hidden_layers": 4,
    "attention_chunk_size": 12,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    "floor_scale": 8,
}
CASES.update(
    {
        "mistral_sliding": text_case("MistralConfig", sliding_window=12),
        "gemma2_softcap": text_case(
            "Gemma2Config",
            **HYBRID,
            head_dim=16,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=1.0,
            final_logit_softcapping=5.0,
        ),
        "gpt_oss_sinks": text_case(
            "GptOssConfig",
            **HYBRID,
            head_dim=8,
            intermediate_size=64,  # MXFP4 has blocks of 32 inputs
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "cohere2": text_case("Cohere2Config", **HYBRID, logit_scale=0.25),
        "qwen3_moe": text_case(
            "Qwen3MoeConfig",
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
        "llama4_text": text_case("Llama4TextConfig", **CHUNKED),
        "deepseek_v3_mla": text_case("DeepseekV3Config", **LATENT, n_group=2, topk_group=1),
        "mistral4": text_case("Mistral4Config", **LATENT, rope_parameters=SMALL_4),
    }
)
