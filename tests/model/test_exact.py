"""What the comparison with transformers allows: a control for each of its bounds."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.exact import exact_logits, float32_error


def answered(one):
    prompts, jobs = one.staggered()
    one.driver.run([jobs["b"]])
    return jobs["b"], prompts["b"]


@pytest.mark.parametrize("wrong", [1e-4, float("nan"), float("inf")])
def test_where_float32_is_sure_little_is_allowed(wrong: float, bench) -> None:
    one = bench("llama")
    job, prompt = answered(one)
    one.check(job, prompt)
    one.sampler.logits["b", 3] = one.sampler.logits["b", 3] + wrong
    with pytest.raises(AssertionError):
        one.check(job, prompt)


def test_where_float32_is_not_the_bound_is_its_own_error(bench) -> None:
    """In this prompt GELU of numbers below -5 goes through a norm."""
    one = bench("gemma4_text")
    job, prompt = answered(one)
    inputs = one.inputs(job, prompt)
    exact = exact_logits(one.reference, *inputs)
    error = float32_error(one.reference, *inputs, exact)
    assert exact.dtype == torch.float64
    assert error > 5 * one.case.tolerance
    for times, is_near in ((1.9, True), (2.1, False)):
        for i, row in enumerate(exact):
            one.sampler.logits["b", i] = row.float()
        one.sampler.logits["b", 3] = (exact[3] + times * error).float()
        if is_near:
            one.check(job, prompt)
        else:
            with pytest.raises(AssertionError):
                one.check(job, prompt)


def test_nothing_of_a_float64_forward_is_float32(bench) -> None:
    """A value that stayed in float32 would make float64 as inexact as what it judges."""
    one = bench("llava")
    prompt = one.prompt(1, [(0, 7)])
    ids, pixels = torch.tensor([prompt.ids]), one.case.forward_kwargs(prompt)
    assert exact_logits(one.reference, ids, pixels, 0).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    one.reference.lm_head.register_forward_hook(lambda _m, _i, out: out.type(torch.FloatTensor))
    with pytest.raises(TypeError, match="computed in float32"):
        exact_logits(one.reference, ids, pixels, 0)
