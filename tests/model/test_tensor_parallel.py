"""Two ranks say what one process says; what must not start is refused; a lost rank ends it."""

from __future__ import annotations

import os
import queue

import msgspec
import pytest
import torch.distributed as dist

from foveal_runtime.engine.types.step import EncoderInput, Sampled, StepPlan, StepResult
from foveal_runtime.model.attention import LayerGeometry
from foveal_runtime.model.parallel.ranks import Command, Step, checksum
from foveal_runtime.model.parallel.tensor_parallel import (
    RankLost,
    TensorParallelRunner,
    check_divisible,
)
from foveal_runtime.plan.errors import StartupError

pytestmark = pytest.mark.model


def jobs_of(one) -> list:
    kinds = [(kind, 7 + kind) for kind in one.case.items]
    jobs = [
        one.job("a", one.prompt(11, kinds, num_text=9)),
        one.job("b", one.prompt(12, [*kinds[:1], *kinds[:1]]), start_step=1),
        one.job("c", one.prompt(14, [], num_text=30), start_step=2),
    ]
    # Drawn tokens need logits that agree closely on all ranks, not only their maximum.
    jobs[2].sampling = msgspec.structs.replace(jobs[2].sampling, temperature=1.0, seed=5)
    return jobs


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("llava", marks=pytest.mark.extended), "qwen2_vl"]
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
            assert "rank 1" in lost.get(timeout=30)  # nobody closed it within the grace time
    finally:
        runner.close()
        runner.close()
    assert lost.empty()
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


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
