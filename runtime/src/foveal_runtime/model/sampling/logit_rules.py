"""Logit rules: the effect of a request's options on its logits, row by row or batched.

Called by `sampler` only, in its order: `adjust_row` (min_tokens, logit_bias, penalties) on
the raw logits, then temperature, then `keep_mask` (min_p, top_k, top_p). Never chooses a token and
keeps no state: everything follows from the request's parameters and token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from foveal_runtime.model.device import Device
from foveal_runtime.plan.sampling import SamplingParams


def needs_adjusting(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `adjust_row` would change this row's logits."""
    return (
        num_output_tokens < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.allowed_token_ids)
        or bool(params.bad_words)
        or bool(params.grammar)
    )


def adjust_row(
    row: torch.Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    end_ids: Collection[int],
    device: Device,
) -> None:
    """Applies min_tokens, logit_bias, the penalties and the lists of tokens that are allowed or
    not to one row (V,) float32, in place.

    Repetition: logits of tokens seen in prompt or output are divided by the penalty when positive
    and multiplied when negative. Frequency and presence look at output tokens only. `end_ids` are
    masked while fewer than min_tokens outputs exist, but where a grammar has its own say. Raises
    ValueError when logit_bias names a token outside the vocabulary.
    """
    vocab = row.shape[0]
    if len(output_ids) < params.min_tokens and not params.grammar:
        ends = {*end_ids, *params.stop_token_ids}
        row[_index(sorted(i for i in ends if 0 <= i < vocab), device)] = -torch.inf
    if params.logit_bias:
        for token, _ in params.logit_bias:
            if not 0 <= token < vocab:
                raise ValueError(f"logit_bias names token {token}; the vocabulary has {vocab}")
        ids, values = zip(*params.logit_bias, strict=True)
        index, bias = device.upload(np.array(ids, np.int64), np.array(values, np.float32))
        row.index_add_(0, index, bias)
    if params.repetition_penalty != 1.0:
        seen = _index(_unique([*prompt_ids, *output_ids], vocab)[0], device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(output_ids):
        tokens, counts = _unique(output_ids, vocab)
        cost = params.presence_penalty + params.frequency_penalty * counts
        index, change = device.upload(tokens, -cost.astype(np.float32))
        row.index_add_(0, index, change)
    if params.allowed_token_ids:
        mask = np.ones(vocab, np.bool_)
        mask[[i for i in params.allowed_token_ids if 0 <= i < vocab]] = False
        row.masked_fill_(device.upload(mask)[0], -torch.inf)
    banned = [
        word[-1]
        for word in params.bad_words
        if word[-1] < vocab and tuple(output_ids[len(output_ids) - len(word) + 1 :]) == word[:-1]
    ]
    if banned:
        row[_index(banned, device)] = -torch.inf


def _index(ids: Sequence[int] | np.ndarray, device: Device) -> torch.Tensor:
    return device.upload(np.asarray(ids, np.int64))[0]


def _unique(ids: Sequence[int], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids inside the vocabulary (placeholder ids may lie outside) and their counts."""
    array = np.asarray(ids, dtype=np.int64)
    tokens, counts = np.unique(array[(array >= 0) & (array < vocab)], return_counts=True)
    return tokens, counts


def keep_mask(
    weights: torch.Tensor, params: Sequence[SamplingParams], device: Device
) -> torch.Tensor | None:
    """Which tokens survive min_p, then top_k, then top_p over what the first two left.

    `weights` (n, V) are unnormalised probabilities with maximum 1 in each row, after temperature.
    Returns a bool (n, V), or None when no row filters. Tokens that tie with the last survivor
    survive too: the outcome never depends on how a sort orders equals.
    """
    vocab = weights.shape[1]
    top_ks = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if not rows and not any(top_ks) and not any(p.min_p for p in params):
        return None
    floors, column, limited, index, top_ps = device.upload(
        np.array([p.min_p for p in params], np.float32),
        np.array([max(k - 1, 0) for k in top_ks], np.int64),
        np.array([k > 0 for k in top_ks], np.bool_),
        np.array(rows, np.int64),
        np.array([params[i].top_p for i in rows], np.float64),
    )
    if any(top_ks):
        best = weights.topk(max(top_ks), dim=-1).values
        kth = best.gather(1, column[:, None])[:, 0]
        floors = torch.where(limited, torch.maximum(floors, kth), floors)
    if rows:
        floors[index] = _nucleus_floor(weights[index], floors[index], top_ps)
    return weights >= floors[:, None]


def _nucleus_floor(
    weights: torch.Tensor, floors: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """Weight of the last token of the smallest set that holds `top_p` of the mass >= floor."""
    weights = torch.where(weights >= floors[:, None], weights, 0.0)
    if weights.device.type == "cpu":
        rows = zip(weights.numpy(), top_ps.tolist(), strict=True)
        found = weights.new_tensor([nucleus_by_histogram(row, p) for row, p in rows])
    else:
        found = nucleus_by_sort(weights, top_ps)
    return torch.maximum(found, floors)


def nucleus_by_sort(weights: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """The nucleus' least weight, row by row (n, V); what a GPU is good at."""
    best = weights.sort(dim=-1, descending=True).values
    reached = best.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(reached, (top_ps * reached[:, -1])[:, None])
    return best.gather(1, last.clamp(max=best.shape[1] - 1))[:, 0]


def nucleus_by_histogram(weights: np.ndarray, top_p: float) -> float:
    """The same of one row (V,) float32, without sorting it: 30 times faster on a CPU.

    Positive floats are ordered as their bits are, so the upper 16 bits are a bin number; only
    the one bin in which the mass is reached has to be sorted.
    """
    bins = weights.view(np.int32) >> 16
    reached = np.bincount(bins, weights=weights)[::-1].cumsum()
    target = top_p * reached[-1]
    place = int(np.searchsorted(reached, target).clip(max=len(reached) - 1))
    inside = np.sort(weights[bins == len(reached) - 1 - place])[::-1]
    above = reached[place - 1] if place else 0.0
    last = int(np.searchsorted(above + inside.cumsum(dtype=np.float64), target))
    return float(inside[min(last, len(inside) - 1)])
