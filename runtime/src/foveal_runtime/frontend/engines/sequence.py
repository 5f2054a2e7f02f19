"""One HTTP request's sequences: fan-out of n, engine outputs to text, all of them interleaved.

Driven by chat.py and completions.py. Closing what it returns aborts every sequence; media are
released exactly once, when the last sequence is over. Knows nothing of OpenAI's formats.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from foveal_runtime.frontend.grammars.reader import CallPiece
from foveal_runtime.frontend.items.interfaces import Generator
from foveal_runtime.frontend.items.prepared import PreparedItem, PreparedRequest, ValueSource
from foveal_runtime.frontend.protocol.rules import seed_of_choice
from foveal_runtime.frontend.text.detokenizer import Detokenizer
from foveal_runtime.plan.errors import EngineFailure, from_wire
from foveal_runtime.wire.messages import EngineOutput, FirstOutput, TokenLogprobs

_QUEUE_PER_SEQUENCE = 4


@dataclass(slots=True)
class Delta:
    """What one engine output added to a sequence.

    Attributes:
        num_tokens: output tokens it accounts for, the terminal one included.
        token_ids, logprobs: of those tokens; `logprobs` is empty unless asked for.
        text_tokens: those of all output tokens so far that all text so far stands in.
        first: facts of the prompt, once, with the first delta.
        finish_reason: "" while it goes on, then "stop", "length" or "tool_calls".
        stop_reason: the stop string or stop token id, when one of those ended it.
        reasoning, calls: what stands apart from `text`, before and behind it. Arguments of calls
            come in pieces; "tool_calls" is the finish reason of an output that has any, and all
            of them whole.
        num_reasoning_tokens: of `num_tokens`.
        embedding: f32 bytes, of a prompt that is embedded.
    """

    text: str = ""
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_tokens: range = range(0)
    first: FirstOutput | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    num_reasoning_tokens: int = 0
    embedding: bytes = b""


class _Share:
    """One sequence's hold on a value source; the last of its `holders` to go releases it.
    Releasing twice is releasing once."""

    def __init__(self, source: ValueSource, holders: set[_Share]) -> None:
        self._source = source
        self._holders = holders
        holders.add(self)

    async def value(self) -> bytes | memoryview:
        return await self._source.value()

    def release(self) -> None:
        if self in self._holders:
            self._holders.remove(self)
            if not self._holders:
                self._source.release()


def fan_out(prepared: PreparedRequest, num_choices: int) -> list[PreparedRequest]:
    """`num_choices` requests with ids and seeds of their own, sharing the media, what they cost and
    whether that is counted."""
    holders: list[set[_Share]] = [set() for _ in prepared.items]
    out: list[PreparedRequest] = []
    for index in range(num_choices):
        items: list[PreparedItem] = [
            dataclasses.replace(item, source=_Share(item.source, shared))
            for item, shared in zip(prepared.items, holders, strict=True)
        ]
        sampling = prepared.sampling
        if index:
            seed = seed_of_choice(sampling.seed, index)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        suffix = "" if num_choices == 1 else f"-{index}"
        out.append(
            dataclasses.replace(
                prepared,
                request_id=prepared.request_id + suffix,
                items=items,
                sampling=sampling,
            )
        )
    return out


def release_media(requests: Sequence[PreparedRequest]) -> None:
    for request in requests:
        for item in request.items:
            item.source.release()


async def run_sequence(
    generator: Generator, request: PreparedRequest, detokenizer: Detokenizer, *, include_stop: bool
) -> AsyncGenerator[Delta, None]:
    """Deltas until the sequence ends; the last one has `finish_reason`.

    A stop string ends it here: the engine's side is then aborted by closing it.
    Raises the engine's error as a FovealError.
    """
    async with aclosing(generator.generate(request)) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise from_wire(*output.error)
            if output.finish in ("abort", "error"):
                raise EngineFailure("the engine gave the request up; send it again")
            delta = _to_delta(output, detokenizer, include_stop)
            yield delta
            if delta.finish_reason:
                return
    raise EngineFailure("the engine's answer ended without a finish reason")


def _to_delta(output: EngineOutput, detokenizer: Detokenizer, include_stop: bool) -> Delta:
    shown = output.token_ids
    if output.finish == "stop" and shown and not include_stop:
        shown = shown[:-1]  # the terminal token (EOS or a stop token) counts, but is not text
    piece = detokenizer.push(shown)
    text, stop = piece.text, piece.stop
    num_tokens = len(output.token_ids) if stop is None else piece.num_tokens
    if output.finish and stop is None:
        rest = detokenizer.finish()
        text, stop = text + rest.text, rest.stop
    reasoning, calls, num_reasoning_tokens = detokenizer.take()
    delta = Delta(
        text=text,
        num_tokens=num_tokens,
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_tokens],
        text_tokens=detokenizer.text_tokens,
        first=output.first,
        reasoning=reasoning,
        calls=calls,
        num_reasoning_tokens=num_reasoning_tokens,
        embedding=output.embedding,
    )
    if stop is not None:
        delta.finish_reason, delta.stop_reason = "stop", stop
    elif output.finish:
        has_calls = output.finish == "stop" and detokenizer.num_calls and not detokenizer.is_calling
        delta.finish_reason = "tool_calls" if has_calls else output.finish
        delta.stop_reason = output.stop_token
    return delta


async def merge(
    streams: Sequence[AsyncGenerator[Delta, None]], most: int | None = None
) -> AsyncGenerator[tuple[int, Delta], None]:
    """(index, delta) of all streams as they come, of `most` at a time: the next begins where one
    ends. The first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(
        _QUEUE_PER_SEQUENCE * len(streams[:most])
    )
    waiting = iter(enumerate(streams))

    async def pump() -> None:
        index = 0
        try:
            for index, stream in waiting:
                async with aclosing(stream):
                    async for delta in stream:
                        await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump()) for _ in streams[:most]]
    num_open = len(tasks)
    try:
        while num_open:
            index, found = await queue.get()
            if found is None:
                num_open -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
