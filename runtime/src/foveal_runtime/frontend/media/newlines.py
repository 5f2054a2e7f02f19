"""Newlines around a placeholder, merged with their neighbours as the tokenizer would merge them.

Gemma 3 writes every image between blank lines, and its tokenizer has one token per run of
newlines: "user\\n" before an image becomes one token of three newlines. An item's replacement must
not depend on its neighbours, so those newlines belong to the prompt, not to the item. Pure; used by
placement (every request) and by processors (the proof at start).
"""

from __future__ import annotations

from collections.abc import Sequence


def surround(
    token_ids: Sequence[int], placeholder: int, run_ids: Sequence[int], count: int
) -> list[int]:
    """Adds `count` newlines on both sides of each placeholder.

    `run_ids[n - 1]` is the token of n newlines; runs longer than the table take several tokens.
    """
    lengths = {token: n for n, token in enumerate(run_ids, start=1)}
    out: list[int] = []
    run: list[int] = []
    extra = 0
    for token in token_ids:
        if token in lengths:
            run.append(token)
            continue
        is_item = token == placeholder
        _write(out, run, extra + (count if is_item else 0), lengths, run_ids)
        out.append(token)
        run, extra = [], count if is_item else 0
    _write(out, run, extra, lengths, run_ids)
    return out


def _write(
    out: list[int], run: list[int], extra: int, lengths: dict[int, int], run_ids: Sequence[int]
) -> None:
    """A run of newlines, as it was unless some are added."""
    if not extra:
        out.extend(run)
        return
    left = extra + sum(lengths[token] for token in run)
    while left:
        length = min(left, len(run_ids))
        out.append(run_ids[length - 1])
        left -= length
