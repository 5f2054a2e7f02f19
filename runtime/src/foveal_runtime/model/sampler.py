"""Chooses one token per row of logits; the last thing a step does on the model side.

Called by the runner with the logits of the rows that sample. Order of effects, as vLLM's:
min_tokens mask, logit_bias, penalties, temperature, min_p, top_k, top_p. Logprobs are those of the
raw model distribution, before any of it.

Randomness is a counter, never a stream: the token at output index i follows from (seed, i) and the
logits alone. So it does not matter what else is in the batch, and a request that moves to another
engine after k tokens goes on as it would have. Tokens are picked by inverse CDF in vocabulary
order (in order of probability, a rounding difference that swaps two near-equal tokens would move
everything after them). Never raises for one request's sake: see `sample`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from foveal_runtime.engine.step import PromptLogprobs, Sampled
from foveal_runtime.model.logit_rules import adjust_row, keep_mask, needs_adjusting
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.sampling import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROWS_AT_ONCE = 32
"""Bounds the float32 and float64 copies of logits: about eight of a piece, not of the batch."""


class SequenceState(Protocol):
    """What the sampler reads of a sequence; the runner's request state satisfies it."""

    @property
    def request_id(self) -> str: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def output_token_ids(self) -> Sequence[int]: ...


def uniform(seed: int, index: int) -> float:
    """The random number of output token `index`: in (0, 1), 52 bits, a pure function."""
    bits = _mix(_mix((seed & _MASK) ^ _GOLDEN) ^ _mix((index + 1) * _GOLDEN & _MASK))
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits whose outputs pass as independent."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """Stateless but for the model's end-of-sequence ids."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos = tuple(eos_token_ids)

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SequenceState],
        failed: dict[str, str] | None = None,
    ) -> list[Sampled]:
        """One token for each sequence, in order.

        `logits` is (n, V), any float type, any device, unchanged afterwards. A row that cannot be
        sampled (NaN, nothing left after masks, a bias outside the vocabulary) is left out and its
        request gets a one-line reason in `failed`; without `failed` it raises EngineFailure.
        """
        assert logits.shape[0] == len(sequences)
        if not sequences:
            return []
        failures: dict[str, str] = {}
        adjusted = self._adjust(logits, sequences, failures)
        best, best_ids = logits.max(dim=-1)
        for row, values in adjusted.items():
            best[row], best_ids[row] = values.max(dim=-1)
        ids: list[int] = best_ids.tolist()
        finite: list[bool] = torch.isfinite(best).tolist()
        drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature > 0 and finite[i]]
        for low in range(0, len(drawn), _ROWS_AT_ONCE):
            rows = drawn[low : low + _ROWS_AT_ONCE]
            for row, token in zip(rows, self._draw(logits, sequences, rows, adjusted), strict=True):
                ids[row] = token
        for ok, sequence in zip(finite, sequences, strict=True):
            if not ok:
                failures.setdefault(
                    sequence.request_id,
                    "no token can be sampled: the model's logits are not "
                    "finite, or every token is masked",
                )
        if failures and failed is None:
            raise EngineFailure("; ".join(f"{k}: {v}" for k, v in failures.items()))
        if failed is not None:
            failed.update(failures)
        results = self._with_logprobs(logits, sequences, ids)
        return [r for r in results if r.request_id not in failures]

    def _adjust(
        self, logits: torch.Tensor, sequences: Sequence[SequenceState], failures: dict[str, str]
    ) -> dict[int, torch.Tensor]:
        """Changed copies (V,) float32 of the rows whose options change logits."""
        adjusted = {}
        for i, sequence in enumerate(sequences):
            params, outputs = sequence.sampling, sequence.output_token_ids
            if not needs_adjusting(params, len(outputs)):
                continue
            row = logits[i].to(torch.float32, copy=True)
            try:
                adjust_row(row, params, sequence.prompt_token_ids, outputs, self._eos)
            except ValueError as error:
                failures[sequence.request_id] = str(error)
            adjusted[i] = row
        return adjusted

    def _draw(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SequenceState],
        rows: list[int],
        adjusted: dict[int, torch.Tensor],
    ) -> list[int]:
        """Tokens of the rows with a temperature, by inverse CDF in float64."""
        params = [sequences[i].sampling for i in rows]
        work = logits[torch.tensor(rows, device=logits.device)].float()
        for place, i in enumerate(rows):
            if i in adjusted:
                work[place] = adjusted[i]
        temperatures = work.new_tensor([p.temperature for p in params])
        work -= work.max(dim=-1, keepdim=True).values
        weights = work.div_(temperatures[:, None]).exp_()
        mask = keep_mask(weights, params)
        if mask is not None:
            weights.masked_fill_(~mask, 0.0)
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        draws = [uniform(p.seed, len(sequences[i].output_token_ids))
                 for p, i in zip(params, rows, strict=True)]  # fmt: skip
        total = cdf[:, -1]
        target = total * torch.tensor(draws, dtype=torch.float64, device=cdf.device)
        # Rounding may carry u * total up to total, past the last token.
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
        tokens: list[int] = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].tolist()
        return tokens

    def _with_logprobs(
        self, logits: torch.Tensor, sequences: Sequence[SequenceState], ids: list[int]
    ) -> list[Sampled]:
        results = [Sampled(s.request_id, i) for s, i in zip(sequences, ids, strict=True)]
        rows = [i for i, s in enumerate(sequences) if s.sampling.logprobs >= 0]
        for low in range(0, len(rows), _ROWS_AT_ONCE):
            self._fill_logprobs(logits, sequences, ids, rows[low : low + _ROWS_AT_ONCE], results)
        return results

    def _fill_logprobs(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SequenceState],
        ids: list[int],
        rows: list[int],
        results: list[Sampled],
    ) -> None:
        wanted = [sequences[i].sampling.logprobs for i in rows]
        picked = logits[torch.tensor(rows, device=logits.device)]
        found = _logprobs(picked, [ids[i] for i in rows], max(wanted))
        for place, (i, count) in enumerate(zip(rows, wanted, strict=True)):
            one = results[i]
            one.logprob, one.rank = found.logprobs[place], found.ranks[place]
            one.top_ids = found.top_ids[place][:count]
            one.top_logprobs = found.top_logprobs[place][:count]


