"""The kernel of the gated delta rule computes what transformers' modules compute, at any size."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from foveal_runtime.model.cpu.kernels import UNSUPPORTED, DeltaJob, DeltaKernel, load_delta_kernel
from foveal_runtime.model.layers.delta_rule import DeltaRule, make_delta_rule
from foveal_runtime.model.layers.layer_parts import Unlike
from foveal_runtime.model.layers.state import StateForward
from tests.support.models.compiled import paths_of

pytestmark = pytest.mark.skipif(
    isinstance(load_delta_kernel(), str), reason=str(load_delta_kernel())
)
KINDS = {
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
}
# Key heads, value heads, key dimension, value dimension, taps of the convolution.
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


def all_kernels() -> list[DeltaKernel]:
    return [DeltaKernel(path) for path in paths_of("delta_rule")]


def delta_net(kind="qwen3_5", shape=SHAPES[0], dtype=torch.float32):
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{n}": size for n, size in zip(names, shape, strict=False)}
    config_class, module_class = KINDS[kind]
    config = config_class(hidden_size=48, linear_conv_kernel_dim=shape[4], **sizes)
    module = module_class(config, 0)
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight[0].numel() ** -0.5)
        elif name in ("dt_bias", "norm.weight"):
            weight.normal_(0.5, 0.5)
    return module.to(dtype).eval()


def some_states(module) -> dict[str, torch.Tensor]:
    dtype = module.conv1d.weight.dtype
    sizes = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
    return {
        "conv": torch.randn(SLOTS, module.conv_dim, module.conv_kernel_size).to(dtype),
        "recurrent": torch.randn(SLOTS, *sizes) / 4,
    }


def plain(module):
    return StateForward(module, "cache_params").compute


def copied(states):
    return {name: one.clone() for name, one in states.items()}


def segments_of(lengths, slots) -> torch.Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor(list(zip(starts, lengths, slots, strict=True)))


def largest_apart(got, wanted) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_module(kind, shape, dtype):
    module = delta_net(kind, shape, dtype)
    rows = torch.randn(1, sum(LENGTHS), 48).to(dtype)
    before = some_states(module)
    slots = [4, 0, 6, 3, 1]
    wanted = copied(before)
    parts = [
        plain(module)(one, wanted, [slot])
        for one, slot in zip(rows.split(LENGTHS, dim=1), slots, strict=True)
    ]
    wanted["out"] = torch.cat(parts, dim=1)
    for kernel in all_kernels():
        got = copied(before)
        got["out"] = DeltaRule(module, kernel)(rows, got, segments_of(LENGTHS, slots))
        assert got["out"].dtype == dtype
        for name, one in wanted.items():
            assert largest_apart(got[name], one) <= TOLERANCES[dtype], name
        for other in set(range(SLOTS)) - set(slots):
            assert all(torch.equal(got[name][other], before[name][other]) for name in before)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_chunks_batches_and_threads_leave_every_bit(shape, dtype, threads_left):
    """What transformers' own chunks do not give: where they end moves its logits by 4e-5."""
    for kernel in all_kernels():
        module = delta_net("qwen3_5", shape, dtype)
        rule = DeltaRule(module, kernel)
        projected = rule.project(torch.randn(1, 90, 48).to(dtype))
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


def test_a_large_step_forgets_and_none_keeps():
    """Decays of exactly 0 and 1 are nothing special: no NaN comes of them."""
    module = delta_net()
    (kernel, *_) = all_kernels()
    rows = torch.randn(1, 3, 48)
    for bias in (1e4, -1e4):
        module.dt_bias.fill_(bias)
        wanted = some_states(module)
        got = copied(wanted)
        out = DeltaRule(module, kernel)(rows, got, segments_of([3], [1]))
        assert largest_apart(out, plain(module)(rows, wanted, [1])) <= 2e-5
        assert largest_apart(got["recurrent"], wanted["recurrent"]) <= 2e-5


class Undecayed(Qwen3_5GatedDeltaNet):
    """Looks alike, and is not."""

    def forward(self, hidden_states, **kwargs):
        self.A_log.data.fill_(-30)
        return super().forward(hidden_states, **kwargs)


class Halved(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) / 2


def test_what_computes_another_thing_is_left_alone():
    (kernel, *_) = all_kernels()
    module = delta_net()
    assert make_delta_rule(module, kernel, plain(module), some_states(module))
    for kind in (Undecayed, Halved):
        module = delta_net()
        module.__class__ = kind
        with pytest.raises(Unlike, match="differs by"):
            make_delta_rule(module, kernel, plain(module), some_states(module))
    module = delta_net()
    module.activation = "gelu"
    with pytest.raises(Unlike, match="convolution"):
        make_delta_rule(module, kernel, plain(module), some_states(module))
    half = delta_net(dtype=torch.float16)
    with pytest.raises(Unlike, match="float16"):
        make_delta_rule(half, kernel, plain(half), some_states(half))
    odd = delta_net(shape=(1, 2, 16, 18, 4))
    with pytest.raises(Unlike, match="no kernel"):
        make_delta_rule(odd, kernel, plain(odd), some_states(odd))


def test_sizes_that_the_kernel_does_not_take_change_nothing():
    for kernel in all_kernels():
        for sizes in ({"key_dim": 18}, {"key_dim": 512}, {"taps": 9}, {"num_value_heads": 3}):
            shape = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 16}
            job = DeltaJob(**{**shape, "taps": 4, "num_threads": 1, **sizes})
            assert kernel.run(job) == UNSUPPORTED


def test_no_fitting_object(tmp_path):
    assert "no delta_rule_" in str(load_delta_kernel(tmp_path))
