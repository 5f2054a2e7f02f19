"""Chooses one token per row of logits; the last thing a step does on the model side.

Called by the runner with the logits of the rows that sample. Order of effects, as vLLM's:
min_tokens mask, logit_bias, penalties, allowed tokens, grammar, temperature, min_p, top_k, top_p.
Logprobs are those of the raw model distribution, before any of it.

Randomness is a counter, never a stream: the token at output index i follows from (seed, i) and the
logits alone. So it does not matter what else is in the batch, and a request that moves to another
engine after k tokens goes on as it would have. Tokens are picked by inverse CDF in vocabulary
order (in order of probability, a rounding difference that swaps two near-equal tokens would move
everything after them). Never raises for one request's sake: see `sample`.

`launch` only gives the device work; nothing waits until `Draw.finish` reads what came back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch

from foveal_runtime.engine.types.step import Sampled
from foveal_runtime.model.device import Device
from foveal_runtime.model.sampling.grammar import Grammars, forbidden
from foveal_runtime.model.sampling.logit_rules import adjust_row, keep_mask, needs_adjusting
from foveal_runtime.model.sampling.logprobs import ROWS_AT_ONCE, Scores
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.sampling import SamplingParams

NO_TOKEN_LEFT = (
    "the request's options leave no token to choose: allowed_token_ids, bad_words, min_tokens "
    "and what binds the output to a form exclude all of them"
)
NEVER = -1
"""A guess that no draw equals."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SampledSequence(Protocol):
    """What the sampler reads of a sequence; the runner's request state satisfies it."""

    @property
    def request_id(self) -> str: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def output_token_ids(self) -> Sequence[int]: ...

    @property
    def scratch(self) -> dict[str, object]: ...


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


class Draw:
    """Tokens that the device is choosing.

    Attributes:
        ids: i64 (n) on the device, always inside the vocabulary; the next step may read them.
        tensors: what `finish` needs on the host.
        impossible: of those that `finish` found to fail, whose own options are why.
    """

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        ids: torch.Tensor,
        computed: torch.Tensor,
        left: torch.Tensor,
        failures: dict[str, str],
        guesses: Sequence[int | None],
    ) -> None:
        self.ids = ids
        self._guesses = guesses
        self.failures = failures
        self.request_ids = [s.request_id for s in sequences]
        self.scores = Scores()
        self.scored: list[tuple[int, int]] = []  # (row, number of top logprobs), as in `scores`
        self._computed = computed
        self._left = left
        self.impossible: list[str] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.ids, self._computed, self._left, *self.scores.tensors]

    def finish(self, arrays: Sequence[np.ndarray], failed: dict[str, str]) -> list[Sampled]:
        """Results in order, from the arrays that became of `tensors`; see `Sampler.sample`."""
        ids, computed, left = (array.tolist() for array in arrays[:3])
        results = [Sampled(r, i) for r, i in zip(self.request_ids, ids, strict=True)]
        for (row, count), one in zip(self.scored, self.scores.read(arrays[3:]), strict=True):
            result = results[row]
            result.logprob, result.rank = one.logprob, one.rank
            result.top_ids, result.top_logprobs = one.top_ids[:count], one.top_logprobs[:count]
        counting, counts = [], False
        for row, guess in enumerate(self._guesses):
            counts = guess is None or (counts and ids[row - 1] == guess)
            if counts:
                counting.append(results[row])
                name = self.request_ids[row]
                if not left[row] and name not in self.failures:
                    why = NO_TOKEN_LEFT if computed[row] else "the model's logits are not finite"
                    self.failures[name] = why
                    self.impossible += [name] if computed[row] else []
        failed.update(self.failures)
        return [r for r in counting if r.request_id not in self.failures]


