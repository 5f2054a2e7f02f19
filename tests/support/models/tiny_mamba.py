"""Tiny cases of decoders with Mamba-2 layers: between layers with attention, or beside it."""

from __future__ import annotations

from tests.support.models.tiny_checkpoints import CASES, text_case

MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
SIZES = {  # as most families name them
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "time_step_min": 0.5,  # as many steps are below it as above
}
CASES["nemotron_h"] = text_case("NemotronHConfig", **NEMOTRON)
GRANITE = {
    **SIZES,
    "layer_types": MIXED,
    "shared_intermediate_size": 24,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
CASES["granitemoehybrid"] = text_case("GraniteMoeHybridConfig", num_local_experts=4, **GRANITE)
CASES["granitemoehybrid_dense"] = text_case(
    "GraniteMoeHybridConfig", num_local_experts=0, position_embedding_type="rope", **GRANITE
)
CASES["falcon_h1"] = text_case(
    "FalconH1Config",
    **SIZES,
    mamba_d_ssm=64,
    mamba_rms_norm=True,
    embedding_multiplier=3.0,
    lm_head_multiplier=0.7,
    key_multiplier=0.6,
    attention_out_multiplier=0.8,
    ssm_in_multiplier=1.2,
    ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
)
CASES["falcon_h1_gated"] = text_case("FalconH1Config", **SIZES, mamba_d_ssm=64)
CASES["bamba"] = text_case("BambaConfig", **SIZES, attn_layer_indices=[2])
