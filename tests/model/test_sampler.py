"""The sampler against small straightforward references; each draw is seeded."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from foveal_runtime.model.device import open_device
from foveal_runtime.model.sampling.logit_rules import nucleus_by_histogram, nucleus_by_sort
from foveal_runtime.model.sampling.logprobs import prompt_logprobs
from foveal_runtime.model.sampling.sampler import Sampler, uniform
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.sampling import SamplingParams

EOS = 3
SAMPLER = Sampler([EOS])


@dataclass
class Sequence:
    sampling: SamplingParams
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 5])
    output_token_ids: list[int] = field(default_factory=list)
    request_id: str = "r"
    scratch: dict[str, object] = field(default_factory=dict)


def options(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=64, **kwargs)


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """`count` draws from one row: the same logits at output indices 0..count-1."""
    sequences = [
        Sequence(params, output_token_ids=[0] * i, request_id=str(i)) for i in range(count)
    ]
    out = SAMPLER.sample(logits.expand(count, -1), sequences)
    return Counter(s.token_id for s in out)


def reference(logits: torch.Tensor, sequence: Sequence) -> dict[int, float]:
    """The distribution a request should sample from, in plain Python."""
    p = sequence.sampling
    x = logits.double().tolist()
    if len(sequence.output_token_ids) < p.min_tokens:
        for i in (EOS, *p.stop_token_ids):
            x[i] = -math.inf
    for i, bias in p.logit_bias:
        x[i] += bias
    for i in {*sequence.prompt_token_ids, *sequence.output_token_ids}:
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in Counter(sequence.output_token_ids).items():
        x[i] -= p.frequency_penalty * count + p.presence_penalty
    peak = max(x)
    if p.temperature == 0:
        return {x.index(peak): 1.0}
    mass = {i: math.exp((v - peak) / p.temperature) for i, v in enumerate(x)}
    kept = {i: w for i, w in mass.items() if w >= p.min_p and w > 0}
    order = sorted(kept, key=lambda i: -kept[i])
    if p.top_k:
        order = order[: p.top_k]
    total, run, nucleus = sum(kept[i] for i in order), 0.0, []
    for i in order:
        nucleus.append(i)
        run += kept[i]
        if run >= p.top_p * total:
            break
    return {i: kept[i] / sum(kept[j] for j in nucleus) for i in nucleus}


def test_greedy_is_argmax_and_takes_the_first_of_equals() -> None:
    logits = random_logits(5, 32).to(torch.bfloat16)
    logits[2] = 0.0
    before = logits.clone()
    sequences = [Sequence(options(temperature=0), request_id=str(i)) for i in range(5)]
    out = SAMPLER.sample(logits, sequences)
    assert [s.token_id for s in out] == logits.float().argmax(-1).tolist()
    assert out[2].token_id == 0
    assert [s.request_id for s in out] == list("01234")
    assert torch.equal(logits, before)


def test_a_token_depends_on_seed_index_and_logits_not_on_the_batch() -> None:
    logits = random_logits(16, 512, seed=7)
    kinds = [options(seed=i, top_p=0.9 if i % 2 else 1.0, top_k=20 if i % 3 else 0,
                     repetition_penalty=1.2 if i % 4 == 0 else 1.0,
                     temperature=0.0 if i % 5 == 0 else 1.1)
             for i in range(16)]  # fmt: skip
    sequences = [
        Sequence(p, output_token_ids=list(range(i)), request_id=str(i)) for i, p in enumerate(kinds)
    ]
    whole = {s.request_id: s.token_id for s in SAMPLER.sample(logits, sequences)}
    for i, sequence in enumerate(sequences):
        assert SAMPLER.sample(logits[i : i + 1], [sequence])[0].token_id == whole[str(i)]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = SAMPLER.sample(logits[order], [sequences[i] for i in order])
    assert {s.request_id: s.token_id for s in shuffled} == whole


def test_a_resumed_request_continues_identically() -> None:
    """Tokens after a move to another engine are those of the undisturbed run."""
    table = random_logits(64, 64, seed=3)  # the "model": next logits by last token

    def run(outputs: list[int], until: int) -> list[int]:
        outputs = list(outputs)
        while len(outputs) < until:
            last = outputs[-1] if outputs else 0
            state = Sequence(options(seed=99, frequency_penalty=0.3), output_token_ids=outputs)
            outputs.append(Sampler([EOS]).sample(table[last : last + 1], [state])[0].token_id)
        return outputs

    full = run([], 40)
    assert run(full[:17], 40) == full
    assert len(set(full)) > 10


def test_uniform_is_uniform_and_uncorrelated_over_seeds_and_indices() -> None:
    grid = torch.tensor([[uniform(seed, i) for i in range(200)] for seed in range(200)])
    assert grid.min() > 0
    assert grid.max() < 1
    counts = torch.histc(grid, 20, 0, 1)
    chi2 = float(((counts - 2000) ** 2 / 2000).sum())
    assert chi2 < 45, chi2  # 19 degrees of freedom: p < 0.001 above 43.8
    for pair in (grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:]):
        both = torch.stack([p.reshape(-1) for p in pair])
        assert abs(torch.corrcoef(both)[0, 1]) < 0.02
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "filters together": {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": ((4, 2.5), (9, -100.0))},
    "min_tokens": {"min_tokens": 100_000, "stop_token_ids": (7, 500)},
    "all": {"temperature": 0.9, "top_k": 10, "top_p": 0.95, "repetition_penalty": 1.2,
            "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": ((2, 1.0),)},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_drawn_tokens_follow_the_reference_distribution(name: str) -> None:
    vocab, count = 16, 4000
    logits = random_logits(1, vocab, seed=11)
    history = [1, 4, 4, 9, 12]
    params = [options(seed=seed, **OPTIONS[name]) for seed in range(count)]
    sequences = [
        Sequence(p, output_token_ids=history, request_id=str(i)) for i, p in enumerate(params)
    ]
    want_params = options(**{**OPTIONS[name], "stop_token_ids": (7,)})
    want = reference(logits[0], Sequence(want_params, output_token_ids=history))
    got = Counter(s.token_id for s in SAMPLER.sample(logits.expand(count, -1), sequences))
    assert set(got) <= set(want)
    chi2 = sum((got[i] - count * p) ** 2 / (count * p) for i, p in want.items() if count * p > 1)
    assert chi2 < 3.5 * len(want) + 8, (chi2, got, want)


def test_consecutive_indices_of_one_seed_follow_softmax() -> None:
    logits, count = random_logits(1, 8, seed=5), 4000
    got = draw_many(logits, options(seed=1234), count)
    want = logits[0].softmax(-1).tolist()
    chi2 = sum((got[i] - count * p) ** 2 / (count * p) for i, p in enumerate(want))
    assert chi2 < 26, chi2  # 7 degrees of freedom, p < 0.0005


def test_greedy_obeys_masks_penalties_and_bias() -> None:
    logits = torch.zeros(1, 16)
    logits[0, EOS], logits[0, 7], logits[0, 9], logits[0, 2] = 9.0, 8.0, 7.0, 6.9
    cases = [
        (options(temperature=0), EOS),
        (options(temperature=0, min_tokens=1), 7),
        (options(temperature=0, min_tokens=1, stop_token_ids=(7,)), 9),
        (options(temperature=0, logit_bias=((2, 5.0),)), 2),
        (options(temperature=0, min_tokens=1, logit_bias=((EOS, 100.0),)), 7),
    ]
    out = SAMPLER.sample(
        logits.expand(len(cases), -1),
        [Sequence(p, request_id=str(i)) for i, (p, _) in enumerate(cases)],
    )
    assert [s.token_id for s in out] == [want for _, want in cases]


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 3, "stop_token_ids": (0, 4)},
        {"bad_words": ((0,), (4,))},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_every_option_reaches_the_first_token_and_ignores_ids_behind_the_last(changes) -> None:
    """A logit between 0 and 1 counts as positive for the repetition penalty."""
    logits = torch.tensor([[0.5, 0.4, 0.0, -1.0]])
    sequence = Sequence(options(temperature=0, **changes), [0, 4], [0, 4])
    assert SAMPLER.sample(logits, [sequence])[0].token_id == 1


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_both_ways_to_find_a_nucleus_agree(scale: float) -> None:
    """Flat, peaked and tied distributions, with zeros as filters leave them."""
    weights = (random_logits(6, 5000, seed=9) * scale).round(decimals=3)
    weights = (weights - weights.max(-1, keepdim=True).values).exp()
    weights[:, ::7] = 0.0
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999999):
        want = nucleus_by_sort(weights, torch.full((6,), top_p, dtype=torch.float64))
        got = [nucleus_by_histogram(row.numpy(), top_p) for row in weights]
        assert got == want.tolist()


def test_a_wide_nucleus_has_the_right_size() -> None:
    vocab = 6000
    logits = torch.linspace(0, 0.1, vocab)[None]
    got = draw_many(logits, options(seed=5, top_p=0.5), 3000)
    order = logits[0].softmax(-1).double().sort(descending=True).values.cumsum(0)
    size = int((order < 0.5).sum()) + 1
    assert min(got) >= vocab - size
    assert min(got) < vocab - size + 60


def test_top_k_keeps_ties_and_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert set(draw_many(logits, options(top_k=2), 200)) == {0, 1, 2}
    spread = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert set(draw_many(spread, options(top_k=1), 50)) == {0}
    assert set(draw_many(spread, options(top_k=2, top_p=0.7), 200)) == {0, 1}, "of what is left"
    sharp = random_logits(1, 100, seed=2)
    got = draw_many(sharp, options(temperature=1e-6), 50)
    assert set(got) == {int(sharp.argmax())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_distribution(dtype: torch.dtype) -> None:
    logits = random_logits(3, 50, seed=8).to(dtype)
    raw = logits.float().log_softmax(-1)
    params = [
        options(logprobs=5, temperature=0.3, top_k=2, logit_bias=((1, 50.0),)),
        options(logprobs=0),
        options(),
    ]
    first, second, third = SAMPLER.sample(
        logits, [Sequence(p, request_id=str(i)) for i, p in enumerate(params)]
    )
    assert first.token_id == 1
    assert first.logprob == pytest.approx(float(raw[0, 1]))
    assert first.rank == int((raw[0] > raw[0, 1]).sum()) + 1
    best = raw[0].topk(5)
    assert list(first.top_ids) == best.indices.tolist()
    assert list(first.top_logprobs) == pytest.approx(best.values.tolist())
    assert second.logprob == pytest.approx(float(raw[1, second.token_id]))
    assert second.top_ids == ()
    assert (third.logprob, third.rank) == (0.0, 0)


def test_logprobs_of_named_tokens_stand_beside_the_most_likely_of_others() -> None:
    logits = random_logits(4, 50, seed=9)
    raw = logits.log_softmax(-1)
    params = [
        options(logprobs=2),
        options(logprobs=3, logprob_token_ids=(7, 49, 0), temperature=0.0),
        options(),
        options(logprobs=1, logprob_token_ids=(11,)),
    ]
    plain, three, none, one = SAMPLER.sample(
        logits, [Sequence(p, request_id=str(i)) for i, p in enumerate(params)]
    )
    assert list(plain.top_ids) == raw[0].topk(2).indices.tolist()
    assert three.top_ids == (7, 49, 0)
    assert list(three.top_logprobs) == pytest.approx(raw[1][[7, 49, 0]].tolist())
    assert three.logprob == pytest.approx(float(raw[1, three.token_id]))
    assert none.top_ids == ()
    assert one.top_ids == (11,)
    assert list(one.top_logprobs) == pytest.approx([float(raw[3, 11])])


@pytest.mark.parametrize("bad", [8, -1, 1 << 40])
def test_a_named_token_outside_the_vocabulary_fails_its_request_alone(bad: int) -> None:
    sequences = [
        Sequence(options(logprobs=2, logprob_token_ids=(3, bad)), request_id="bad"),
        Sequence(options(logprobs=1, logprob_token_ids=(7,)), request_id="good"),
        Sequence(options(logprobs=1), request_id="plain"),
    ]
    failed: dict[str, str] = {}
    out = SAMPLER.sample(random_logits(3, 8, seed=2), sequences, failed)
    assert [(s.request_id, len(s.top_ids)) for s in out] == [("good", 1), ("plain", 1)]
    assert out[0].top_ids == (7,)
    assert failed == {"bad": f"logprob_token_ids names token {bad}; the vocabulary has 8"}


def test_prompt_logprobs_cover_every_row_and_unknown_ids() -> None:
    logits = random_logits(600, 20, seed=4)
    ids = torch.randint(0, 20, (600,), generator=torch.Generator().manual_seed(4)).tolist()
    ids[17] = 10_000  # an image placeholder outside the vocabulary
    got = prompt_logprobs("r", 32, logits, ids, 2)
    raw = logits.log_softmax(-1)
    assert (got.request_id, got.start, len(got.logprobs)) == ("r", 32, 600)
    assert got.logprobs[17] == -math.inf
    for i in (0, 255, 256, 599):
        assert got.logprobs[i] == pytest.approx(float(raw[i, ids[i]]))
        assert got.ranks[i] == int((raw[i] > raw[i, ids[i]]).sum()) + 1
        assert list(got.top_ids[i]) == raw[i].topk(2).indices.tolist()


def test_a_bad_row_fails_its_request_alone() -> None:
    logits = random_logits(4, 8, seed=6)
    logits[1] = torch.nan
    sequences = [
        Sequence(options(seed=1), request_id="good"),
        Sequence(options(seed=1), request_id="nan"),
        Sequence(options(logit_bias=((8, 1.0),)), request_id="bias"),
        Sequence(options(temperature=0, min_tokens=5, stop_token_ids=tuple(range(8))),
                 request_id="masked"),
    ]  # fmt: skip
    failed: dict[str, str] = {}
    out = SAMPLER.sample(logits, sequences, failed)
    assert [s.request_id for s in out] == ["good"]
    assert set(failed) == {"nan", "bias", "masked"}
    assert "vocabulary has 8" in failed["bias"]
    assert "not finite" in failed["nan"]
    assert "options leave no token" in failed["masked"]
    with pytest.raises(EngineFailure, match="nan: the model's logits"):
        SAMPLER.sample(logits, sequences)


def test_whose_options_leave_no_token_is_told_from_what_was_not_computed() -> None:
    """Both were failures of the engine."""
    logits, device = random_logits(3, 8, seed=6), open_device(torch.device("cpu"))
    logits[:2] = torch.nan
    every = options(min_tokens=5, stop_token_ids=tuple(range(8)))
    given = {"nan": options(), "both": every, "masked": every}
    draw = SAMPLER.launch(logits, [Sequence(p, request_id=n) for n, p in given.items()], device)
    failed: dict[str, str] = {}
    assert draw.finish(device.fetch(draw.tensors).wait(), failed) == []
    assert (draw.impossible, failed.keys()) == (["masked"], given.keys())


def test_nothing_to_sample() -> None:
    assert SAMPLER.sample(torch.zeros(0, 8), []) == []


def test_only_allowed_tokens_are_chosen_and_bad_words_are_not_completed():
    logits = random_logits(1, 20)[0]
    allowed = options(temperature=2.0, allowed_token_ids=(0, 7, 20))
    assert set(draw_many(logits, allowed, 200)) == {0, 7}
    best = int(logits.argmax())
    first = Sequence(options(temperature=0, bad_words=((best,),)))
    assert SAMPLER.sample(logits[None], [first])[0].token_id != best
    word = options(temperature=0, bad_words=((8, 9, best),))
    for outputs, is_banned in (([8, 9], True), ([1, 8, 9], True), ([9], False), ([9, 8], False)):
        found = SAMPLER.sample(logits[None], [Sequence(word, output_token_ids=outputs)])[0]
        assert (found.token_id != best) == is_banned, outputs
