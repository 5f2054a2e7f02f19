"""Common part of the other APIs: a chat run from translated fields, its answer by a writer."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import islice
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.grammars.reader import CallPiece
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.asgi.json_bodies import sse
from foveal_runtime.frontend.http.asgi.replies import (
    describe_validation,
    json_response,
    named_relaxed,
    start_stream,
    until_disconnect,
)
from foveal_runtime.frontend.http.chat import ChatRun, logprobs_of, plan_chat
from foveal_runtime.frontend.http.service import RequestScope, Service, open_run
from foveal_runtime.frontend.http.tokens import prompt_tokens
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest
from foveal_runtime.plan.errors import FovealError, InvalidRequest, Unsupported
from foveal_runtime.wire.messages import TokenLogprobs

_SHAPING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "add_generation_prompt": (True,),
}
"""Options of chat completions whose answers the other APIs have no place for, and the values that
mean "not used"."""

M = TypeVar("M", bound=BaseModel)
Event = dict[str, Any]


class Writer(Protocol):
    """Writes one API's events. Every event has its `type`."""

    @abstractmethod
    def begin(self, tally: Tally) -> list[Event]:
        """Before the first text; the prompt's tokens are known."""

    @abstractmethod
    def reasoning(self, text: str) -> list[Event]: ...

    @abstractmethod
    def text(self, text: str, scores: Sequence[Any] = ()) -> list[Event]:
        """`scores`: the log probabilities of its tokens, where the request asks for them."""

    @abstractmethod
    def call(self, piece: CallPiece) -> list[Event]:
        """Part of a tool call; the first of each has its id and name."""

    @abstractmethod
    def end(self, delta: Delta, tally: Tally) -> list[Event]:
        """After the last text; `delta` has the reasons."""

    @abstractmethod
    def fail(self, error: Event) -> list[Event]:
        """After an OpenAI error, once a stream has begun."""

    @abstractmethod
    def body(self) -> Event:
        """The whole answer, after its end."""


@contextmanager
def as_sent(maps: Callable[[], Sequence[Mapping[str, str]]]) -> Iterator[None]:
    """Errors of the chat request name the fields that the client sent: `maps` have them by path of
    the chat request, each by that of the one before."""
    try:
        yield
    except RequestValidationError as error:
        param, message = describe_validation(error.errors())
        sent = _sent(param, maps())
        raise InvalidRequest(f"{sent}: {message}" if sent else message, param=sent) from error
    except FovealError as error:
        sent = _sent(error.param or "", maps())
        if sent == (error.param or ""):
            raise
        message = error.message
        if re.search(r"[\[._]", error.param or ""):  # else it is a word of the sentence, too
            named = rf"(?<![\w.\]]){re.escape(error.param or '')}(?!\w)"
            message = re.sub(named, lambda _: sent, message)
        raise error.about(sent, message) from error


def _sent(path: str, maps: Sequence[Mapping[str, str]]) -> str:
    for paths in maps:
        ends = (len(path), *(at.start() for at in reversed([*re.finditer(r"[.\[]", path)])))
        known = next((end for end in ends if path[:end] in paths), 0)
        path = paths[path[:known]] + path[known:] if known else path
    return path


async def plan(
    service: Service, fields: Mapping[str, Any], scope: RequestScope, shown: Collection[str] = ()
) -> ChatRun:
    """`shown`: options of `_SHAPING` that the API has a place for. Raises RequestValidationError or
    FovealError."""
    for name, neutral in _SHAPING.items():
        if name not in shown and fields.get(name) not in (None, *neutral):
            raise Unsupported(f"{name} is not supported here", param=name)
    return await plan_chat(service, parsed(ChatCompletionRequest, fields), scope)


def parsed(model: type[M], fields: Mapping[str, Any]) -> M:
    """Raises RequestValidationError, as a body that does not parse does."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


async def count(
    service: Service, fields: Mapping[str, Any], request: Request, *, charge: bool = True
) -> int:
    """Tokens of the prompt, media expanded. `charge`: they count as this request's."""
    body = parsed(ChatCompletionRequest, fields)
    return len(await prompt_tokens(service, body, request, charge=charge))


class _TextScores:
    """Log probabilities on their way to the text that their tokens bring: it may be held back, and
    tokens of reasoning and of calls bring none."""

    def __init__(self, run: ChatRun) -> None:
        self._run = run
        self._held: deque[tuple[int, TokenLogprobs]] = deque()
        self._num_done = 0

    def take(self, delta: Delta) -> Sequence[Any]:
        """Of the tokens of its text."""
        if not self._run.request.logprobs:
            return ()
        self._held.extend(zip(delta.token_ids, delta.logprobs, strict=False))
        self._drop(delta.text_tokens.start)
        begin, num = self._num_done, delta.text_tokens.stop - self._num_done
        found = list(islice(self._held, max(0, num)))
        self._drop(delta.text_tokens.stop)
        ids, scores = [one for one, _ in found], [one for _, one in found]
        entries: Sequence[Any] = logprobs_of(self._run, ids, scores, not begin)["content"]
        return entries

    def _drop(self, end: int) -> None:
        while self._num_done < end and self._held:
            self._held.popleft()
            self._num_done += 1


async def events(run: ChatRun, writer: Writer) -> AsyncGenerator[Event, None]:
    tally, scores = Tally(1), _TextScores(run)
    async with open_run(run.service, [run.job], run.started) as deltas:
        began = False
        async for _, delta in deltas:
            tally.add(0, delta)
            found = [] if began else writer.begin(tally)
            began = True
            if delta.reasoning and run.request.include_reasoning is not False:
                found += writer.reasoning(delta.reasoning)
            told = scores.take(delta)
            found += writer.text(delta.text, told) if delta.text else []
            for piece in delta.calls:
                found += writer.call(piece)
            found += writer.end(delta, tally) if delta.finish_reason else []
            for event in found:
                yield event


async def answer(request: Request, run: ChatRun, writer: Writer, streams: bool | None) -> Response:
    """Streamed where the request says so."""
    found = events(run, writer)
    if not streams:
        await until_disconnect(request.receive, _drain(found))
        return named_relaxed(json_response(writer.body()), run.relaxed)

    def failed(error: Event) -> bytes:
        return b"".join(map(_named, writer.fail(error)))

    stream = await start_stream(request.receive, _encoded(found), failed)
    return named_relaxed(stream, run.relaxed)


async def _drain(found: AsyncGenerator[Event, None]) -> None:
    async with aclosing(found):
        async for _ in found:
            pass


async def _encoded(found: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(found):
        async for event in found:
            yield _named(event)


def _named(event: Event) -> bytes:
    return f"event: {event['type']}\n".encode() + sse(event)
