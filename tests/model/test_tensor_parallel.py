"""Two ranks say what one process says; what must not start is refused; a lost rank ends it."""

from __future__ import annotations

import os
import queue
import signal

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.process.evidence import StepRecord
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend
from foveal_runtime.engine.types.step import EncoderInput, Sampled, StepPlan, StepResult
from foveal_runtime.mirror.messages import Bye, Death
from foveal_runtime.model.attention import LayerGeometry
from foveal_runtime.model.parallel.ranks import Command, Step, checksum
from foveal_runtime.model.parallel.tensor_parallel import (
    RankLost,
    TensorParallelRunner,
    check_divisible,
)
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import RequestBody


def jobs_of(one) -> list:
    kinds = [(kind, 7 + kind) for kind in one.case.items]
    jobs = [
        one.job("a", one.prompt(11, kinds, num_text=9)),
        one.job("b", one.prompt(12, [*kinds[:1], *kinds[:1]]), start_step=1),
        one.job("c", one.prompt(14, [], num_text=30), start_step=2),
        one.job("d", one.prompt(15, kinds, num_text=30), start_step=1, pooling="mean"),
    ]
    # Drawn tokens need logits that agree closely on all ranks, not only their maximum.
    jobs[2].sampling = msgspec.structs.replace(jobs[2].sampling, temperature=1.0, seed=5)
    return jobs


NAMES = ("llama", "llava", "qwen2_vl")
"""docs/reference/models.md says so."""


@pytest.mark.parametrize(
    "name",
    [NAMES[0], *(pytest.param(name, marks=pytest.mark.extended) for name in NAMES[1:])],
)
def test_two_ranks_equal_one_process(name: str, bench, tiny, tmp_path) -> None:
    """And then encoder outputs come from a file, and (once) a rank is killed: starting ranks is
    most of this test's time."""
    lost: queue.Queue[str] = queue.Queue()
    one = bench(name)
    want = jobs_of(one)
    one.driver.run(want, preempt={4: "a"})
    assert not dist.is_initialized()
    runner = TensorParallelRunner.load(
        str(tiny(name)), 2, attention="torch", block_size=8, num_blocks=128,
        on_lost=lost.put, grace_seconds=0.2,
    )  # fmt: skip
    try:
        assert runner.traits == one.runner.traits
        assert 2 * runner.kv_block_bytes == one.runner.kv_block_bytes
        assert one.runner.weight_bytes / 2 < runner.weight_bytes < one.runner.weight_bytes
        driver = type(one.driver)(runner, runner.num_blocks, one.case.budget)
        got = jobs_of(one)
        driver.run(got, preempt={4: "a"})
        assert driver.failed == {}
        assert [job.outputs for job in got] == [job.outputs for job in want]
        vectors = [np.frombuffer(jobs[-1].embedding, "<f4") for jobs in (got, want)]
        assert np.abs(vectors[0] - vectors[1]).max() < 1e-5 < np.abs(vectors[1]).max()
        if name == "llava":
            sizes = {i.mm_hash: i.placeholder.num_embeds for i in got[1].mm_inputs}
            path = str(tmp_path / "part")
            assert set(runner.save_encoder(path, list(sizes))) == set(sizes)
            assert set(runner.load_encoder(path, {}, sizes)) == set(sizes)
            keys = list(sizes)  # every rank has them in its host tier now
            driver.runner.execute(StepPlan(driver.step, free_encoder=keys, load_encoder=keys))
            again = jobs_of(one)[1:2]
            again[0].start_step = 0
            driver.shared.clear()
            driver.step += 1
            driver.run(again)
            assert again[0].outputs == want[1].outputs
        if name == "llama":
            runner.worker_processes[0].kill()
            with pytest.raises(RankLost, match="rank 1 ended with exit code -9"):
                driver.run([one.job("b", one.prompt(4))])
            assert "rank 1" in lost.get(timeout=120)  # nobody closed it within the grace time
    finally:
        runner.close()
        runner.close()
    assert lost.empty()
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


