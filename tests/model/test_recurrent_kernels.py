"""The kernels of the gated delta rule and of Mamba-2 compute what transformers' modules compute."""

from __future__ import annotations

import pytest
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

from foveal_runtime.model.cpu.kernels import (
    UNSUPPORTED,
    DeltaJob,
    MambaJob,
    RecurrentKernels,
    load_recurrent_kernels,
)
from foveal_runtime.model.layers import mamba
from foveal_runtime.model.layers.delta_rule import DeltaRule
from foveal_runtime.model.layers.layer_parts import Unlike
from foveal_runtime.model.layers.mamba import MambaRule
from foveal_runtime.model.layers.state import StateForward, make_rule
from tests.support.models.compiled import paths_of

pytestmark = pytest.mark.skipif(
    isinstance(load_recurrent_kernels(), str), reason=str(load_recurrent_kernels())
)
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
# Key heads, value heads, key dimension, value dimension, taps of the convolution; of mixers groups,
# heads, dimensions of a state and of a head.
SHAPES = [(2, 4, 16, 16, 4), (1, 3, 32, 48, 4), (2, 2, 64, 80, 2), (1, 2, 128, 128, 4)]
LENGTHS = [1, 70, 1, 5, 2]
SLOTS = 7
# Sums of other orders; in bfloat16 a last bit of what a norm then makes large.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        torch.manual_seed(3)
        yield


@pytest.fixture
def threads_left():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def all_kernels() -> list[RecurrentKernels]:
    return [RecurrentKernels(path) for path in paths_of("recurrent")]


def delta_net(kind, shape):
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{n}": size for n, size in zip(names, shape, strict=False)}
    config_class, module_class = DELTA_NETS[kind]
    config = config_class(hidden_size=WIDTH, linear_conv_kernel_dim=shape[4], **sizes)
    return module_class(config, 0)


def mixer(kind, shape):
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


def layer(kind="qwen3_5", shape=SHAPES[0], dtype=torch.float32):
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


def rule_of(module, kernels):
    return (DeltaRule if hasattr(module, "num_v_heads") else MambaRule)(module, kernels)


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


def segments_of(lengths, slots) -> torch.Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor(list(zip(starts, lengths, slots, strict=True)))


def largest_apart(got, wanted) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*DELTA_NETS, *MIXERS])
def test_equals_the_module(kind, shape, dtype):
    module = layer(kind, shape, dtype)
    rows = torch.randn(1, sum(LENGTHS), module.out_proj.out_features).to(dtype)
    before = some_states(module)
    slots = [4, 0, 6, 3, 1]
    wanted = copied(before)
    parts = [
        plain(module).compute(one, wanted, [slot])
        for one, slot in zip(rows.split(LENGTHS, dim=1), slots, strict=True)
    ]
    wanted["out"] = torch.cat(parts, dim=1)
    for kernels in all_kernels():
        got = copied(before)
        got["out"] = rule_of(module, kernels)(rows, got, segments_of(LENGTHS, slots))
        assert got["out"].dtype == dtype
        for name, one in wanted.items():
            assert largest_apart(got[name], one) <= TOLERANCES[dtype], name
        for other in set(range(SLOTS)) - set(slots):
            assert all(torch.equal(got[name][other], before[name][other]) for name in before)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
