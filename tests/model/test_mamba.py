"""Decoders with Mamba-2 layers equal transformers' forward, in chunks, batches, from snapshots.

In fp32 on random weights. transformers' step of one token writes states in place, without a call of
the cache; the controls leave out one rule each.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from foveal_runtime.engine.types.step import EncoderInput
from foveal_runtime.model.checkpoint.loader import class_for, load_model, read_config
from foveal_runtime.model.cpu.kernels import load_recurrent_kernels
from foveal_runtime.model.layers import mamba, recurrence, state
from foveal_runtime.model.layers.state import StateForward
from foveal_runtime.model.profiler import predict
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.errors import StartupError
from tests.support.allocations import most_allocated
from tests.support.models.bench import pack
from tests.support.models.scheduled_bench import Engine, converse, goes_on_elsewhere
from tests.support.models.tiny_checkpoints import CASES, save, text_case

NAMES = [
    "nemotron_h", "granitemoehybrid", "granitemoehybrid_dense", "falcon_h1", "falcon_h1_gated",
    "bamba", "nemotron_h_omni", "nemo_speechlm",
]  # fmt: skip


def staggered(one):
    """Four requests that overlap, two of them preempted."""
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()), preempt={5: "a", 8: "b"})
    return [(job, prompts[name]) for name, job in jobs.items()]


def check_all(one) -> None:
    for job, prompt in staggered(one):
        one.check(job, prompt)


def largest(one) -> float:
    return max(one.deviation(job, prompt) for job, prompt in staggered(one))


@pytest.fixture
def without_kernels(monkeypatch) -> None:
    monkeypatch.setattr(recurrence, "load_recurrent_kernels", lambda: "none here")


def with_rules(one) -> set[bool]:
    return {m.forward.rule is not None for m in mamba.mixers_of(one.runner.loaded.decoder)}


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str, bench) -> None:
    one = bench(name, attention="auto", reuse=False)
    assert with_rules(one) == {not isinstance(load_recurrent_kernels(), str)}
    check_all(one)


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers_by_its_modules(name: str, bench, without_kernels) -> None:
    one = bench(name, attention="torch", reuse=False)
    assert with_rules(one) == {False}
    check_all(one)


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba"])
@pytest.mark.skipif(isinstance(load_recurrent_kernels(), str), reason="no kernels")
def test_the_kernel_computes_bfloat16(name: str, tiny) -> None:
    runner = TorchRunner.load(str(tiny(name)), dtype="bfloat16", block_size=8)
    mixers = list(mamba.mixers_of(runner.loaded.decoder))
    assert mixers
    assert all(mixer.forward.rule is not None for mixer in mixers)


@pytest.mark.parametrize(
    "name",
    ["nemotron_h", "falcon_h1", "nemotron_h_omni"]
    + [pytest.param(name, marks=pytest.mark.extended) for name in ("granitemoehybrid", "bamba")],
)
def test_logits_after_a_hit_are_those_of_a_cold_run(name: str, bench) -> None:
    one = bench(name, attention="auto", reuse=False)
    items = [(kind, 7 + kind) for kind in one.case.items]
    prompt = one.prompt(11, items, num_text=25 if items else 45)
    hits, num_before = converse(Engine(one), prompt, cut=5)
    assert hits["first"] == 0
    assert hits["again"] == (len(prompt.ids) - 1) // 8 * 8
    assert hits["next turn"] == num_before // 8 * 8
    assert hits["other question"] >= max(prompt.offsets, default=8) // 8 * 8


def test_a_request_goes_on_elsewhere_from_its_tokens(bench) -> None:
    one = bench("nemotron_h", reuse=False)
    goes_on_elsewhere(one, one.prompt(11, [], num_text=20), Engine)


class OnlyUpdated(state._Slots):
    """Control: keeps what a module gives to an update, not what it wrote in place."""

    def _read(self, name: str) -> torch.Tensor | None:
        return self._now.get(name, self._parts[name][self._slots])


@pytest.mark.parametrize("name", NAMES)
def test_states_that_are_written_in_place_alone_are_seen(
    name: str, bench, monkeypatch, without_kernels
) -> None:
    monkeypatch.setattr(state, "_Slots", OnlyUpdated)
    assert largest(bench(name, reuse=False)) > 0.1


def test_steps_below_the_limit_are_seen(bench, monkeypatch, without_kernels) -> None:
    """Control: without the limit, tokens that are computed alone have other numbers."""
    monkeypatch.setattr(mamba, "settle", lambda module: None)
    assert largest(bench("nemotron_h", reuse=False)) > 0.1


def test_pieces_change_nothing(bench, monkeypatch, without_kernels) -> None:
    monkeypatch.setattr(mamba, "ROWS", 3)
    monkeypatch.setattr(mamba, "num_sequences", lambda module: 2)
    check_all(bench("nemotron_h", reuse=False))


@pytest.mark.parametrize("name", NAMES)
def test_the_profile_counts_states_and_temporary_memory(name: str, tiny) -> None:
    runner = TorchRunner.load(str(tiny(name)), block_size=8)
    runner.allocate_kv(9, num_sequences=3, num_snapshots=5)
    profile = predict(str(tiny(name)))
    assert runner.states.pool.size_bytes == 8 * profile.state_bytes > 0
    assert profile.kv_bytes_per_token * 8 == runner.kv_block_bytes
    scratch = [mamba.scratch_bytes(mixer) for mixer in mamba.mixers_of(runner.loaded.decoder)]
    assert len(scratch) == len(runner.states.shapes)
    assert profile.activation_bytes > max(scratch) > mamba._STATE_BYTES


@torch.inference_mode()
def test_an_encoder_that_stays_wide_gets_wide_numbers(tiny) -> None:
    """Nemotron 3.5 Transcribe hears in float32 whatever its type: sounds are not rounded before it,
    outputs are after it, and the profile counts its weights as they are."""
    path = str(tiny("nemo_speechlm"))
    runner = TorchRunner.load(path, dtype="bfloat16", block_size=8)
    held = sum(one.nbytes for one in runner.loaded.model.parameters())
    assert predict(path, "bfloat16").weight_bytes == pytest.approx(held, rel=0.001)
    assert held > 1.2 * sum(2 * one.numel() for one in runner.loaded.model.parameters())
    item = CASES["nemo_speechlm"].items[2](7)
    runner.encoder.encode([EncoderInput(b"a", 2, len(item.ids), pack(item))])
    theirs = class_for(read_config(path)).from_pretrained(path, dtype=torch.bfloat16).eval()
    wanted = theirs.get_audio_features(**item.fields, return_dict=True).pooler_output
    assert torch.equal(runner.store.lookup(b"a")[0], wanted.bfloat16())


@pytest.mark.parametrize(("heads", "keys"), [(64, 128), (32, 256), (128, 64)])
def test_temporary_memory_is_bounded(heads: int, keys: int) -> None:
    config = hf.NemotronHConfig(
        hidden_size=64, layers_block_type=["linear_attention"], n_groups=8,
        mamba_num_heads=heads, mamba_head_dim=64, ssm_state_size=keys,
    )  # fmt: skip
    module = NemotronHMamba2Mixer(config, 0).eval()
    mamba.settle(module)
    forward = StateForward(module, "cache_params")
    forward.limits = (mamba.ROWS, mamba.num_sequences(module))
    parts = {
        "conv": torch.zeros(12, module.conv_dim, 4),
        "recurrent": torch.zeros(12, heads, 64, keys),
    }
    bound = mamba.scratch_bytes(module)
    for segments in ([[0, 600, 3]], [[row, 1, row] for row in range(12)]):
        with torch.inference_mode():
            rows = torch.randn(1, sum(count for _, count, _ in segments), 64)
            arguments = (rows, parts, torch.tensor(segments))
            forward.split(*arguments)
            peak = most_allocated(lambda arguments=arguments: forward.split(*arguments))
        assert 0.3 * bound < peak < bound


def test_a_grid_that_its_prompt_does_not_have_is_the_items_fault(bench) -> None:
    one = bench("nemotron_h_omni", reuse=False)
    prompt = one.prompt(3, [(0, 7)])
    prompt.items[0].fields["image_grid_hw"] = torch.tensor([[40_000, 40_000]])
    one.driver.run([one.job("a", prompt)])
    assert "image_grid_hw [[40000, 40000]] does not make" in one.driver.failed["a"]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("GraniteMoeHybridConfig", {"layer_types": ["linear_attention"] * 2, "mamba_n_heads": 4},
         "none of 2 decoder layers has attention"),
        ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "time_step_limit": [0.1, 0.2]},
         r"time_step_limit \[0.1, 0.2\] in config.json is not supported beside multipliers"),
    ],
)  # fmt: skip
def test_what_is_refused(kind: str, changes, reason: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(CASES, "refused", text_case(kind, **changes))
    save("refused", tmp_path)
    with pytest.raises(StartupError, match=reason):
        TorchRunner(load_model(str(tmp_path)))
