"""Encoders: whole prompts in both directions, pooled as transformers' hidden states are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from foveal_runtime.engine.types.step import NewRequest, ScheduledRequest, StepPlan
from foveal_runtime.main.engine import warm_up
from foveal_runtime.model import profiler
from foveal_runtime.model.adapters import TEXT_ADAPTERS
from foveal_runtime.model.checkpoint.loader import (
    adapter_for,
    check_class,
    class_for,
    read_config,
)
from foveal_runtime.model.checkpoint.weights import stored_bytes
from foveal_runtime.model.parallel.tensor_parallel import check_splits
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.embedder import ENCODERS
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.models.tiny_encoders import NAMES
from tests.support.models.vectors import TOLERANCE, deviation, pooled_by_hand


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str, bench) -> None:
    """Three poolings in the same steps, prompts of odd lengths, one thrown back."""
    one = bench(name, attention="auto")
    kinds = ("mean", "last", "cls")
    prompts = {
        f"{kind}{length}": one.prompt(length, num_text=length)
        for kind, length in zip(kinds * 2, (5, 30, 9, 17, 58, 1), strict=True)
    }
    jobs = {
        key: one.job(key, prompt, start // 2, pooling=key.rstrip("0123456789"))
        for start, (key, prompt) in enumerate(prompts.items())
    }
    one.driver.run(list(jobs.values()), preempt={1: "last30"})
    assert not one.driver.failed
    for key, job in jobs.items():
        hidden = one.hidden(prompts[key])
        kind = job.sampling.pooling
        assert deviation(job, pooled_by_hand(hidden, kind)) < TOLERANCE, key
        other = next(one for one in kinds if one != kind)
        assert deviation(job, pooled_by_hand(hidden, other)) > 100 * TOLERANCE, key


def test_the_first_token_sees_the_last(bench) -> None:
    one = bench("bert")
    prompt, other = one.prompt(1, num_text=9), one.prompt(1, num_text=9)
    other.ids[-1] += 1
    jobs = [one.job("a", prompt, pooling="cls"), one.job("b", other, pooling="cls")]
    one.driver.run(jobs)
    assert deviation(jobs[0], pooled_by_hand(one.hidden(other), "cls")) > 100 * TOLERANCE
    assert deviation(jobs[1], pooled_by_hand(one.hidden(other), "cls")) < TOLERANCE


def test_weights_of_a_checkpoint_with_a_head_are_the_same(tiny, tmp_path) -> None:
    """Encoders are often published with the head of their pre-training."""
    model = transformers.BertForMaskedLM(read_config(str(tiny("bert")))).eval()
    model.save_pretrained(tmp_path)
    runner = TorchRunner.load(str(tmp_path), block_size=8, num_blocks=8)
    prompt = [20, 30, 40]
    plan = StepPlan(
        0,
        [NewRequest("a", prompt, 3, (), (), SamplingParams(max_tokens=1, pooling="last"))],
        [ScheduledRequest("a", 0, 3, [1], True)],
    )
    [pooled] = runner.execute(plan).pooled
    wanted = model.bert(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    assert np.abs(np.frombuffer(pooled.values, "<f4") - wanted.detach().numpy()).max() < TOLERANCE


def test_it_starts_and_costs_what_was_predicted(tiny) -> None:
    path = str(tiny("roberta"))
    found = profiler.predict(path, "float32")
    runner = TorchRunner.load(path, block_size=16, num_blocks=40)
    assert found.is_encoder
    assert found.max_model_len == runner.traits.max_position == 512 - 2
    assert found.kv_bytes_per_token * 16 == runner.kv_block_bytes
    assert runner.weight_bytes <= found.weight_bytes == stored_bytes(path, 4)
    assert found.possible_ranks() == (1,)
    assert found.activation_bytes == 512 * found.kv_bytes_per_layer[0], "there are no logits"
    assert not runner.traits.grammars
    warm_up(runner, 16)
    measured = profiler.measure(found, path, dtype="float32", max_num_batched_tokens=128)
    assert measured.kv_bytes_per_token == found.kv_bytes_per_token


def test_sentence_transformers_length_is_the_limit(tiny, tmp_path) -> None:
    for file in Path(tiny("bert")).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    assert profiler.predict(str(tmp_path)).max_model_len == 128
    assert TorchRunner.load(str(tmp_path)).traits.max_position == 128
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": None}))
    assert profiler.predict(str(tmp_path)).max_model_len == 512


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("BertConfig", {"is_decoder": True}, "set up as a decoder"),
        ("BertConfig", {"position_embedding_type": "relative_key"}, "positions of kind relative"),
        ("MPNetConfig", {}, "not a generative language model"),
    ],
)
def test_other_encoders_are_refused(kind: str, options, reason: str) -> None:
    config = getattr(transformers, kind)(**options)
    with pytest.raises(StartupError, match=reason):
        check_class(config, class_for(config))


@pytest.mark.parametrize(("padding", "shown"), [(None, "null"), (-1, "-1"), (50265, "50265")])
def test_positions_begin_after_an_id_of_the_vocabulary(padding, shown: str) -> None:
    """null was a TypeError while the model was loaded."""
    config = transformers.RobertaConfig(pad_token_id=padding)
    with pytest.raises(StartupError, match=f"pad_token_id is {shown} in config.json.*roberta beg"):
        adapter_for(config)


def test_an_encoder_is_not_shared_by_devices(tiny) -> None:
    with pytest.raises(StartupError, match="tensor_parallel 2: encoders run on one device"):
        check_splits(read_config(str(tiny("bert"))), 2)


def test_every_encoder_is_compared(checkpoints) -> None:
    kinds = {checkpoints.CASES[name].config().model_type for name in NAMES}
    assert kinds == ENCODERS
    assert {kind for kind, one in TEXT_ADAPTERS.items() if one.is_encoder} == ENCODERS
    assert adapter_for(checkpoints.CASES["camembert"].config()).position_offset == 6
