"""The page of what is refused, made by asking the code for each: what it prints is what users read.

python -m tests.support.refused_page docs/reference/refused.md
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from foveal_runtime.frontend.media.options import check as check_options
from foveal_runtime.frontend.protocol.rules import check_extra
from foveal_runtime.main.local.model import find_model
from foveal_runtime.model.adapters import ADAPTERS, TEXT_ADAPTERS
from foveal_runtime.model.checkpoint import placement, quantized
from foveal_runtime.model.checkpoint.kinds import check_kind
from foveal_runtime.model.checkpoint.loader import (
    check_class,
    class_for,
    load_model,
    meta_model,
)
from foveal_runtime.model.checkpoint.weights import check_weights
from foveal_runtime.model.layers.lora import Loras
from foveal_runtime.model.parallel.tensor_parallel import check_splits
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.embedder import check_task, read_embedder
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.plan.lora import LoraSource
from tests.support import tiny_processors
from tests.support.models import tiny_checkpoints
from tests.support.models.lora import write_adapter
from tests.support.models.quantised import make

REASONS = {
    "encoder-decoder models": (
        "florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder",
    ),
    "cross-attention layers": ("blip", "evolla", "idefics", "mllama"),
    "sparse attention with an index of its own": (
        "dots3_note", "glm5_next", "minimax_m3_vl", "mistral_large4", "qwen4_exp",
    ),
    "convolutions with a state on keys and values": ("inkling2", "inkling_mm_model"),
    "attention to all of the prompt and a window of the answer": ("unlimited_ocr",),
    "not autoregressive text": ("diffusion_gemma", "pi0", "shieldgemma2"),
    "a prompt that depends on the text around an image": ("idefics2",),
    "a prompt that says how long a sound is; encoders that add noise": ("vibevoice_asr",),
    "tokens of an image that see those of later images": ("molmo2",),
    "images that are encoded together with the question": ("instructblip", "instructblipvideo"),
    "sound that is added to each token while it is said": (
        "kyutai_speech_to_text", "voxtral_realtime",
    ),
    "LoRA adapters of their own that are on where there is an image or a sound": (
        "granite_speech", "granite_speech_plus", "phi4_multimodal",
    ),
}  # fmt: skip
"""Why types of `refused_types` have no adapter; the others are not compared yet."""


class Case(NamedTuple):
    """`ask`: gets an empty folder and is refused. `why`: what is not in the message."""

    what: str
    why: str
    ask: Callable[[Path], object]


def refused_types() -> list[str]:
    return sorted(
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()
        - ADAPTERS.keys()
        - TEXT_ADAPTERS.keys()
    )


def refused_methods() -> list[str]:
    known = quantized.LOADERS.keys() | {placement.METHOD}
    return sorted(AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - known)


def _kind(kind: str, **config: Any) -> Callable[[Path], object]:
    return lambda _: check_kind("MODEL", {"model_type": kind, **config})


def _text(kind: str, **changes: Any) -> Callable[[Path], object]:
    def ask(_: Path) -> None:
        config = AutoConfig.for_model(kind, **changes)
        check_class(config, class_for(config))

    return ask


def _scheme(**scheme: Any) -> Callable[[Path], object]:
    config = SimpleNamespace(quantization_config=scheme, sub_configs=())
    return lambda _: quantized.check_declared("MODEL", config)


def _stored(folder: Path) -> object:
    save_file({"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, folder / "model.safetensors")
    return quantized.check_quantization(str(folder), SimpleNamespace(sub_configs=()))


def _file(name: str, ask: Callable[[str], object], content: object = None) -> Any:
    def made(folder: Path) -> object:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if content is None else json.dumps(content))
        return ask(str(folder))

    return made


def _adapter(name: str = "llama", tensor: str = "", **config: object) -> Callable[[Path], object]:
    def ask(folder: Path) -> None:
        tiny_checkpoints.load_cases()
        tiny_checkpoints.save(name, folder / "model")
        loaded = load_model(str(folder / "model"))
        path = write_adapter(folder / "adapter", loaded.model, 1, **config)
        if tensor:
            save_file({tensor: torch.zeros(4, 32)}, path / "adapter_model.safetensors")
        Loras(loaded, 1 << 20).load(LoraSource("NAME", str(path)))

    return ask


def _experts(name: str) -> Callable[[Path], object]:
    def ask(folder: Path) -> None:
        tiny_checkpoints.load_cases()
        tiny_checkpoints.save(name, folder / "model")
        stored, _ = make(folder / "model", folder, "fp8 blocks")
        shutil.copytree(stored, folder, dirs_exist_ok=True)
        meta_model(str(folder))

    return ask


def _ranks(kind: str, **changes: Any) -> Callable[[Path], object]:
    return lambda _: check_splits(AutoConfig.for_model(kind, **changes), 2)


PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
}  # fmt: skip
TOWER = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight"
BERT = {"model_type": "bert"}
HEADLESS = {
    "model_type": "mistral", "architectures": ["MistralModel"], "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2"}

SECTIONS: Mapping[str, tuple[Case, ...]] = {
    "Architectures": (
        Case("multimodal families without an adapter", "each needs its own comparison",
             _kind("mllama", vision_config={})),
        Case("encoder-decoders", "KV blocks hold one sequence, not another's encodings",
             _kind("t5", is_encoder_decoder=True)),
        Case("types that transformers does not know", "code from checkpoints is never run",
             _kind("qwen9_vl")),
        Case("what neither generates nor embeds text", "no route would serve it", _kind("vit")),
        Case("Mamba-1 layers", "transformers' scan of a prompt starts from an empty state, so a "
             "prompt cannot be computed in chunks", _text("jamba")),
        Case("models of state-space layers alone", "without attention there are no KV blocks for "
             "prefixes to be named by", _text("mamba2")),
        Case("one attention layer in several places (Zamba)", "KV blocks belong to one place",
             _text("zamba2")),
        Case("recurrent layers of unknown kind", "not compared",
             _text("minimax", layer_types=["linear_attention"], num_hidden_layers=1)),
        Case("text that sees in both directions", "a cached prefix would depend on what follows",
             _text("gemma3_text", use_bidirectional_attention=True)),
        Case("attention that cannot be replaced", "paged KV is reached through transformers' "
             "attention interface", _text("bloom")),
    ),
    "Files": (
        Case("pickles", "they run code when read",
             _file("pytorch_model.bin", check_weights)),
        Case("GGUF", "llama.cpp's container, with towers in another file",
             _file("model.gguf", lambda path: find_model(f"{path}/model.gguf"))),
    ),
    "Quantised weights": (
        Case("other methods", "not compared: " + ", ".join(f"`{n}`" for n in refused_methods()),
             _scheme(quant_method="bitsandbytes", load_in_4bit=True)),
        Case("NVFP4 and other layouts of a known method", "not compared",
             _scheme(**{**PACKED, "format": "nvfp4-pack-quantized"})),
        Case("transforms of inputs", "layers would compute something else",
             _scheme(**PACKED, transform_config={"config_groups": {"R1": {}}})),
        Case("2:4 sparsity", "not read", _scheme(**PACKED, sparsity_config={"format": "24"})),
        Case("tensors that config.json does not explain", "they would be widened silently",
             _stored),
        Case("experts of `aria`, `ernie4_5_vl_moe`, `step3p7`", "transformers stacks or computes "
             "them in ways of their own", _experts("ernie4_5_vl_moe")),
        Case("`--quantization` of a decoder without linear layers", "GPT-2's layers are "
             "transformers' Conv1D; it would run as it is stored",
             _file("config.json", lambda path: meta_model(path, quantization="int8"), GPT2)),
    ),
    "LoRA adapters": (
        Case("of towers, projectors, embeddings, heads, experts",
             "an image is encoded once for all adapters", _adapter("llava", TOWER)),
        Case("of models with recurrent state", "not compared",
             _adapter("lfm2")),
        Case("DoRA and what else changes more than a linear layer", "a sum of two products is "
             "all that a step adds", _adapter(use_dora=True)),
        Case("trained biases", "the same", _adapter(bias="all")),
        Case("PiSSA, OLoRA, LoftQ, CorDA", "they change the weights below",
             _adapter(init_lora_weights="pissa")),
    ),
    "Encoders and embeddings": (
        Case("an encoder that is to generate", "it has no head for it",
             _file("config.json", lambda path: check_task(path, "generate", "MODEL"), BERT)),
        Case("a decoder without an output layer that is to generate", "the same",
             _file("config.json", lambda path: check_task(path, "generate", "MODEL"), HEADLESS)),
        Case("layers behind the model (Dense)", "sentence-transformers' own code",
             _file("modules.json", read_embedder, [{"type": "sentence_transformers.Dense"}])),
    ),
    "Several devices": (
        Case("recurrent state", "states are not split", _ranks("lfm2")),
        Case("encoders", "small enough for one", _ranks("bert")),
        Case("quantised weights", "shards of packed rows are not read",
             _ranks("llama", quantization_config={"scheme": {"quant_method": "awq"}})),
    ),
    "Requests": (
        Case("speech output", "omni families are served with text output alone",
             lambda _: check_extra({"modalities": ["text", "audio"]}, False)),
        Case("the voice of it", "the same",
             lambda _: check_extra({"audio": {"voice": "alloy", "format": "wav"}}, False)),
        Case("a video's sound among its frames", "items are encoded and kept one by one",
             lambda _: check_options(tiny_processors.qwen2_5_omni(), 1,
                                     {"use_audio_in_video": True}, ModalityLimits(), frozenset())),
        Case("beam search", "a step has one continuation a sequence",
             lambda _: check_extra({"use_beam_search": True}, False)),
        Case("web search and other tools that a server runs", "no tool runs here",
             lambda _: check_extra({"web_search_options": {}}, False)),
    ),
}  # fmt: skip

HEAD = """# What is refused, and why

