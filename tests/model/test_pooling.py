"""Embeddings are pooled from the hidden states that transformers computes, by every way of pooling.

In fp32 on random weights, in chunks of odd sizes, beside streams, after a preemption and after a
prefix hit where one may be used.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.models.vectors import TOLERANCE, deviation, pooled_by_hand

NAMES = ["llama", "qwen2_vl", "gemma3", "qwen2_audio"]
MORE = ["gemma2_softcap", "qwen3_moe", "llava", "qwen3_vl", "paligemma2", "qwen3_asr"]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE)]
)
def test_equals_transformers(name: str, bench) -> None:
    """Embeddings of all kinds in the same steps, some of the prompts cut by the step's budget, one
    thrown back in the middle, and one stream of tokens beside them."""
    one = bench(name, attention="auto")
    items = [(kind, 7 + kind) for kind in one.case.items]
    prompts = {
        "mean": one.prompt(11, items, num_text=9),
        "last": one.prompt(12, items, num_text=21),
        "cls": one.prompt(13, items[:1], num_text=5),
    }
    jobs = {
        kind: one.job(kind, prompt, start, pooling=kind)
        for start, (kind, prompt) in enumerate(prompts.items())
    }
    stream_prompt = one.prompt(14, [], num_text=30)
    stream = one.job("stream", stream_prompt)
    one.driver.run([stream, *jobs.values()], preempt={2: "mean"})
    assert not one.driver.failed
    one.check(stream, stream_prompt)
    for kind, job in jobs.items():
        hidden = one.hidden(prompts[kind])
        assert deviation(job, pooled_by_hand(hidden, kind)) < TOLERANCE, kind
        for other in jobs.keys() - {kind}:
            assert deviation(job, pooled_by_hand(hidden, other)) > 100 * TOLERANCE, (kind, other)


def test_last_goes_on_from_a_prefix_and_the_others_compute_all(bench) -> None:
    """A cached prefix has keys and values, no hidden states: only the last token needs no more."""
    one = bench("qwen2_vl", attention="auto")
    prompt = one.prompt(11, [(kind, 7) for kind in one.case.items], num_text=20)
    reference = one.hidden(prompt)
    for kind in ("last", "mean", "cls"):
        first, second = (one.job(f"{kind}{n}", prompt, pooling=kind) for n in range(2))
        one.driver.run([first])
        one.driver.run([second])
        assert (second.num_cached > 0) == (kind == "last")
        assert deviation(second, pooled_by_hand(reference, kind)) < TOLERANCE


def test_a_prompt_without_finite_hidden_states_fails_alone(bench) -> None:
    one = bench("llama", attention="auto")
    good, bad = one.prompt(11, num_text=9), one.prompt(12, num_text=9)
    odd = next(token for token in bad.ids if token not in good.ids)
    with torch.no_grad():
        one.runner.loaded.core.get_input_embeddings().weight[odd] = float("inf")
    jobs = [one.job("good", good, pooling="mean"), one.job("bad", bad, pooling="mean")]
    one.driver.run(jobs)
    assert jobs[0].embedding
    assert "finite" in one.driver.failed["bad"]
    assert not jobs[1].embedding
