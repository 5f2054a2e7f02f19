"""The kernels of the gated delta rule and of Mamba-2 compute what transformers' modules compute."""

from __future__ import annotations

import pytest
import torch

from foveal_runtime.model.cpu.kernels import (
    UNSUPPORTED,
    DeltaJob,
    MambaJob,
    RecurrentKernels,
    load_recurrent_kernels,
)
from foveal_runtime.model.layers.delta_rule import DeltaRule
from foveal_runtime.model.layers.layer_parts import Unlike
from foveal_runtime.model.layers.mamba import MambaRule
from foveal_runtime.model.layers.recurrence import make_rule
from tests.support.models.compiled import paths_of
from tests.support.models.recurrent_layers import (
    DELTA_NETS,
    MIXERS,
    SLOTS,
    TOLERANCES,
    copied,
    largest_apart,
    layer,
    plain,
    project,
    some_states,
)

pytestmark = pytest.mark.skipif(
    isinstance(load_recurrent_kernels(), str), reason=str(load_recurrent_kernels())
)
SHAPES = [(2, 4, 16, 16, 4), (1, 3, 32, 48, 4), (2, 2, 64, 80, 2), (1, 2, 128, 128, 4)]
LENGTHS = [1, 70, 1, 5, 2]


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


def rule_of(module, kernels):
    return (DeltaRule if hasattr(module, "num_v_heads") else MambaRule)(module, kernels)


def segments_of(lengths, slots) -> torch.Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor(list(zip(starts, lengths, slots, strict=True)))


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
        projected = project(module, torch.randn(1, 90, module.out_proj.out_features).to(dtype))
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
