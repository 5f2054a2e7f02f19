"""Small decoders that one call of the C kernel computes, and some that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.checkpoint.probe import probe_layers, probe_states
from foveal_runtime.model.cpu.packing import can_pack
from foveal_runtime.model.layers.decoder_layers import DecoderLayers
from foveal_runtime.model.layers.state import States
from foveal_runtime.model.layers.trial import Trial

PACKS_BF16 = pytest.mark.skipif(
    not can_pack(torch.bfloat16), reason="torch packs no bfloat16 weights on this CPU"
)
DTYPES = ["float32", pytest.param("bfloat16", marks=PACKS_BF16)]
SIZES = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 136, "num_hidden_layers": 3,
    "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {
    "num_experts": 18, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}  # fmt: skip
TAKEN = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": False,  # logits of others' size
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_moe": ROUTED,
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 112},
    "qwen2_moe": {
        **ROUTED,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
        "hidden_size": 128,
        "num_attention_heads": 8,
    },
}
MINISTRAL = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
NOT_TAKEN = {
    "ernie4_5": ({}, "layer 0 differs"),  # turns neighbours
    "granite": ({"residual_multiplier": 0.5}, "layer 0 differs"),
    "smollm3": ({"no_rope_layer_interval": 2}, "layer 1 differs"),
    "ministral3": (MINISTRAL, "layer 0 differs"),  # scales queries from position 64 on
    "cohere": ({}, "made of other parts"),
    "olmo2": ({}, "made of other parts"),
    "phi3": ({}, "made of other parts"),
    "granitemoe": ({}, "made of other parts"),
}


def config_of(kind: str, **more):
    known = {k: v for k, v in SIZES.items() if k != "head_dim" or not kind.startswith("qwen2")}
    return transformers.AutoConfig.for_model(kind, **known | more)


def decoder_case(checkpoints: Any, kind: str) -> str:
    """The name of a case of that kind whose heads the kernels know."""
    more = NOT_TAKEN[kind][0] if kind in NOT_TAKEN else TAKEN.get(kind, {})
    checkpoints.CASES.setdefault(f"{kind}_16", checkpoints.Case(lambda: config_of(kind, **more)))
    return f"{kind}_16"


def made_of(path: Path, dtype: str = "float32", quantization: str = "auto"):
    """(model, geometry of its layers)."""
    loaded = load_model(str(path), dtype, quantization=quantization)
    return loaded, probe_layers(loaded, Head(loaded.model, loaded.core_name))


def states_of(loaded) -> States:
    return States(loaded, probe_states(loaded, Head(loaded.model, loaded.core_name)))


def reset(states: list, before: list) -> None:
    for one, old in zip(states, before, strict=True):
        one.copy_(old)


def compare_layer(made: DecoderLayers, trial: Trial, number: int, states: list) -> None:
    """What it adds, and what it leaves in the KV pool or in its state."""
    slots, layer = trial.context.slots, made._geometry.get(number)
    pools = [] if layer is None else [trial.pool.keys[layer.index], trial.pool.values[layer.index]]
    before = [one.clone() for one in states]
    routed = made._parts[number].routed
    with trial.clear_choices(routed and routed.router) as clear:
        wanted = trial.added_by(number)
    written = [pool[slots].clone() for pool in pools]
    after = [one.clone() for one in states]
    for pool in pools:
        pool[slots] = 7
    reset(states, before)
    got = trial.rows.clone()
    made.run_layers(got, trial.positions, trial.context, range(number, number + 1))
    trial.check_same("added", (got.double() - trial.rows.double())[clear], wanted[clear])
    for one, other in zip([pool[slots] for pool in pools] + states, written + after, strict=True):
        trial.check_same("kept", one, other)
