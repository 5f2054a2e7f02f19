"""From an unexpanded prompt to the sequence the model sees: the engine's half of placeholders.

Prompts cross the wire with one placeholder token per item; the ids it expands to are stored with
the item's value. Called by `core` when all values of a request are there. Pure; the ids and
placements come from a peer, so each is checked as it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.plan.errors import ContextLengthExceeded, InvalidRequest
from foveal_runtime.plan.media import MMHash, PlaceholderRange
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import ItemHeader, read_header
from foveal_runtime.wire.messages import RequestBody


def splice(
    token_ids: Sequence[int],
    placements: Sequence[tuple[int, int]],
    items: Sequence[tuple[MMHash, ItemHeader]],
    *,
    max_tokens: int,
) -> tuple[list[int], tuple[MMInput, ...]]:
    """Replaces each placeholder by its item's replacement ids.

    Args:
        token_ids: the prompt with one token per item occurrence.
        placements: (index into token_ids, index into items), ascending in the first.
        items: the request's distinct items.
        max_tokens: longest expanded prompt allowed; checked before anything is built.

    Returns:
        expanded ids, and one MMInput per occurrence in prompt order.

    Raises:
        ContextLengthExceeded: the expanded prompt is longer than max_tokens.
        InvalidRequest: placements that do not fit the prompt or the items.
    """
    _check(len(token_ids), placements, len(items))
    length = len(token_ids)
    for _, item in placements:
        length += len(items[item][1].replacement) - 1
    if length > max_tokens:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {length} tokens after its media items are expanded, "
            f"and this model's maximum context length is {max_tokens} tokens, one of them of an "
            "answer: shorten the prompt or send fewer or smaller media items",
            param="messages",
        )
    out: list[int] = []
    inputs: list[MMInput] = []
    begin = 0
    for index, item in placements:
        out.extend(token_ids[begin:index])
        mm_hash, header = items[item]
        place = PlaceholderRange(len(out), len(header.replacement), header.embed_runs)
        inputs.append(MMInput(mm_hash, header.modality, place))
        out.extend(header.replacement)
        begin = index + 1
    out.extend(token_ids[begin:])
    assert len(out) == length
    return out, tuple(inputs)


def _check(num_tokens: int, placements: Sequence[tuple[int, int]], num_items: int) -> None:
    last = -1
    for index, item in placements:
        if not last < index < num_tokens:
            raise InvalidRequest(
                f"placement at token {index} is out of order or outside the prompt of "
                f"{num_tokens} tokens",
                param="placements",
            )
        if not 0 <= item < num_items:
            raise InvalidRequest(
                f"placement names item {item}, the request has {num_items}", param="placements"
            )
        last = index


def read_tokens(body: RequestBody, vocab_size: int) -> tuple[list[int], list[int]]:
    """The unexpanded prompt, and the outputs of earlier attempts.

    Raises InvalidRequest for an id outside the vocabulary, which would fail the whole step in the
    model. Placeholders may be anything. Raises DecodeError.
    """
    prompt = codec.unpack_tokens(body.token_ids, body.wide)
    emitted = codec.unpack_tokens(body.emitted, body.wide)
    if max(prompt, default=0) < vocab_size and max(emitted, default=0) < vocab_size:
        return prompt, emitted
    placed = {index for index, _ in body.placements}
    bad = [t for i, t in enumerate(prompt) if t >= vocab_size and i not in placed]
    bad += [token for token in emitted if token >= vocab_size]
    if bad:
        raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {vocab_size}")
    return prompt, emitted


def read_items(
    values: Mapping[MMHash, memoryview], vocab_size: int
) -> list[tuple[MMHash, ItemHeader]]:
    """The headers of serialised items. Raises InvalidRequest, BadItem."""
    items = [(mm_hash, read_header(value)) for mm_hash, value in values.items()]
    for _, header in items:
        _check_replacement(header, vocab_size)
    return items


def _check_replacement(header: ItemHeader, vocab_size: int) -> None:
    """An item's own ids, which an injector may have chosen, are in the vocabulary too. Those that
    encoder outputs stand in for may be anything."""
    ids = header.replacement
    if max(ids, default=0) < vocab_size:
        return
    covered = {i for start, length in header.embed_runs for i in range(start, start + length)}
    bad = [token for i, token in enumerate(ids) if token >= vocab_size and i not in covered]
    if bad:
        raise InvalidRequest(
            f"a media item expands to token id {bad[0]}, outside the vocabulary of {vocab_size}"
        )
