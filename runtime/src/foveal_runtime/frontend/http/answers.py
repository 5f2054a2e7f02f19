"""Deltas to OpenAI's JSON: usage, log probabilities, accumulated choices. No I/O.

Log probabilities become JSON token by token: as Python objects they would take four times as much.
Used by chat.py and completions.py for streams and whole answers alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.grammars.reader import CallPiece
from foveal_runtime.frontend.http.asgi.json_bodies import encode_json
from foveal_runtime.frontend.items.prepared import PreparedItem
from foveal_runtime.frontend.protocol.requests import StreamOptions
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.wire.codec import unpack_tokens
from foveal_runtime.wire.messages import FirstOutput, TokenLogprobs

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


@dataclass(slots=True)
class Tally:
    """Token counts of one HTTP request. `prompts` are counted once, whatever n is."""

    num_choices: int = 1
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, index: int, delta: Delta) -> None:
        self.num_completion_tokens += delta.num_tokens
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        if delta.first is not None:
            prompt = index // self.num_choices
            known = self._prompts.get(prompt)
            cached = delta.first.num_cached_tokens
            self._prompts[prompt] = (
                delta.first.num_prompt_tokens,
                cached if known is None else min(cached, known[1]),
            )

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(tokens for tokens, _ in self._prompts.values())
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt + self.num_completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }
        if self.num_reasoning_tokens:
            details = {"reasoning_tokens": self.num_reasoning_tokens}
            usage["completion_tokens_details"] = details
        return usage


def chunk_usage(options: StreamOptions | None, tally: Tally) -> dict[str, Any]:
    """What a chunk before the last says of the usage: nothing unless it is asked for, null unless
    every chunk is to have it."""
    if options is None or not options.include_usage:
        return {}
    return {"usage": tally.usage() if options.continuous_usage_stats else None}


def cache_usage(first: FirstOutput | None, items: Sequence[PreparedItem]) -> dict[str, Any] | None:
    """What the caches did for a request: an item that was neither processed nor sent was a hit of
    the processor cache and of the IPC cache. Times are seconds in the engine."""
    if first is None:
        return None
    return {
        "items": [
            {
                "modality": MODALITIES[item.modality],
                "bytes": item.size_bytes,
                "processed": item.cost.was_processed,
                "sent": item.cost.was_sent,
            }
            for item in items
        ],
        "encoder_hits": first.num_encoder_hits,
        "encoded": first.num_encoded,
        "queue_seconds": first.queue_seconds,
        "prefill_seconds": first.prefill_seconds,
    }


@dataclass(slots=True)
class Answer:
    """One choice, accumulated."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first: FirstOutput | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None
    reasonings: list[str] = field(default_factory=list)
    pieces: list[CallPiece] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.reasonings.append(delta.reasoning)
        self.pieces.extend(delta.calls)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.first is not None:
            self.first = delta.first
        if delta.finish_reason:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def num_scores(self) -> int:
        """Log probabilities of its tokens, alternatives included, and of its prompt."""
        prompt = self.first.prompt_logprobs if self.first is not None else ()
        return sum(1 + len(one.top_ids) for one in (*prompt, *self.logprobs) if one is not None)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)


def joined_calls(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """One piece for each call."""
    found: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return [
        CallPiece(index, parts[0].id, parts[0].name, "".join(one.arguments for one in parts))
        for index, parts in found.items()
    ]


def call_json(call: CallPiece, *, in_stream: bool) -> dict[str, Any]:
    """OpenAI's form; in a stream, only a call's first piece has its id and name."""
    if in_stream and not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    head = {"index": call.index} if in_stream else {}
    function = {"name": call.name, "arguments": call.arguments}
    return {**head, "id": call.id, "type": "function", "function": function}


def token_name(
    tokenizer: TextTokenizer, token_id: int, as_id: bool, *, starts: bool = False
) -> str:
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id, starts=starts)


def num_chars(tokenizer: TextTokenizer, token_id: int, *, starts: bool = False) -> int:
    """Characters that the token begins: one of several bytes counts with its first."""
    return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token_id, starts=starts))


def _entry(
    tokenizer: TextTokenizer, token_id: int, logprob: float, as_ids: bool, starts: bool
) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id, as_ids, starts=starts),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id, starts=starts)),
    }


def chat_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Iterable[int],
    logprobs: Iterable[TokenLogprobs],
    *,
    as_ids: bool = False,
    starts: bool = False,
) -> dict[str, Any]:
    """`as_ids`: tokens are named by their ids; `starts`: the first one is the text's first."""
    content: list[msgspec.Raw] = []
    for token_id, found in zip(token_ids, logprobs, strict=False):
        begins = starts and not content
        entry = _entry(tokenizer, token_id, found.logprob, as_ids, begins)
        entry["top_logprobs"] = [
            _entry(tokenizer, top, value, as_ids, begins)
            for top, value in zip(found.top_ids, found.top_logprobs, strict=True)
        ]
        content.append(msgspec.Raw(encode_json(entry)))
    return {"content": content}


def text_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Iterable[int],
    logprobs: Iterable[TokenLogprobs | None],
    offsets: Iterable[int],
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The older format of text completions. `offsets` are the tokens' positions in the text;
    `as_ids`: tokens are named by their ids. Of alternatives with one name, as parts of characters
    have it, the token itself counts, or else the most likely."""
    out: dict[str, Any] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    for token_id, found, offset in zip(token_ids, logprobs, offsets, strict=False):
        name = token_name(tokenizer, token_id, as_ids)
        out["tokens"].append(name)
        out["text_offset"].append(offset)
        if found is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        out["token_logprobs"].append(finite(found.logprob))
        top = {name: finite(found.logprob)}
        for top_id, value in zip(found.top_ids, found.top_logprobs, strict=True):
            top.setdefault(token_name(tokenizer, top_id, as_ids), finite(value))
        out["top_logprobs"].append(msgspec.Raw(encode_json(top)))
    return out


def prompt_logprobs(tokenizer: TextTokenizer, first: FirstOutput) -> list[msgspec.Raw | None]:
    """Per prompt token: None for the first, else token id -> logprob, rank and text."""
    out: list[msgspec.Raw | None] = []
    for token_id, found in zip(first.prompt_logprob_ids, first.prompt_logprobs, strict=False):
        if found is None:
            out.append(None)
            continue
        entry: dict[str, dict[str, Any]] = {}
        for rank, (top_id, value) in enumerate(
            zip(found.top_ids, found.top_logprobs, strict=True), start=1
        ):
            entry[str(top_id)] = _prompt_entry(tokenizer, top_id, value, rank)
        entry[str(token_id)] = _prompt_entry(tokenizer, token_id, found.logprob, found.rank)
        out.append(msgspec.Raw(encode_json(entry)))
    return out


def _prompt_entry(
    tokenizer: TextTokenizer, token_id: int, logprob: float, rank: int
) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": tokenizer.token_text(token_id),
    }


def expanded_prompt(first: FirstOutput | None, sent: list[int]) -> list[int]:
    """The prompt's ids with media expanded, where the engine echoed them."""
    if first is None or not first.prompt_token_ids:
        return sent
    return unpack_tokens(first.prompt_token_ids, first.prompt_wide)
