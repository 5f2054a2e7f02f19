"""Random-weight checkpoints of real architectures, made here, that every server can load.

    python -m e2e.bench.checkpoints llava-small            # prints the folder; made once

Speed does not depend on what weights say, so nothing needs to be downloaded. Tokenizer, processor
and chat template are complete and built with standard classes. Weights are drawn wide enough that
replies depend on pictures; a reply is plain ASCII and never ends early, so that every server
streams the same number of tokens. Tensors carry the names of published checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foveal_runtime.bench.traces import COMMON, lexicon

if TYPE_CHECKING:
    import torch

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<|system|>", "<|user|>", "<|assistant|>")
SIDE, PATCH = 336, 14
IMAGE_EMBEDS = (SIDE // PATCH) ** 2
CHAT_TEMPLATE = """\
{{- '<s>' -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<image>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '</s>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


class Shape(NamedTuple):
    """Width, MLP width, layers and heads of the text model (t_) and of the CLIP tower (v_)."""

    t_hidden: int
    t_mlp: int
    t_layers: int
    t_heads: int
    t_kv_heads: int
    v_hidden: int
    v_mlp: int
    v_layers: int
    v_heads: int
    vocabulary: int
    t_experts: int = 0
    """Of each layer, as wide as t_mlp; 0 = a Llama, which has none."""
    t_used: int = 0
    """Of these, how many a token goes to."""


SHAPES = {
    # 7.4 M parameters: the servers' own overhead shows.
    "llava-tiny": Shape(256, 512, 4, 4, 4, 128, 512, 4, 4, 8192),
    # 148 M: a 38 M CLIP tower and a 110 M Llama, LLaVA 1.5's geometry (336 pixels, 576 patches).
    "llava-small": Shape(768, 2048, 12, 12, 12, 512, 2048, 12, 8, 16384),
    # 308 M, of which a token of text reads 88 M: that tower and a Qwen 3 with experts.
    "llava-experts": Shape(768, 512, 12, 12, 4, 512, 2048, 12, 8, 16384, 16, 4),
}


ASSEMBLED = ("smollm2-audio", "smollm2-vision")


def cache_folder() -> Path:
    """Where the bench keeps checkpoints and other servers' environments: outside the tree."""
    named = os.environ.get("FOVEAL_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "foveal-bench"


def checkpoint(name: str, say: Callable[[str], None] = print) -> Path:
    """The folder of a checkpoint, made on first use. A change of this file makes it anew."""
    if name in ASSEMBLED:
        return _assembled(name)
    if name not in SHAPES:
        raise SystemExit(f"no checkpoint {name!r}; there are {', '.join(SHAPES)}")
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = cache_folder() / "checkpoints" / f"{name}-{version}"
    if (folder / "model.safetensors").exists():
        return folder
    say(f"making {name} in {folder}")
    half_made = folder.with_name(folder.name + f".{os.getpid()}")
    half_made.mkdir(parents=True)
    try:
        _make(SHAPES[name], half_made)
        half_made.rename(folder)
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
    return folder


def _assembled(name: str) -> Path:
    """Of published parts and a projector trained here (e2e/assembled)."""
    from e2e.assembled.assemble import folder
    from tests.support.packages import Mismatch, Unavailable

    try:
        return folder(name.removeprefix("smollm2-"))
    except (Unavailable, Mismatch) as error:
        raise SystemExit(f"{name}: {error}") from error


def _make(shape: Shape, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlavaForConditionalGeneration

    processor = _processor(shape.vocabulary)
    processor.save_pretrained(folder)
    tokenizer = processor.tokenizer
    config = _config(shape, tokenizer)
    model = LlavaForConditionalGeneration(config)
    _draw_weights(model, _mute_rows(tokenizer))
    model.generation_config.update(
        do_sample=False, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id
    )
    model.generation_config.save_pretrained(folder)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    tensors = dict(_published_tensors(model.state_dict()))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _published_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts, which transformers stacks, one by one."""
    for name, tensor in tensors.items():
        at, _, layer = _published(name).rpartition(".")
        if not at.endswith(".experts"):
            yield f"{at}.{layer}", tensor.contiguous()
            continue
        names = ("gate_proj", "up_proj") if layer == "gate_up_proj" else (layer,)
        for number, one in enumerate(tensor):
            for part, weight in zip(names, one.chunk(len(names)), strict=True):
                yield f"{at}.{number}.{part}.weight", weight.contiguous()


def _published(name: str) -> str:
    """The name a tensor has in published LLaVA checkpoints."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return name.replace("lm_head.", "language_model.lm_head.", 1)


def _tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random("foveal bench corpus")
    common = " ".join(f"{word} {word.title()}" for word in lexicon()[:COMMON])
    rest = list(lexicon())
    rng.shuffle(rest)
    tokenizer.train_from_iterator(
        [common] * 4 + [" ".join(rest[i : i + 50]) for i in range(0, len(rest), 50)],
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert tokenizer.get_vocab_size() == vocabulary, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL[3:]),
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _processor(vocabulary: int) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=_tokenizer(vocabulary),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def _config(shape: Shape, tokenizer: Any) -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig

    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(SPECIAL[:3])), strict=True))
    return LlavaConfig(
        text_config=_text_config(shape, ids),
        vision_config=CLIPVisionConfig(
            hidden_size=shape.v_hidden,
            intermediate_size=shape.v_mlp,
            num_hidden_layers=shape.v_layers,
            num_attention_heads=shape.v_heads,
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=shape.v_hidden,
        ),
        image_seq_length=IMAGE_EMBEDS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        **ids,
    )


def _text_config(shape: Shape, ids: dict[str, int]) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.t_hidden,
        "num_hidden_layers": shape.t_layers,
        "num_attention_heads": shape.t_heads,
        "num_key_value_heads": shape.t_kv_heads,
        "head_dim": shape.t_hidden // shape.t_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **ids,
    }
    if not shape.t_experts:
        return LlamaConfig(intermediate_size=shape.t_mlp, **sizes)
    return Qwen3MoeConfig(
        moe_intermediate_size=shape.t_mlp,
        num_experts=shape.t_experts,
        num_experts_per_tok=shape.t_used,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
        **sizes,
    )


def _mute_rows(tokenizer: Any) -> list[int]:
    """Tokens that must never be said: special ones, and bytes that are no text by themselves."""
    mute = set(tokenizer.all_special_ids)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if not (text.isascii() and text.isprintable() and text.strip()):
            mute.add(token)
    return sorted(mute)


def _draw_weights(model: torch.nn.Module, mute_rows: list[int]) -> None:
    """Sharp attention and small embeddings: otherwise a reply would be one word again and again,
    whatever the picture shows, and equal replies would prove nothing."""
    import torch

    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                if "norm" not in name:
                    weight.zero_()
            elif "embed" in name:
                weight.normal_(0.0, 0.3, generator=generator)
            else:
                gain = (
                    2.5
                    if "q_proj" in name or "k_proj" in name
                    else 2.0
                    if "o_proj" in name
                    else 1.5
                )
                ins = weight.shape[-1] if weight.dim() == 3 else weight[0].numel()  # 3: experts
                weight.normal_(0.0, gain / math.sqrt(ins), generator=generator)
        model.get_output_embeddings().weight[mute_rows] = 0.0  # logit 0 never wins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(SHAPES))
    print(checkpoint(parser.parse_args().name))


if __name__ == "__main__":
    main()