Generated by `make generate`, which asks the code for every case below; do not edit.

What cannot be served right is refused in one line that names it, before a byte of a weight is read
wherever `config.json` or the headers of the files tell: by `foveal plan`, the profile Job (reason
[UnsupportedModel](reasons.md#unsupportedmodel)) and engines alike. Nothing is widened, dropped or
approximated silently. What is served is on the page of [supported models](models.md). `MODEL` below
stands for the model's path.

Of transformers' {total} multimodal generative types (the keys of its
`MODEL_FOR_MULTIMODAL_LM_MAPPING`) {served} are served: each has an adapter and a test that compares
it. {refused} are refused:

| reason | `model_type` |
|---|---|
"""
TAIL = """
A family whose processor cannot be shown to make the same prompt from single items refuses that
modality (video, audio) with a message that names it. Fields of requests that this server does not
know are refused by name, too: [HTTP API](http-api.md).
"""


def said(case: Case) -> str:
    """The message of a refusal, without the folder of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            case.ask(Path(folder))
        except FovealError as error:
            return error.message.replace(folder, "MODEL").replace("MODEL/model.gguf", "MODEL.gguf")
    raise AssertionError(f"{case.what}: not refused any more; say so on the page")


def page() -> str:
    types = refused_types()
    total = len(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    text = HEAD.format(total=total, served=total - len(types), refused=len(types))
    named = {kind for kinds in REASONS.values() for kind in kinds}
    assert named <= set(types), f"served: {named - set(types)}"
    rest = tuple(kind for kind in types if kind not in named)
    for reason, kinds in {**REASONS, "not compared yet": rest}.items():
        text += f"| {reason} | {', '.join(f'`{kind}`' for kind in kinds)} |\n"
    for title, cases in SECTIONS.items():
        text += f"\n## {title}\n\n| what | why | what is said |\n|---|---|---|\n"
        text += "".join(f"| {one.what} | {one.why} | {said(one)} |\n" for one in cases)
    return text + TAIL


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