class Sampler:
    """Stateless but for the model's end-of-sequence ids and compiled grammars; without
    `grammars` a request that has one fails."""

    def __init__(self, eos_token_ids: Collection[int], grammars: Grammars | None = None) -> None:
        self._eos = tuple(eos_token_ids)
        self._grammars = grammars

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SampledSequence],
        failed: dict[str, str] | None = None,
    ) -> list[Sampled]:
        """One token for each sequence, in order. Waits for them.

        `logits` is (n, V), any float type, any device, unchanged afterwards. A row that cannot be
        sampled (NaN, nothing left after masks, an option that names a token outside the vocabulary)
        is left out and its request gets a one-line reason in `failed`; without `failed` it raises
        EngineFailure.
        """
        if not sequences:
            return []
        device = Device(logits.device)
        draw = self.launch(logits, sequences, device)
        failures: dict[str, str] = {}
        results = draw.finish(device.fetch(draw.tensors).wait(), failures)
        if failures and failed is None:
            raise EngineFailure("; ".join(f"{k}: {v}" for k, v in failures.items()))
        if failed is not None:
            failed.update(failures)
        return results

    def launch(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SampledSequence],
        device: Device,
        guesses: Sequence[int | None] = (),
    ) -> Draw:
        """Starts what `sample` does. `sequences` is not empty. `guesses`: for each row, what the
        one before must have drawn for this one's token to count; None: it counts in any case."""
        assert logits.shape[0] == len(sequences) > 0
        counting = list(guesses) or [None] * len(sequences)
        failures: dict[str, str] = {}
        adjusted = self._adjust(logits, sequences, counting, failures, device)
        best, ids = logits.max(dim=-1)
        computed = torch.isfinite(best)
        for row, values in adjusted.items():
            best[row], ids[row] = values.max(dim=-1)
        # Rows without a finite maximum are drawn, too: who they are is known on the device only.
        drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature > 0]
        for low in range(0, len(drawn), ROWS_AT_ONCE):
            self._draw(logits, sequences, drawn[low : low + ROWS_AT_ONCE], adjusted, ids, device)
        left = torch.isfinite(best) if adjusted else computed
        draw = Draw(sequences, ids, computed, left, failures, counting)
        self._score(logits, sequences, draw, device)
        return draw

    def _adjust(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SampledSequence],
        guesses: list[int | None],
        failures: dict[str, str],
        device: Device,
    ) -> dict[int, torch.Tensor]:
        """Changed copies (V,) float32 of the rows whose options change logits."""
        adjusted = {}
        for i, sequence in enumerate(sequences):
            params, outputs = sequence.sampling, sequence.output_token_ids
            if not needs_adjusting(params, len(outputs)):
                continue
            row = logits[i].to(torch.float32, copy=True)
            try:
                adjust_row(row, params, sequence.prompt_token_ids, outputs, self._eos, device)
            except ValueError as error:
                failures[sequence.request_id] = str(error)
            adjusted[i] = row
        self._mask(sequences, guesses, adjusted, failures, device)
        return adjusted

    def _mask(
        self,
        sequences: Sequence[SampledSequence],
        guesses: list[int | None],
        adjusted: dict[int, torch.Tensor],
        failures: dict[str, str],
        device: Device,
    ) -> None:
        """Leaves only the tokens that a row's grammar allows; all rows' masks in one upload. The
        row of a guess that it does not allow is not to count."""
        found: dict[int, np.ndarray] = {}
        for i in adjusted:
            sequence, params = sequences[i], sequences[i].sampling
            if not params.grammar:
                continue
            try:
                if self._grammars is None:
                    raise ValueError("this engine binds no output to a grammar")
                found[i] = self._grammars.words(
                    sequence, params.grammar, sequence.output_token_ids, params.min_tokens
                )
            except ValueError as error:
                if guesses[i] is None:
                    failures[sequence.request_id] = str(error)
                else:
                    guesses[i] = NEVER
        if found:
            rows = list(found)
            masks = forbidden(np.stack(list(found.values())), len(adjusted[rows[0]]), device)
            for i, mask in zip(rows, masks, strict=True):
                adjusted[i].masked_fill_(mask, -torch.inf)

    def _draw(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SampledSequence],
        rows: list[int],
        adjusted: dict[int, torch.Tensor],
        ids: torch.Tensor,
        device: Device,
    ) -> None:
        """Writes the tokens of rows with a temperature to `ids`, by inverse CDF in float64."""
        params = [sequences[i].sampling for i in rows]
        index, temperatures, draws = device.upload(
            np.array(rows, np.int64),
            np.array([p.temperature for p in params], np.float32),
            np.array([uniform(p.seed, len(sequences[i].output_token_ids))
                      for p, i in zip(params, rows, strict=True)], np.float64),
        )  # fmt: skip
        work = logits[index].float()
        for place, i in enumerate(rows):
            if i in adjusted:
                work[place] = adjusted[i]
        work -= work.max(dim=-1, keepdim=True).values
        weights = work.div_(temperatures[:, None]).exp_()
        mask = keep_mask(weights, params, device)
        if mask is not None:
            weights.masked_fill_(~mask, 0.0)
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cdf[:, -1]
        # Rounding may carry u * total up to total, past the last token.
        target = torch.minimum(total * draws, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
        ids.index_copy_(0, index, tokens.clamp_(max=logits.shape[1] - 1))

    def _score(
        self, logits: torch.Tensor, sequences: Sequence[SampledSequence], draw: Draw, device: Device
    ) -> None:
        vocab = logits.shape[1]
        scored, named = [], {}
        for i, sequence in enumerate(sequences):
            if sequence.sampling.logprobs < 0:
                continue
            tokens = sequence.sampling.logprob_token_ids
            bad = next((token for token in tokens if not 0 <= token < vocab), None)
            if bad is not None:
                text = f"logprob_token_ids names token {bad}; the vocabulary has {vocab}"
                draw.failures.setdefault(sequence.request_id, text)
                continue
            scored.append(i)
            if tokens:
                named[i] = tokens
        for rows in ([i for i in scored if i not in named], list(named)):
            if not rows:
                continue
            wanted = [sequences[i].sampling.logprobs for i in rows]
            draw.scored += zip(rows, wanted, strict=True)
            lists = [named.get(i, ()) for i in rows]  # short ones are filled up with any token
            most = max(map(len, lists))
            filled = np.array([(*t, *[0] * (most - len(t))) for t in lists], np.int64)
            there, tokens_there = device.upload(np.array(rows, np.int64), filled)
            for low in range(0, len(rows), ROWS_AT_ONCE):
                part = slice(low, low + ROWS_AT_ONCE)
                index = there[part]
                chosen = tokens_there[part] if rows[0] in named else None
                draw.scores.add(logits[index], draw.ids[index], max(wanted[part]), chosen)
