"""Recorded decode steps: padding, sizes and buffers, with recordings that run the work again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foveal_runtime.main.engine import _allocate, warm_up
from foveal_runtime.model.runner import graphs
from foveal_runtime.model.runner.graphs import capture_sizes
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from tests.support.models.rerun_capturer import RerunCapturer


def record(one, max_num_seqs: int = 4, max_model_len: int = 96, capturer=None) -> bool:
    return one.runner.record_decoding(
        capturer or RerunCapturer(), max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )


def run(one, num_jobs: int, prefix: str = "r") -> dict:
    prompts = {f"{prefix}{i}": one.prompt(20 + i, num_text=3 + 5 * i) for i in range(num_jobs)}
    jobs = {key: one.job(key, prompt) for key, prompt in prompts.items()}
    one.driver.run(list(jobs.values()))
    for key, job in jobs.items():
        one.check(job, prompts[key])
    return jobs


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_padded_steps_say_the_same(attention: str, bench) -> None:
    """Three sequences play the recording for four; logits equal transformers' own."""
    plain, one = bench("mistral_sliding", attention=attention), bench(
        "mistral_sliding", attention=attention
    )  # fmt: skip
    assert record(one)
    recorded = run(one, 3)
    assert one.runner.num_graph_steps >= 5
    assert {k: j.outputs for k, j in recorded.items()} == {
        k: j.outputs for k, j in run(plain, 3).items()
    }
    assert plain.runner.num_graph_steps == 0


def test_rope_positions_of_three_rows_and_deepstack(bench) -> None:
    """Pictures are computed step by step; what follows them is played, from their positions on."""
    one = bench("qwen3_vl")
    assert record(one)
    prompts = {"a": one.prompt(1, [(0, 1)]), "b": one.prompt(2, [(1, 3)]), "c": one.prompt(3)}
    jobs = {key: one.job(key, prompt) for key, prompt in prompts.items()}
    one.driver.run(list(jobs.values()))
    for key, job in jobs.items():
        one.check(job, prompts[key])
    assert one.runner.num_graph_steps > 0


def test_what_does_not_fit_is_computed_as_before(bench) -> None:
    """More sequences, or longer ones, than were recorded."""
    one = bench("llama")
    assert record(one, max_num_seqs=2, max_model_len=16)
    jobs = run(one, 4)
    assert all(len(job.outputs) == 6 for job in jobs.values())
    assert one.runner.num_graph_steps < 5


def test_padding_touches_nothing_but_the_trash_block(bench) -> None:
    one = bench("llama")
    assert record(one)
    pool = one.runner._pool
    for tensor in (*pool.keys, *pool.values):
        tensor[: pool.block_size] = torch.nan  # nobody's tokens may read what lies there
    jobs = run(one, 3)
    taken = {0, *(block for job in jobs.values() for block in job.blocks)}
    for tensor in (*pool.keys, *pool.values):
        blocks = tensor.view(pool.num_blocks, pool.block_size, -1)
        assert not any(blocks[i].any() for i in range(pool.num_blocks) if i not in taken)


def test_capture_sizes() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(6) == [1, 2, 4, 6]
    assert capture_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert capture_sizes(33) == [1, 2, 4, 8, 16, 32, 33]
    assert capture_sizes(128) == [1, 2, 4, 8, 16, 32, 64, 96, 128]
    assert capture_sizes(130)[-2:] == [128, 130]


class Broken:
    is_frozen = False

    def capture(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")


class Frozen(RerunCapturer):
    is_frozen = True


def test_a_model_that_cannot_be_recorded_is_served_without(bench, caplog) -> None:
    one = bench("llama")
    assert not record(one, capturer=Broken())
    assert "not permitted when stream is capturing" in caplog.text
    assert not record(one, capturer=Frozen())  # the torch backend loops over lengths on the host
    assert "reads lengths on the host" in caplog.text
    run(one, 1)
    assert one.runner.num_graph_steps == 0


@pytest.mark.slow
def test_triton_needs_nothing_from_the_host(bench) -> None:
    """The backend that is recorded for real: host numbers are wrong here, and nobody reads them."""
    one = bench("gemma2_softcap", attention="triton")
    assert record(one, capturer=Frozen())
    jobs = run(one, 3)
    assert all(len(job.outputs) == 6 for job in jobs.values())
    assert one.runner.num_graph_steps >= 5


def test_block_rows_are_converted_once_and_again_when_they_changed(bench) -> None:
    one = bench("llama")
    job = one.job("a", one.prompt(1))
    one.driver.run([job])
    sequence = one.runner._sequences["a"]
    ids = [3, 4, 5]
    assert sequence.block_row(ids).tolist() == ids
    ids.append(9)
    assert sequence.block_row(ids).tolist() == ids
    assert sequence.block_row([7, 8]).tolist() == [7, 8]
    assert sequence.block_row(list(range(1, 60))).dtype == np.int32


@pytest.mark.parametrize(
    ("device", "cuda_graphs", "is_recorded"),
    [("cuda:0", True, True), ("cuda:0", False, False), ("cpu", True, False)],
)
def test_an_engine_records_on_gpus_unless_told_not_to(
    tiny, monkeypatch, device: str, cuda_graphs: bool, is_recorded: bool
) -> None:
    """What is recorded runs here once more on the CPU."""
    monkeypatch.setattr(graphs, "CudaCapturer", RerunCapturer)
    runner = TorchRunner.load(str(tiny("llama")), block_size=8)
    config = EngineConfig(
        model=ModelConfig(path="x"), device=device, cuda_graphs=cuda_graphs,
        caches=EngineCaches(kv_bytes=40 * runner.kv_block_bytes, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=2),
    )  # fmt: skip
    _allocate(runner, config, 100)
    warm_up(runner, 8)
    assert (runner.num_graph_steps > 0) == is_recorded
