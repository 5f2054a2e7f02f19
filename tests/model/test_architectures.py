"""Every supported architecture says what transformers' own forward says, token by token.

Chunked prefill under a small odd budget, staggered admission, preemption, prefix reuse and shared
encoder outputs, in fp32 on random weights; compared are greedy tokens and all their logits.
"""

from __future__ import annotations

import pytest

TEXT_NAMES = [
    "llama",
    "mistral_sliding",
    "gemma2_softcap",
    "gpt_oss_sinks",
    "cohere2",
    "qwen3_moe",
    "llama4_text",
    "deepseek_v3_mla",
    "mistral4",
    "gemma3n_text",
    "gemma4_text",
]
MEDIA_NAMES = [
    "llava",
    "llava_next",
    "llava_onevision",
    "vipllava",
    "aya_vision",
    "cohere2_vision",
    "got_ocr2",
    "llama4",
    "mistral3",
    "mistral3_latent",
    "lighton_ocr",
    "idefics3",
    "smolvlm",
    "internvl",
    "deepseek_ocr2",
    "granite_docling",
    "granite_docling_fine",
    "ovis2",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "glm4v_moe",
    "gemma3",
    "paligemma",
    "paligemma2",
    "voxtral",
    "audioflamingo3",
    "qwen2_audio",
    "glm46v",
    "glmga",
    "glm_ocr",
    "exaone4_5",
    "paddleocr_vl",
    "hyperclovax_vision_v2",
    "muse_glimmer",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "kimi_k25",
    "video_llama_3",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "janus",
    "aria",
    "qianfan_ocr",
    "pp_chart2table",
    "llava_next_video",
    "video_llava",
    "glmasr",
    "fun_asr_nano",
    "qwen3_asr",
    "moss_transcribe_diarize",
    "qwen2_5_omni_thinker",
    "qwen2_5_omni",
    "qwen3_omni_moe_thinker",
    "qwen3_omni_moe",
    "fast_vlm",
    "perception_lm",
    "hunyuan_vl",
    "hunyuan_vl_three_axes",
    "ernie4_5_vl_moe",
    "step3p7",
    "granite4_vision",
    "gemma3n",
    "gemma4",
    "gemma4_large",
    "gemma4_moe",
    "gemma4_unified",
]


@pytest.mark.parametrize("name", TEXT_NAMES + MEDIA_NAMES)
def test_equals_transformers(name: str, bench) -> None:
    check_architecture(bench(name))


@pytest.mark.parametrize(
    "name", [*TEXT_NAMES, "qwen3_vl", "gemma3", "paligemma2", "gemma4", "gemma4_large"]
)
def test_default_attention_equals_transformers(name: str, bench) -> None:
    """The same through the backend that a CPU engine gets when nobody names one."""
    check_architecture(bench(name, attention="auto"))


def check_architecture(one) -> None:
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()), preempt={5: "a", 8: "b"})
    for key, job in jobs.items():
        one.check(job, prompts[key])
    if one.is_exact:
        assert jobs["a"].outputs == one.generate(prompts["a"])
    distinct = {one.mm_hash for job in jobs.values() for one in job.mm_inputs}
    assert one.driver.num_encodes == len(distinct)

    # The same prompt again reads its prefix from the pool and needs no encoder.
    again = one.job("again", prompts["a"])
    one.driver.run([again])
    one.check(again, prompts["a"])
    if one.driver.rule != "prompt":
        assert again.num_cached > 0
    assert one.driver.num_encodes == len(distinct)
