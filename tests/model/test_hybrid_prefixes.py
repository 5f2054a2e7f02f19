"""Prefixes of hybrid decoders are reused from snapshots of their state, and nothing changes.

The engine's scheduler over the real runner: logits of a request that started from a snapshot equal
transformers' forward over the whole sequence. The controls give a request a wrong state.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foveal_runtime.engine.caches import prefix_cache
from foveal_runtime.model.layers.state import StatePool
from tests.support.models.bench import Bench
from tests.support.models.scheduled_bench import Engine, converse, goes_on_elsewhere, with_tail
from tests.support.models.tiny_checkpoints import Prompt


def image_prompt(one: Bench, seed: int, num_text: int = 9) -> Prompt:
    return one.prompt(seed, [(kind, 7 + kind) for kind in one.case.items], num_text=num_text)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("qwen3_5", "auto"),
        *(
            pytest.param(name, attention, marks=pytest.mark.extended)
            for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_vl", "minicpmv4_7")
            for attention in ("torch", "auto")
            if (name, attention) != ("qwen3_5", "auto")
        ),
    ],
)
def test_logits_after_a_hit_are_those_of_a_cold_run(name: str, attention: str, bench) -> None:
    one = bench(name, attention=attention, reuse=False)
    prompt = image_prompt(one, 11, num_text=30)
    engine = Engine(one)
    hits, num_before = converse(engine, prompt, cut=5)
    length = len(prompt.ids)
    assert hits["first"] == 0
    assert hits["again"] == (length - 1) // 8 * 8
    assert hits["next turn"] == num_before // 8 * 8
    if one.case.items:
        assert hits["other question"] >= max(prompt.offsets)


def test_another_image_is_another_prefix(bench) -> None:
    one = bench("qwen3_5", reuse=False)
    engine = Engine(one)
    prompts = [one.prompt(11, [(0, seed)], num_text=25) for seed in (3, 6)]
    assert prompts[0].ids == prompts[1].ids
    for name, prompt in zip("ab", prompts, strict=True):
        job = one.job(name, prompt, ignore_eos=True)
        engine.run(job)
        one.check(job, prompt)


def test_a_request_goes_on_elsewhere_from_its_tokens(bench) -> None:
    one = bench("qwen3_5", reuse=False)
    goes_on_elsewhere(one, image_prompt(one, 11), Engine)


class NoConvolution(StatePool):
    """Control: the half of the state that convolutions keep is lost in a snapshot."""

    def _copy(self, source: int, target: int) -> None:
        super()._copy(source, target)
        for parts in self.tensors.values():
            parts["conv"][target].zero_()


class Empty(StatePool):
    """Control: a snapshot that was never filled."""

    def _copy(self, source: int, target: int) -> None:
        super()._copy(source, target)
        for parts in self.tensors.values():
            for tensor in parts.values():
                tensor[target].zero_()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("qwen3_5", NoConvolution),
        pytest.param("qwen3_5", Empty, marks=pytest.mark.extended),
        pytest.param("lfm2", Empty, marks=pytest.mark.extended),
    ],
)
def test_a_wrong_state_is_seen(name: str, wrong: type, bench) -> None:
    one = bench(name, reuse=False)
    one.runner.states.pool.__class__ = wrong
    prompt = image_prompt(one, 11, num_text=30)
    engine = Engine(one)
    for label in ("first", "again"):
        job = one.job(label, prompt, ignore_eos=True)
        (hit,) = engine.run(job)
    assert hit > 0
    assert one.deviation(job, prompt) > 0.1


def test_names_without_images_are_seen(bench, monkeypatch) -> None:
    """Control: a snapshot whose name says nothing of the image."""
    monkeypatch.setattr(prefix_cache, "extra_keys", lambda inputs, start, end, first=0: ((), first))
    one = bench("qwen3_5", reuse=False)
    engine = Engine(one)
    for name, seed in (("a", 3), ("b", 6)):
        prompt = one.prompt(11, [(0, seed)], num_text=25)
        job = one.job(name, prompt, ignore_eos=True)
        (hit,) = engine.run(job)
    assert hit > 0
    assert one.deviation(job, prompt) > 0.1


def test_a_snapshot_at_another_place_is_refused(bench) -> None:
    """A state that has seen more or fewer tokens than the hit covers cannot be continued."""
    one = bench("lfm2", reuse=False)
    engine = Engine(one)
    prompt = one.prompt(14, [], num_text=60)
    engine.run(one.job("first", prompt))
    pool = one.runner.states.pool
    pool.ends[pool.num_slots :] = [end + 8 for end in pool.ends[pool.num_slots :]]
    with pytest.raises(AssertionError):
        engine.run(one.job("again", prompt))


@pytest.mark.extended
@pytest.mark.parametrize("trace", ["conversation", "same-image"])
def test_hits_are_nearly_those_of_full_attention(trace: str, bench) -> None:
    """One trace for a hybrid and for a model with attention alone: at least 95 % of its hits."""
    found = {}
    for name in ("qwen3_5", "qwen3_vl"):
        one = bench(name, reuse=False)
        engine, rng = Engine(one), random.Random(5)
        if trace == "conversation":
            _converse(one, engine, rng)
        else:
            for number in range(20):
                prompt = one.prompt(4, [(0, number % 2)], num_text=20)
                prompt = replace(prompt, ids=prompt.ids[:-5])  # to the image's end
                prompt = with_tail(one, prompt, number, rng.randint(6, 12))
                engine.run(one.job(f"{number}", prompt, ignore_eos=True))
        found[name] = engine.scheduler.stats.num_prefix_hit_tokens
    assert found["qwen3_5"] >= 0.95 * found["qwen3_vl"] > 0


def _converse(one: Bench, engine: Engine, rng: random.Random) -> None:
    """Three chats of four turns, all of them in each round, each about an image of its own."""
    chats = {number: one.prompt(4, [(0, number)], num_text=20) for number in range(3)}
    for turn in range(4):
        jobs = {
            number: one.job(f"{number}-{turn}", prompt, ignore_eos=True)
            for number, prompt in chats.items()
        }
        engine.run(*jobs.values())
        for number, job in jobs.items():
            said = replace(chats[number], ids=list(job.tokens))
            chats[number] = with_tail(one, said, turn, rng.randint(4, 12))


def test_a_pool_of_snapshots_has_its_planned_bytes(bench) -> None:
    one = bench("qwen3_5", reuse=False)
    pool = StatePool(one.runner.states.shapes, 5, torch.device("cpu"), num_snapshots=7)
    assert pool.size_bytes == 12 * one.runner.states.slot_bytes