@pytest.mark.parametrize("kind", ["qwen3_5", *MIXERS])
def test_chunks_batches_and_threads_leave_every_bit(kind, shape, dtype, threads_left):
    """What transformers' own chunks do not give: where they end moves its logits by 4e-5."""
    for kernels in all_kernels():
        module = layer(kind, shape, dtype)
        rule = rule_of(module, kernels)
        projected = rule.project(torch.randn(1, 90, module.out_proj.out_features).to(dtype))
        before = some_states(module)

        def mixed(states, lengths, slots, first=0, rule=rule, projected=projected):
            high = first + sum(lengths)
            parts = [one[:, first:high].clone() for one in projected]
            return rule.mix(*parts, states, segments_of(lengths, slots))

        whole = copied(before)
        wanted = mixed(whole, [90], [2])
        for lengths in ([1] * 90, [64, 26], [17, 1, 1, 71]):
            cut = copied(before)
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            outs = [
                mixed(cut, [count], [2], first)
                for count, first in zip(lengths, starts, strict=True)
            ]
            assert torch.equal(torch.cat(outs, dim=1), wanted)
            assert all(torch.equal(cut[name], whole[name]) for name in whole)
        for threads in (1, 4):
            torch.set_num_threads(threads)
            alone, beside = copied(before), copied(before)
            assert torch.equal(mixed(alone, [30], [2]), wanted[:, :30])
            assert torch.equal(mixed(beside, [30, 60], [2, 5])[:, :30], wanted[:, :30])
            assert all(torch.equal(alone[name][2], beside[name][2]) for name in before)


@pytest.mark.parametrize("kind", ["qwen3_5", "granite"])
def test_a_large_step_forgets_and_none_keeps(kind):
    """Decays of exactly 0 and 1 are nothing special: no NaN comes of them."""
    module = layer(kind)
    (kernels, *_) = all_kernels()
    rows = torch.randn(1, 3, module.out_proj.out_features)
    for bias in (1e4, -1e4):
        module.dt_bias.fill_(bias)
        wanted = some_states(module)
        got = copied(wanted)
        out = rule_of(module, kernels)(rows, got, segments_of([3], [1]))
        assert largest_apart(out, plain(module).compute(rows, wanted, [1])) <= 2e-5
        assert largest_apart(got["recurrent"], wanted["recurrent"]) <= 2e-5


class Undecayed:
    """Looks alike, and is not."""

    def forward(self, hidden_states, **kwargs):
        self.A_log.data.fill_(-30)
        return super().forward(hidden_states, **kwargs)


class Halved:
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) / 2


def tried(module):
    (kernels, *_) = all_kernels()
    kind = type(rule_of(module, kernels))
    return make_rule(kind, module, kernels, plain(module), some_states(module))


@pytest.mark.parametrize("kind", ["qwen3_5", "bamba"])
def test_what_computes_another_thing_is_left_alone(kind):
    assert tried(layer(kind))
    for other in (Undecayed, Halved):
        module = layer(kind)
        module.__class__ = type("Other", (other, type(module)), {})
        with pytest.raises(Unlike, match="differs by"):
            tried(module)
    module = layer(kind)
    module.activation = "gelu"
    with pytest.raises(Unlike, match="convolution"):
        tried(module)
    with pytest.raises(Unlike, match="float16"):
        tried(layer(kind, dtype=torch.float16))
    with pytest.raises(Unlike, match="no kernel"):
        tried(layer(kind, (1, 2, 16, 18, 4)))


def test_sizes_that_the_kernels_do_not_take_change_nothing():
    delta = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 16, "taps": 4}
    mamba_2 = {"num_groups": 2, "num_heads": 4, "state_dim": 16, "head_dim": 16, "taps": 4,
               "norm_size": 32}  # fmt: skip
    for kernels in all_kernels():
        for sizes in ({"key_dim": 18}, {"key_dim": 512}, {"taps": 9}, {"num_value_heads": 3}):
            job = DeltaJob(**{**delta, "num_threads": 1, **sizes})
            assert kernels.delta_rule(job) == UNSUPPORTED
        for sizes in ({"state_dim": 18}, {"state_dim": 512}, {"taps": 9}, {"num_heads": 3},
                      {"norm_size": 24}, {"norm_size": 48}):  # fmt: skip
            job = MambaJob(**{**mamba_2, "num_threads": 1, **sizes})
            assert kernels.mamba(job) == UNSUPPORTED


def test_no_fitting_object(tmp_path):
    assert "no recurrent_" in str(load_recurrent_kernels(tmp_path))