@pytest.mark.extended
def test_a_request_that_crashes_a_rank_is_named_alone(tiny, tmp_path) -> None:
    """A rank crashes in the step that first computes a newcomer, beside a stream: the stream goes
    on elsewhere, and only the newcomer is blamed. A real engine core over two real ranks."""
    lost: queue.Queue[str] = queue.Queue()
    runner = TensorParallelRunner.load(
        str(tiny("llama")), 2, attention="torch", block_size=8, num_blocks=64,
        on_lost=lost.put, grace_seconds=60.0,
    )  # fmt: skip
    try:
        submit, poison = runner.submit, 19

        def crash_on_poison(plan, between=None):
            if any(new.token_ids[0] == poison for new in plan.new):
                runner.worker_processes[0].send_signal(signal.SIGSEGV)
                runner.worker_processes[0].wait(60)
            return submit(plan, between)

        runner.submit = crash_on_poison
        config = EngineConfig(
            model=ModelConfig(path="/models/fake"), run_ahead="off",
            caches=EngineCaches(ipc_bytes=4096, ipc_staging_bytes=8192, block_size=8),
        )  # fmt: skip
        loaded = LoadedEngine(runner=runner, num_blocks=64, max_model_len=200, largest={})
        sent: list[tuple[str, object]] = []
        core = assemble_core(
            config, loaded, send=lambda fid, message: sent.append((fid, message)), boot=7,
            record=StepRecord(7, tmp_path / "step"),
        )  # fmt: skip
        frontend = FakeFrontend("f")

        def say(sending) -> None:
            core.on_message("f", sending.message)
            while sent:
                frontend.take(sent.pop(0)[1])

        def ask(name: str, token: int) -> None:
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            ids = codec.pack_tokens([token, 5, 6], wide=False)[0]
            body = RequestBody(
                token_ids=ids, wide=False, placements=(), sampling=sampling,
                key=name.encode().ljust(16, b"."),
            )  # fmt: skip
            say(frontend.request((name, 0), [token, 5, 6], sampling=sampling, body=body))

        say(frontend.hello())
        ask("stream", 4)
        for _ in range(6):
            core.step()
        ask("poison", poison)
        with pytest.raises(RankLost, match="exit code -11") as caught:
            core.step()
        sent.clear()
        core.on_failure(caught.value)
        [(_, bye)] = sent
        assert isinstance(bye, Bye)
        assert bye.death == Death(7, bye.death.at, (b"poison".ljust(16, b"."),), is_own=True)
        assert not RankLost("killed", -9).is_own
    finally:
        runner.close()


def test_heads_that_do_not_divide_are_refused_with_the_numbers(tiny) -> None:
    with pytest.raises(StartupError, match=r"4: layer 0 has 2 key/value heads.*possible are 1, 2$"):
        TensorParallelRunner.load(str(tiny("llama")), 4)
    with pytest.raises(StartupError, match="layer 0 has 7 query heads"):
        check_divisible([LayerGeometry(0, 7, 2, 8, 8, 1.0)], 2)


def test_plans_travel_with_their_bytes() -> None:
    value = os.urandom(1000)
    plan = StepPlan(3, encode=[EncoderInput(b"h" * 32, 0, 4, memoryview(value))])
    data = msgspec.msgpack.encode(Step(plan, 77))
    back = msgspec.msgpack.decode(data, type=Command)
    assert bytes(back.plan.encode[0].value) == value
    assert (back.plan.step, back.previous) == (3, 77)


def test_checksum_sees_tokens_and_failures_only() -> None:
    base = StepResult(1, [Sampled("a", 5)], failed={"x": "because"}, forward_seconds=1.0)
    assert checksum(base) == checksum(StepResult(1, [Sampled("a", 5)], failed={"x": "other"}))
    assert checksum(base) != checksum(StepResult(1, [Sampled("a", 6)], failed={"x": ""}))
    assert checksum(base) != checksum(StepResult(1, [Sampled("a", 5)]))
