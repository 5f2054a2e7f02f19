"""Real processors of many families with tiny settings and a small tokenizer, saved to a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.image_processing_utils import BaseImageProcessor  # noqa: F401  (import order)

WORDS = [
    "<unk>", "<s>", "</s>", "<pad>", "\n", "\n\n", "\n\n\n", "\n\n\n\n", "item", "0", "1", "is",
    "here", ".", "What", "it", "?", "what", "two", "<", ">", "seconds", "0.2", "1.2", "0.0", "0.5",
    "00", "01", "02", "03", ":",
]  # fmt: skip
SPECIALS = [
    "<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
    "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<boi>", "<eoi>", "<img>", "</img>", "<IMG_CONTEXT>",
    "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<sound>", "<|audio|>", "<boa>", "<eoa>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
    "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    "<so_embedding>", "<so_start>", "<so_end>", "<slice>", "</slice>", "<image_id>", "</image_id>",
    "<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>",
    "<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>",
    "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>",
    *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 11) for j in range(1, 11)),
]  # fmt: skip


def tokenizer(words: list[str] = WORDS, **extra: str) -> Any:
    """Word-level; newline runs are one token each, as in the tokenizers of Gemma and Qwen."""
    vocab = {word: index for index, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    pattern = Regex(r"\n+|[A-Za-z]+|[0-9.]+|[^\s]")
    core.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<pad>", extra_special_tokens=extra,
    )  # fmt: skip
    made.add_tokens([hf.AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return made


CLIP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
QWEN = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
QWEN_SIZE = {"size": {"shortest_edge": 256, "longest_edge": 4096}}
PIN = [[32, 64], [64, 32], [64, 64]]


def qwen_parts(image: str, video: str) -> dict[str, Any]:
    return {
        "image_processor": getattr(hf, image)(**QWEN, **QWEN_SIZE),
        "video_processor": getattr(hf, video)(**QWEN, **QWEN_SIZE),
        "tokenizer": tokenizer(),
    }


def llava() -> Any:
    return hf.LlavaProcessor(
        hf.CLIPImageProcessor(**CLIP), tokenizer(), patch_size=8,
        vision_feature_select_strategy="full",
    )  # fmt: skip


def llava_next() -> Any:
    image = hf.LlavaNextImageProcessor(**CLIP, image_grid_pinpoints=PIN)
    return hf.LlavaNextProcessor(
        image, tokenizer(), patch_size=8, vision_feature_select_strategy="full"
    )


def llava_onevision() -> Any:
    size = {"height": 32, "width": 32}
    return hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PIN), tokenizer(),
        hf.LlavaOnevisionVideoProcessor(size=size), num_image_tokens=16,
        vision_feature_select_strategy="full",
    )  # fmt: skip


def mistral3() -> Any:
    image = hf.PixtralImageProcessor(size={"longest_edge": 64}, patch_size=8)
    return hf.PixtralProcessor(image, tokenizer(), patch_size=8, spatial_merge_size=2)


def qwen2_vl() -> Any:
    return hf.Qwen2VLProcessor(**qwen_parts("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"))


def qwen2_5_vl() -> Any:
    return hf.Qwen2_5_VLProcessor(**qwen_parts("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"))


def qwen3_vl() -> Any:
    return hf.Qwen3VLProcessor(**qwen_parts("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"))


def glm4v() -> Any:
    return hf.Glm4vProcessor(**qwen_parts("Glm4vImageProcessor", "Glm4vVideoProcessor"))


def idefics3() -> Any:
    image = hf.Idefics3ImageProcessor(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return hf.Idefics3Processor(image, tokenizer(), image_seq_len=4)


def smolvlm() -> Any:
    size = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    return hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**size), tokenizer(), hf.SmolVLMVideoProcessor(), image_seq_len=4
    )


def internvl() -> Any:
    tok = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    image = hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4)
    return hf.InternVLProcessor(
        image, tok, hf.InternVLVideoProcessor(size=size), image_seq_length=4
    )


def gemma3() -> Any:
    tok = tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<image>")
    image = hf.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return hf.Gemma3Processor(image, tok, image_seq_length=4)


def paligemma() -> Any:
    image = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    image.image_seq_length = 16
    return hf.PaliGemmaProcessor(image, tokenizer())


def qwen2_audio() -> Any:
    return hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(feature_size=8), tokenizer())


def audioflamingo3() -> Any:
    return hf.AudioFlamingo3Processor(hf.WhisperFeatureExtractor(feature_size=8), tokenizer())


def voxtral() -> Any:
    """Its audio token is number 24 by definition; a tokenizer.json stands in for Mistral's own."""
    words = [*WORDS[:24], "[AUDIO]", *WORDS[24:]]
    tok = tokenizer(words)
    tok.add_tokens([hf.AddedToken("[AUDIO]", special=True, normalized=False)])
    return hf.VoxtralProcessor(hf.WhisperFeatureExtractor(feature_size=8), tok)


def glm46v() -> Any:
    return hf.Glm46VProcessor(**qwen_parts("Glm46VImageProcessor", "Glm46VVideoProcessor"))


