"""Text families that need nothing of their own: each equals transformers under chunks and reuse.

A wide net over what plain rules (probe, no masks, no cache) must carry: one configuration class
each, shrunk by whatever of the usual size fields it has.
"""

from __future__ import annotations

import pytest
import transformers

from foveal_runtime.plan.errors import StartupError

pytestmark = pytest.mark.model

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


def small_config(kind: str):
    default = transformers.AutoConfig.for_model(kind)
    known = {k: v for k, v in SIZES.items() if getattr(default, k, None) is not None}
    return transformers.AutoConfig.for_model(kind, **known)


@pytest.mark.parametrize("kind", FAMILIES)
def test_equals_transformers(kind: str, bench, checkpoints) -> None:
    checkpoints.CASES.setdefault(kind, checkpoints.Case(lambda: small_config(kind)))
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
