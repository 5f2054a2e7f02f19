"""Tiny cases of models with Mamba-2 layers: between layers with attention, or beside it."""

from __future__ import annotations

import torch
import transformers as hf

from tests.support.models.tiny_checkpoints import (
    AUD_TOKEN,
    AUDIO,
    CASES,
    IMAGE,
    IMG_TOKEN,
    TEXT,
    VOCAB,
    Case,
    MediaItem,
    marked,
    noise,
    plain_item,
    text_case,
)

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


def patches_item(seed: int) -> MediaItem:
    """Four patches make an embedding."""
    height, width = [(4, 4), (4, 6), (2, 8)][seed % 3]
    fields = {
        "pixel_values": noise(seed, height * width, 48),
        "image_grid_hw": torch.tensor([[height, width]]),
    }
    return plain_item(height * width // 4, fields)


def mel_item(seed: int) -> MediaItem:
    """Eight frames make an embedding, those of the padding none."""
    valid = 30 + 8 * (seed % 3)
    features = noise(seed, 1, 64, 16)
    mask = (torch.arange(64) < valid)[None]
    features = features * mask[..., None]
    count = (valid + 8) // 8
    return plain_item(
        count, {"input_features": features, "input_features_mask": mask.long()}, AUD_TOKEN
    )


CASES["nemotron_h_omni"] = Case(
    lambda: hf.NemotronH_Omni_Reasoning_V3_Config(
        text_config={"model_type": "nemotron_h", **TEXT, **NEMOTRON},
        vision_config={
            "model_type": "radio",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "max_img_size": 32,
            "num_cls_tokens": 1,
            "num_registers": 2,
            "summary_idxs": [0],
            "video_temporal_patch_size": 2,
        },
        audio_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "conv_kernel_size": 3,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
            "projection_hidden_size": 24,
            "projection_bias": False,
        },
        vision_hidden_size=16,
        projector_hidden_size=24,
        image_token_id=IMG_TOKEN,
        audio_token_id=AUD_TOKEN,
    ),
    {IMAGE: patches_item, AUDIO: mel_item},
)

HEARING = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "subsampling_factor": 8,
}


def spectrum_item(seed: int) -> MediaItem:
    """As `mel_item`, but frames that fill a last group up; its token is past the vocabulary."""
    valid = 30 + 8 * (seed % 3)
    mask = (torch.arange(48) < valid)[None]
    fields = {
        "input_features": noise(seed, 1, 48, 16) * mask[..., None],
        "input_features_mask": mask.long(),
    }
    return marked(AUDIO, [VOCAB] * ((valid + 7) // 8), VOCAB, fields)


CASES["nemo_speechlm"] = Case(
    lambda: hf.Nemotron3_5TranscribeConfig(
        text_config={"model_type": "nemotron_h", **TEXT, **NEMOTRON},
        audio_config={
            "asr_config": HEARING,
            "diarization_config": {
                "model_type": "nemotron3_diarization",
                "audio_config": HEARING,
                "head_config": {"hidden_size": 8, "num_speakers": 4, "audio_hidden_size": 16},
                "streaming_config": {"num_speakers": 4},
                "chunk_length": 4,  # sounds of more than one chunk
                "chunk_left_context": 1,
                "chunk_right_context": 1,
            },
        },
        word_timestamp_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 12,
            "blank_token_id": 11,
        },
        audio_token_id=VOCAB,
    ),
    {AUDIO: spectrum_item},
)