def exaone4_5() -> Any:
    return hf.Exaone4_5_Processor(**qwen_parts("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"))


def paddleocr_vl() -> Any:
    image = hf.PaddleOCRVLImageProcessor(patch_size=4, merge_size=2, **QWEN_SIZE)
    return hf.PaddleOCRVLProcessor(image, tokenizer(image_token="<image>"))


def deepseek_vl() -> Any:
    image = hf.DeepseekVLImageProcessor(size={"height": 32, "width": 32})
    return hf.DeepseekVLProcessor(image, tokenizer(image_token="<image>"), num_image_tokens=16)


def janus() -> Any:
    image = hf.JanusImageProcessor(size={"height": 32, "width": 32})
    tok = tokenizer(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    return hf.JanusProcessor(image, tok, num_image_tokens=16)


def video_llava() -> Any:
    return hf.VideoLlavaProcessor(
        hf.VideoLlavaImageProcessor(**CLIP), hf.VideoLlavaVideoProcessor(**CLIP), tokenizer(),
        patch_size=8, vision_feature_select_strategy="full",
    )  # fmt: skip


def llava_next_video() -> Any:
    return hf.LlavaNextVideoProcessor(
        hf.LlavaNextVideoVideoProcessor(**CLIP),
        hf.LlavaNextImageProcessor(**CLIP, image_grid_pinpoints=PIN), tokenizer(), patch_size=8,
        vision_feature_select_strategy="full",
    )  # fmt: skip


def lfm3_vl() -> Any:
    return hf.Lfm3VlProcessor(**qwen_parts("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"))


def cohere_compass() -> Any:
    return hf.CohereCompassProcessor(
        **qwen_parts("CohereCompassImageProcessor", "CohereCompassVideoProcessor")
    )


def deepseek_ocr2() -> Any:
    image = hf.DeepseekOcr2ImageProcessor(size={"height": 128, "width": 128}, tile_size=64)
    return hf.DeepseekOcr2Processor(image, tokenizer())


def granite_docling() -> Any:
    image = hf.GraniteDoclingImageProcessor(size={"height": 32, "width": 32}, max_patches=6)
    return hf.GraniteDoclingProcessor(image, tokenizer(), image_seq_len=4)


def ovis2() -> Any:
    image = hf.Ovis2ImageProcessor(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
    )
    return hf.Ovis2Processor(image, tokenizer(), image_seq_length=4)


def minicpm_parts(image: str, video: str) -> dict[str, Any]:
    size = {"patch_size": 4, "scale_resolution": 32}
    return {
        "image_processor": getattr(hf, image)(**size),
        "video_processor": getattr(hf, video)(**size, max_num_frames=4),
        "tokenizer": tokenizer(
            image_token="<|image_pad|>", image_start_token="<image>", image_end_token="</image>",
            video_token="<|video_pad|>", slice_start_token="<slice>", slice_end_token="</slice>",
            image_id_start_token="<image_id>", image_id_end_token="</image_id>",
        ),
    }  # fmt: skip


def minicpmv4_6() -> Any:
    parts = minicpm_parts("MiniCPMV4_6ImageProcessor", "MiniCPMV4_6VideoProcessor")
    return hf.MiniCPMV4_6Processor(**parts)


def minicpmv4_7() -> Any:
    parts = minicpm_parts("MiniCPMV4_6ImageProcessor", "MiniCPMV4_6VideoProcessor")
    return hf.MiniCPMV4_7Processor(**parts)


def minicpm_ocr() -> Any:
    parts = minicpm_parts("MiniCPMOcrImageProcessor", "MiniCPMOcrVideoProcessor")
    return hf.MiniCPMOcrProcessor(**parts)


def fast_vlm() -> Any:
    """Apple's checkpoints name LLaVA's."""
    size = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    return hf.LlavaProcessor(
        hf.CLIPImageProcessor(**size), tokenizer(), patch_size=32,
        vision_feature_select_strategy="full",
    )  # fmt: skip


def perception_lm() -> Any:
    return hf.PerceptionLMProcessor(
        hf.PerceptionLMVideoProcessor(size={"height": 32, "width": 32}),
        hf.PerceptionLMImageProcessor(tile_size=32, max_num_tiles=4),
        tokenizer(image_token="<image>", video_token="<video>"), patch_size=8, pooling_ratio=2,
    )  # fmt: skip


def hunyuan_vl() -> Any:
    image = hf.HunYuanVLImageProcessor(patch_size=4, size={"shortest_edge": 256,
                                                           "longest_edge": 4096})  # fmt: skip
    tok = tokenizer(image_token="<image>", image_start_token="<boi>", image_end_token="<eoi>")
    return hf.HunYuanVLProcessor(image, tok)


def ernie4_5_vl_moe() -> Any:
    tok = tokenizer(
        image_token="<|IMAGE_PAD|>", image_start_token="<boi>", image_end_token="<eoi>",
        video_token="<|VIDEO_PAD|>", video_start_token="<boa>", video_end_token="<eoa>",
    )  # fmt: skip
    size = {"patch_size": 4, "merge_size": 2, **QWEN_SIZE}
    image = hf.Ernie4_5_VLMoeImageProcessor(**size)
    video = hf.Ernie4_5_VLMoeVideoProcessor(**size, draw_on_frames=False)
    return hf.Ernie4_5_VLMoeProcessor(image, tok, video)


def granite4_vision() -> Any:
    image = hf.LlavaNextImageProcessor(**CLIP, image_grid_pinpoints=PIN)
    return hf.Granite4VisionProcessor(
        image, tokenizer(), patch_size=4, vision_feature_select_strategy="full",
        downsample_rate="2/4",
    )  # fmt: skip


def moss_transcribe_diarize() -> Any:
    extractor = hf.MossTranscribeDiarizeFeatureExtractor(feature_size=8)
    return hf.MossTranscribeDiarizeProcessor(extractor, tokenizer(), audio_token="<|AUDIO|>")


def step3p7() -> Any:
    size = {"size": {"height": 48, "width": 48}, "patch_size": 32, "vision_patch_size": 4}
    image = hf.Step3p7ImageProcessor(**size, max_image_size=192)
    return hf.Step3p7Processor(image, tokenizer())


def omni_parts() -> dict[str, Any]:
    parts = qwen_parts("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")
    parts["tokenizer"] = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", audio_token="<|AUDIO|>",
        vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>",
        audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
    )  # fmt: skip
    return {**parts, "feature_extractor": hf.WhisperFeatureExtractor(feature_size=8)}


