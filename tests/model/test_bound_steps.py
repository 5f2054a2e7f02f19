"""Grammars bind what recorded steps and several ranks draw, as they bind one process."""

from __future__ import annotations

import re
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.frontend.text.tokenizer import byte_of_char
from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.models.rerun_capturer import RerunCapturer
from tests.support.models.step_driver import Job, StepDriver

PATTERN = "[a-c]{3}[0-9]{5}"
BLOCKS = 64


@pytest.fixture
def path(tiny, tmp_path):
    """A random decoder of 128 tokens, which are the ASCII characters."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    vocab = {char: byte for char, byte in byte_of_char().items() if byte < 128}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def outputs(runner) -> dict[str, list[int]]:
    """Of bound requests at several temperatures, one thrown back, beside a free one."""
    grammar = compile_job("regex", PATTERN, True)["grammar"]
    jobs = []
    for number, temperature in enumerate((0.0, 1.0, 2.0)):
        bound = SamplingParams(
            max_tokens=8, temperature=temperature, seed=number, grammar=grammar, top_p=0.9
        )
        prompt = list(range(30, 37 + 5 * number))
        jobs.append(Job(f"bound{number}", prompt, sampling=bound, start_step=number))
    free = SamplingParams(max_tokens=8, temperature=1.0, seed=9, ignore_eos=True)
    jobs.append(Job("free", list(range(40, 52)), sampling=free))
    driver = StepDriver(runner, BLOCKS)
    driver.run(jobs, preempt={5: "bound1"})
    assert driver.failed == {}
    found = {job.request_id: job.outputs for job in jobs}
    for name, tokens in found.items():
        text = bytes(tokens).decode("ascii")
        assert bool(re.fullmatch(PATTERN, text)) == (name != "free"), (name, text)
    return found


def runner_of(path: str) -> TorchRunner:
    return TorchRunner.load(path, block_size=8, num_blocks=BLOCKS, attention="torch")


def test_recorded_steps_are_bound(path) -> None:
    plain, recorded = runner_of(path), runner_of(path)
    assert recorded.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    assert outputs(recorded) == outputs(plain)
    assert recorded.num_graph_steps > 4


@pytest.mark.extended
def test_ranks_are_bound_alike(path) -> None:
    wanted = outputs(runner_of(path))
    ranks = TensorParallelRunner.load(
        path, 2, attention="torch", block_size=8, num_blocks=BLOCKS, grace_seconds=0.2
    )
    try:
        assert outputs(ranks) == wanted
    finally:
        ranks.close()
