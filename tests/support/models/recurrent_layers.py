"""Layers with a recurrence and random weights, as transformers makes them, and states for them."""

from __future__ import annotations

import torch
import transformers as hf
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from foveal_runtime.model.layers import delta_rule, mamba
from foveal_runtime.model.layers.state import StateForward

SLOTS = 7
# Sums of other orders; in bfloat16 a last bit of what a norm then makes large.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
WIDTH = 64
DELTA_NETS = {
    "qwen3_5": (hf.Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
    "qwen3_next": (hf.Qwen3NextConfig, Qwen3NextGatedDeltaNet),
}
MIXERS = {
    "nemotron_h": (hf.NemotronHConfig, NemotronHMamba2Mixer, {"time_step_min": 0.5}),
    "granite": (hf.GraniteMoeHybridConfig, GraniteMoeHybridMambaLayer, {"mamba_conv_bias": False}),
    "bamba": (hf.BambaConfig, BambaMixer, {}),
    "falcon_h1": (hf.FalconH1Config, FalconH1Mixer,
                  {"mamba_rms_norm": True, "ssm_in_multiplier": 1.2,
                   "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]}),
    "falcon_h1_gated": (hf.FalconH1Config, FalconH1Mixer, {}),
    "falcon_h1_gated_last": (hf.FalconH1Config, FalconH1Mixer,
                             {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
}  # fmt: skip


def delta_net(kind, shape):
    """Of key heads, value heads, key dimension, value dimension, taps of the convolution."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{n}": size for n, size in zip(names, shape, strict=False)}
    config_class, module_class = DELTA_NETS[kind]
    config = config_class(hidden_size=WIDTH, linear_conv_kernel_dim=shape[4], **sizes)
    return module_class(config, 0)


def mixer(kind, shape):
    """Of groups, heads, dimensions of a state and of a head, taps of the convolution."""
    config_class, module_class, others = MIXERS[kind]
    groups, heads, state_dim, head_dim, taps = shape
    names = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
    if kind == "nemotron_h":
        names = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
    sizes = dict(zip(names, (groups, heads, state_dim, head_dim, taps), strict=True))
    if "falcon" in kind:
        sizes["mamba_d_ssm"] = heads * head_dim
    elif kind != "nemotron_h":
        sizes |= {"hidden_size": heads * head_dim, "mamba_expand": 1}
    config = config_class(**{"hidden_size": WIDTH, **sizes, **others})
    module = module_class(config, 0)
    if "falcon" in kind:
        module.register_buffer("mup_vector", compute_mup_vector(config))
    return module


def layer(kind="qwen3_5", shape=(2, 4, 16, 16, 4), dtype=torch.float32):
    module = (delta_net if kind in DELTA_NETS else mixer)(kind, shape)
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight[0].numel() ** -0.5)
        elif name in ("dt_bias", "norm.weight", "D", "conv1d.bias"):
            weight.normal_(0.5, 0.5)
    module = module.to(dtype).eval()
    if kind in MIXERS:
        mamba.settle(module)
    return module


def project(module, rows):
    return (delta_rule if hasattr(module, "num_v_heads") else mamba).project(module, rows)


def some_states(module) -> dict[str, torch.Tensor]:
    dtype = module.conv1d.weight.dtype
    if hasattr(module, "num_v_heads"):
        sizes = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
    else:
        sizes = (module.num_heads, module.head_dim, module.ssm_state_size)
    return {
        "conv": torch.randn(SLOTS, module.conv_dim, module.conv_kernel_size).to(dtype),
        "recurrent": torch.randn(SLOTS, *sizes) / 4,
    }


def plain(module):
    return StateForward(module, "cache_params")


def copied(states):
    return {name: one.clone() for name, one in states.items()}


def largest_apart(got, wanted) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