def qwen2_5_omni() -> Any:
    return hf.Qwen2_5OmniProcessor(**omni_parts())


def qwen3_omni_moe() -> Any:
    return hf.Qwen3OmniMoeProcessor(**omni_parts())


def lfm2_vl() -> Any:
    return hf.Lfm2VlProcessor(hf.Lfm2VlImageProcessor(), tokenizer())


def gemma_tokenizer() -> Any:
    return tokenizer(
        image_token="<image>", boi_token="<boi>", eoi_token="<eoi>",
        audio_token="<|audio|>", boa_token="<boa>", eoa_token="<eoa>",
    )  # fmt: skip


def gemma3n() -> Any:
    image = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    sound = hf.Gemma3nAudioFeatureExtractor(feature_size=8)
    return hf.Gemma3nProcessor(
        sound, image, gemma_tokenizer(), audio_seq_length=188, image_seq_length=4
    )


def gemma4_parts(family: str) -> dict[str, Any]:
    size = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    return {
        "image_processor": getattr(hf, f"{family}ImageProcessor")(**size),
        "video_processor": getattr(hf, f"{family}VideoProcessor")(**size, num_frames=4),
        "tokenizer": gemma_tokenizer(),
    }


def gemma4() -> Any:
    sound = hf.Gemma4AudioFeatureExtractor(feature_size=8)
    return hf.Gemma4Processor(feature_extractor=sound, **gemma4_parts("Gemma4"))


def gemma4_unified() -> Any:
    sound = hf.Gemma4UnifiedAudioFeatureExtractor()
    return hf.Gemma4UnifiedProcessor(feature_extractor=sound, **gemma4_parts("Gemma4Unified"))


def nemotron_h_omni() -> Any:
    size = {"patch_size": 4, "min_num_patches": 16, "max_num_patches": 256}
    return hf.NemotronH_Omni_Reasoning_V3Processor(
        image_processor=hf.NemotronH_Omni_Reasoning_V3ImageProcessor(**size),
        video_processor=hf.NemotronH_Omni_Reasoning_V3VideoProcessor(
            patch_size=4, video_target_num_patches=16, norm_mean=[0.5] * 3, norm_std=[0.5] * 3
        ),
        tokenizer=tokenizer(),
        feature_extractor=hf.ParakeetFeatureExtractor(feature_size=8),
    )


def nemo_speechlm() -> Any:
    sound = hf.NemotronAsrStreamingFeatureExtractor(feature_size=8)
    return hf.Nemotron3_5TranscribeProcessor(sound, tokenizer(), tokenizer())


MAKERS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        llava, llava_next, llava_onevision, mistral3, qwen2_vl, qwen2_5_vl, qwen3_vl, glm4v,
        idefics3, smolvlm, internvl, gemma3, paligemma, qwen2_audio, audioflamingo3, voxtral,
        glm46v, exaone4_5, paddleocr_vl, deepseek_vl, janus, video_llava,
        llava_next_video, lfm2_vl, lfm3_vl, cohere_compass, deepseek_ocr2,
        granite_docling, ovis2, minicpmv4_6, minicpmv4_7, minicpm_ocr, gemma3n, gemma4,
        gemma4_unified, fast_vlm, perception_lm, hunyuan_vl, ernie4_5_vl_moe, step3p7,
        granite4_vision, moss_transcribe_diarize, nemotron_h_omni, nemo_speechlm, qwen2_5_omni,
        qwen3_omni_moe,
    )
}  # fmt: skip


def save(name: str, folder: Path) -> Path:
    """A model directory without weights."""
    path = folder / name
    MAKERS[name]().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": name}))
    return path
