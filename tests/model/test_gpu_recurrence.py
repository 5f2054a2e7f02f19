"""One token of each sequence through a recurrence by Triton kernels, and decode steps recorded with
them. Without a GPU they run in Triton's interpreter; FOVEAL_DEVICE=cuda runs them there."""

from __future__ import annotations

import logging

import pytest
import torch

from foveal_runtime.model.layers.layer_parts import Unlike
from tests.support.models.bench import DEVICE
from tests.support.models.recurrent_layers import (
    DELTA_NETS,
    MIXERS,
    SLOTS,
    copied,
    largest_apart,
    layer,
    plain,
    some_states,
)
from tests.support.models.rerun_capturer import RerunCapturer

pytest.importorskip("triton")
from foveal_runtime.model.layers import gpu_recurrence
from foveal_runtime.model.layers.recurrence import make_step
from tests.support.models.triton_compile import SMALL_CARD_BYTES, compiled

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-4}
"""In bfloat16 the interpreter cuts numbers off instead of rounding them."""
SHAPES = [(2, 4, 16, 16, 4), (1, 3, 32, 48, 4), (2, 2, 24, 80, 2), (1, 2, 128, 64, 4)]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        torch.manual_seed(3)
        yield


def there(module):
    return module.to(DEVICE), {k: v.to(DEVICE) for k, v in some_states(module).items()}


def step_of(module):
    is_delta = hasattr(module, "num_v_heads")
    return (gpu_recurrence.DeltaStep if is_delta else gpu_recurrence.MambaStep)(module)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*DELTA_NETS, *MIXERS])
def test_equals_the_module(kind, shape, dtype):
    module, before = there(layer(kind, shape, dtype))
    slots = [4, 0, -1, 6]
    rows = torch.randn(1, len(slots), module.out_proj.out_features).to(DEVICE, dtype)
    wanted, got = copied(before), copied(before)
    out = step_of(module)(rows, got, torch.tensor(slots, device=DEVICE))
    for row, slot in enumerate(slots):
        if slot >= 0:
            alone = plain(module).compute(rows[:, row : row + 1], wanted, [slot])
            assert largest_apart(out[:, row : row + 1], alone) <= TOLERANCES[dtype]
    assert torch.isfinite(out).all()
    for name, one in wanted.items():
        assert largest_apart(got[name], one) <= TOLERANCES[dtype], name
        for other in set(range(SLOTS)) - set(slots):
            assert torch.equal(got[name][other], before[name][other])


class Halved:
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) / 2


@pytest.mark.parametrize("kind", ["qwen3_5", "bamba"])
def test_what_computes_another_thing_is_left_alone(kind):
    module, states = there(layer(kind))
    two = {name: one[:2] for name, one in states.items()}
    kind_of_step = type(step_of(module))
    assert make_step(kind_of_step, module, plain(module), two)
    module.__class__ = type("Other", (Halved, type(module)), {})
    with pytest.raises(Unlike, match="out differs by"):
        make_step(kind_of_step, module, plain(module), two)
    module.activation = "gelu"
    with pytest.raises(Unlike, match="float32 with gelu"):
        make_step(kind_of_step, module, plain(module), two)


def test_a_state_that_no_program_holds_is_left_alone():
    module, states = there(layer("granite", (1, 1, 512, 128, 4)))
    two = {name: one[:2] for name, one in states.items()}
    with pytest.raises(Unlike, match="128 x 512 has no kernel"):
        make_step(gpu_recurrence.MambaStep, module, plain(module), two)


def offered(bench, name):
    """A runner whose layers with a recurrence were offered these kernels."""
    one = bench(name, reuse=False)
    if DEVICE == "cpu":
        one.runner.states.use_gpu_kernels()
    return one


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize(
    "name",
    ["qwen3_5", "nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.extended),
     "lfm2_vl", pytest.param("falcon_h1_gated", marks=pytest.mark.extended)],
)  # fmt: skip
def test_a_family_equals_transformers(name, is_recorded, bench):
    one = offered(bench, name)
    assert one.runner.states.has_steps
    if is_recorded:
        assert one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()), preempt={5: "a", 8: "b"})
    assert (one.runner.num_graph_steps > 0) == is_recorded
    for key, job in jobs.items():
        one.check(job, prompts[key])


def test_what_pads_a_recorded_step_is_nobodys(bench):
    """Three sequences in a recording of four: the slot that no request has stays as it is."""
    one = offered(bench, "qwen3_5")
    assert one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    pool = one.runner.states.pool
    for tensor in pool.all_tensors():
        tensor.fill_(7)
    jobs = [one.job(str(seed), one.prompt(seed, [], num_text=3 + seed)) for seed in range(3)]
    one.driver.run(jobs)
    assert one.runner.num_graph_steps
    assert all((tensor[3:] == 7).all() for tensor in pool.all_tensors())
    assert not all((tensor[:3] == 7).any() for tensor in pool.all_tensors())


def test_without_kernels_steps_are_not_recorded(bench, monkeypatch, caplog):
    monkeypatch.setattr(gpu_recurrence.ConvStep, "__call__", lambda _, rows, parts, slots: rows)
    one = offered(bench, "lfm2")
    assert not one.runner.states.has_steps
    with caplog.at_level(logging.WARNING):
        assert not one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    assert "recurrent state that no kernel of this device advances" in caplog.text
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()))
    one.check(jobs["a"], prompts["a"])


@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles_for_gpus_without_spilling(architecture):
    found = compiled(f"recurrence,bfloat16,{architecture}", f"recurrence,float32,{architecture}")
    assert [one["kernel"] for one in found[:3]] == [
        "convolve_kernel", "delta_kernel", "mamba_kernel"
    ]  # fmt: skip
    for one in found:
        assert one["shared_bytes"] <= SMALL_CARD_BYTES, one
        assert one["spilled_bytes"] == 0, one