def prompt_logprobs(
    request_id: str, start: int, logits: torch.Tensor, next_ids: Sequence[int], num_top: int
) -> PromptLogprobs:
    """Logprobs of the prompt tokens `next_ids`, where row i of `logits` (m, V) is the model's
    output at position start + i and so speaks of the token at start + i + 1."""
    assert logits.shape[0] == len(next_ids)
    result = PromptLogprobs(request_id, start, (), (), (), ())
    for low in range(0, len(next_ids), _ROWS_AT_ONCE):
        high = low + _ROWS_AT_ONCE
        part = _logprobs(logits[low:high], next_ids[low:high], num_top)
        result.logprobs += part.logprobs
        result.ranks += part.ranks
        result.top_ids += part.top_ids
        result.top_logprobs += part.top_logprobs
    return result


def _logprobs(logits: torch.Tensor, ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """log_softmax of the raw rows: the chosen ids', their rank (1 = most likely) and the top."""
    values = logits.float().log_softmax(dim=-1)
    # An item's placeholder id may lie outside the vocabulary; it has no probability.
    known = [0 <= i < values.shape[1] for i in ids]
    index = torch.tensor([i if ok else 0 for i, ok in zip(ids, known, strict=True)],
                         device=values.device)  # fmt: skip
    chosen = values.gather(1, index[:, None])
    ranks = (values > chosen).sum(dim=-1) + 1
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    pairs = zip(chosen[:, 0].tolist(), ranks.tolist(), known, strict=True)
    scored = [(value, rank) if ok else (float("-inf"), 0) for value, rank, ok in pairs]
    return PromptLogprobs(
        "",
        0,
        tuple(value for value, _ in scored),
        tuple(rank for _, rank in scored),
        tuple(map(tuple, top.indices.tolist())),
        tuple(map(tuple, top.values.tolist())),
    )
