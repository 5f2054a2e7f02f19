"""Hybrid decoders equal transformers' own forward, though each sequence keeps a recurrent state.

Chunked prefill under a small odd budget, several sequences in a batch, and preemption, in fp32 on
random weights. The controls leave out one rule each: without them a tiny model might not care.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foveal_runtime.model.cpu.kernels import load_recurrent_kernels
from foveal_runtime.model.layers import recurrence
from foveal_runtime.model.layers.state import StatePool, States
from foveal_runtime.model.parallel.tensor_parallel import check_splits
from foveal_runtime.model.profiler import predict
from foveal_runtime.plan.errors import StartupError
from tests.support.models.step_driver import Job
from tests.support.models.tiny_checkpoints import Prompt

NAMES = [
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_vl", "lfm3", "lfm3_vl", "minicpmv4_6",
    "minicpm_ocr", "minicpmv4_7",
]  # fmt: skip


def run(one, preempt: dict[int, str]) -> list[tuple[Job, Prompt]]:
    """Four staggered requests, two of them preempted."""
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()), preempt=preempt)
    assert not one.driver.failed
    return [(job, prompts[name]) for name, job in jobs.items()]


def largest(one, preempt: dict[int, str]) -> float:
    """The largest deviation of any logit."""
    return max(one.deviation(job, prompt) for job, prompt in run(one, preempt))


def delta_nets(one) -> list:
    return [m for m in one.runner.loaded.decoder.modules() if hasattr(m, "A_log")]


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str, with_kernels: bool, bench, monkeypatch) -> None:
    if not with_kernels:
        monkeypatch.setattr(recurrence, "load_recurrent_kernels", lambda: "none here")
    one = bench(name, attention="auto" if with_kernels else "torch", reuse=False)
    rules = {module.forward.rule is not None for module in delta_nets(one)}
    has_kernel = with_kernels and not isinstance(load_recurrent_kernels(), str)
    assert rules == (set() if "lfm" in name else {has_kernel})
    for job, prompt in run(one, {5: "a", 8: "b"}):
        one.check(job, prompt)
    assert one.runner.traits.state_bytes == one.runner.states.slot_bytes > 0


def test_a_request_goes_on_from_its_tokens(bench) -> None:
    """What a migration does: prompt and tokens so far arrive as a new request."""
    one = bench("qwen3_5", reuse=False)
    prompt = one.prompt(11, [(kind, 7 + kind) for kind in one.case.items], num_text=9)
    whole = one.job("whole", prompt)
    one.driver.run([whole])
    rest = one.job("rest", prompt)
    rest.tokens = whole.tokens[:-3]
    one.driver.run([rest])
    assert rest.tokens == whole.tokens


class Leaking(States):
    """Gives every token of the batch to the first sequence, as one packed row."""

    def in_use(self, context):
        slots = context.state_slots[:1]
        return super().in_use(replace(context, q_lens=[sum(context.q_lens)], state_slots=slots))


class Remembering(StatePool):
    """A preempted request goes on with the state that it had."""

    def open(self, request_id: str, snapshot: int = 0) -> None:
        known = request_id in self._slots
        if not known:
            super().open(request_id, snapshot)
        self.ends[self._slots[request_id]] = 0


def test_sequences_that_leak_are_seen(bench) -> None:
    one = bench("qwen3_5", reuse=False)
    one.runner.states.__class__ = Leaking
    assert largest(one, {}) > 0.1


def test_a_state_that_is_not_reset_is_seen(bench) -> None:
    one = bench("qwen3_5", reuse=False)
    one.runner.states.pool.__class__ = Remembering
    assert largest(one, {5: "a", 8: "b"}) > 0.1


def test_a_state_cannot_advance_twice(bench) -> None:
    one = bench("lfm2", reuse=False)
    pool = one.runner.states.pool
    pool.open("x")
    pool.advance("x", 0, 5)
    with pytest.raises(AssertionError):
        pool.advance("x", 0, 5)


def test_a_slot_serves_one_request_after_another(bench) -> None:
    """Regression guard: a slot that kept its last owner's state would answer another prompt."""
    one = bench("lfm2", reuse=False)
    prompt = one.prompt(14, [], num_text=30)
    first = one.job("first", prompt)
    one.driver.run([first])
    for number in range(20):  # more requests than slots
        job = one.job(f"again-{number}", prompt)
        one.driver.run([job])
        assert job.outputs == first.outputs


def test_the_profile_counts_the_state_of_a_request(bench, tiny) -> None:
    one = bench("qwen3_5", reuse=False)
    profile = predict(str(tiny("qwen3_5")), "float32")
    assert profile.state_bytes == one.runner.states.slot_bytes
    pool = one.runner.states.pool
    held = sum(t[0].nbytes for parts in pool.tensors.values() for t in parts.values())
    assert profile.state_bytes == held
    assert profile.kv_bytes_per_token * 8 == one.runner.kv_block_bytes  # attention layers alone


def test_several_devices_are_refused_in_one_line(bench) -> None:
    one = bench("lfm2", reuse=False)
    with pytest.raises(StartupError, match="one device; set it to 1"):
        check_splits(one.runner.loaded.config, 2)
