"""Text families that need nothing of their own: each equals transformers under chunks and reuse.

A wide net over what plain rules (probe, no masks, no cache) must carry: one configuration class
each, shrunk by whatever of the usual size fields it has.
"""

from __future__ import annotations

import pytest
import transformers

from foveal_runtime.plan.errors import StartupError

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = [
    "cohere",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "granite",
    "granitemoe",
    "minimax_m2",
    "mimo_v2_flash",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
]


_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0],
}  # fmt: skip
OTHERWISE = {
    "phi3": {"original_max_position_embeddings": 8, "rope_parameters": _LONGROPE},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1e3, "factor": 1.0, "rope_theta": 1e4},
        "head_dim": 8,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
}  # fmt: skip
"""Scaled rotary positions and windows, as checkpoints of these families have them."""


def small_config(kind: str, **more):
    default = transformers.AutoConfig.for_model(kind)
    known = {k: v for k, v in SIZES.items() if getattr(default, k, None) is not None}
    return transformers.AutoConfig.for_model(kind, **known | more)


@pytest.mark.parametrize("kind", [*FAMILIES, *(f"{kind}_otherwise" for kind in OTHERWISE)])
def test_equals_transformers(kind: str, bench, checkpoints) -> None:
    family = kind.removesuffix("_otherwise")
    more = OTHERWISE[family] if family != kind else {}
    checkpoints.CASES.setdefault(kind, checkpoints.Case(lambda: small_config(family, **more)))
    one = bench(kind)
    prompts = {"a": one.prompt(1, num_text=40), "b": one.prompt(2, num_text=9)}
    jobs = {name: one.job(name, prompt) for name, prompt in prompts.items()}
    one.driver.run(list(jobs.values()), preempt={4: "a"})
    for name, job in jobs.items():
        one.check(job, prompts[name])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("doge", "attention masks of their own"), ("opt", "not supported")],
)
def test_families_that_do_not_fit_are_refused(kind: str, reason: str, bench, checkpoints) -> None:
    """Doge makes dynamic masks; OPT's outer class reaches past its core."""
    checkpoints.CASES.setdefault(kind, checkpoints.Case(lambda: small_config(kind)))
    with pytest.raises(StartupError, match=reason):
        bench(kind)
