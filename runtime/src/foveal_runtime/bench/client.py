"""A client that replays a trace against an OpenAI-compatible server and times every token.

Knows no server in particular. Conversations start when a place is free (`concurrency`) or at given
times (`starts`); the questions of one follow each other. Images are drawn and encoded before the
clock starts. Never retries: a request that fails is an error of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from foveal_runtime.bench.saved import messages_of
from foveal_runtime.bench.traces import Trace

_NO_COMPLETION = (ValueError, TypeError, AttributeError)
"""An answer that has not the shape of a chat completion."""

REQUEST_SECONDS = 600.0


@dataclass
class Reply:
    """One request. Times are seconds on one clock; `chunks`: when each piece of text came."""

    conversation: int
    turn: int
    sent: float
    chunks: list[float] = field(default_factory=list)
    done: float = 0.0
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def first_token_seconds(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def gaps_seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


class Target(msgspec.Struct, frozen=True):
    """`urls`: base URLs of equal frontends, used in turn; `model`: what requests name; `name`: in
    tables; `api_key` "": none is sent."""

    urls: tuple[str, ...]
    model: str
    name: str = ""
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: an error, as for the requests below."""


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def get(target: Target, path: str, timeout_seconds: float) -> bytes:
    """A page of the first URL. Raises OSError, urllib's HTTPError among them."""
    request = urllib.request.Request(target.urls[0] + path, headers=target.headers)
    with _opener.open(request, timeout=timeout_seconds) as answer:
        return bytes(answer.read())


class Replay:
    """One run of one trace. `urls_of`: data URL by image; `timeout_seconds`: of a request."""

    def __init__(
        self,
        target: Target,
        trace: Trace,
        urls_of: Mapping[int, str],
        on_reply: Callable[[Reply], None] = lambda reply: None,
        timeout_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._target = target
        self._trace = trace
        self._urls_of = urls_of
        self._on_reply = on_reply
        self._timeout_seconds = timeout_seconds
        self._replies: list[Reply] = []

    async def run(
        self, concurrency: int = 0, starts: Sequence[float] = ()
    ) -> tuple[list[Reply], float]:
        """Replies in trace order, and the seconds from the first request to the last answer.

        Args:
            concurrency: conversations under way at the same time; 0: no limit.
            starts: seconds after the start at which each conversation begins; (): at once.
        """
        places = asyncio.Semaphore(concurrency or len(self._trace.conversations))
        timeout = aiohttp.ClientTimeout(total=self._timeout_seconds)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            begin = time.perf_counter()

            async def converse(index: int) -> None:
                if starts:
                    await asyncio.sleep(begin + starts[index] - time.perf_counter())
                async with places:
                    await self._converse(session, index)

            await asyncio.gather(*(converse(i) for i in range(len(self._trace.conversations))))
            first = min((reply.sent for reply in self._replies), default=begin)
            seconds = time.perf_counter() - first
        self._replies.sort(key=lambda reply: (reply.conversation, reply.turn))
        return self._replies, seconds

    async def _converse(self, session: aiohttp.ClientSession, index: int) -> None:
        messages: list[dict[str, Any]] = []
        for number, question in enumerate(self._trace.conversations[index]):
            messages += messages_of(question, self._urls_of)
            limit = question.max_tokens or self._trace.max_tokens
            reply = await self._ask(session, index, number, messages, limit)
            self._replies.append(reply)
            self._on_reply(reply)
            if reply.error:
                return
            messages.append({"role": "assistant", "content": reply.text})

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        index: int,
        turn: int,
        messages: list[dict[str, Any]],
        max_tokens: int,
    ) -> Reply:
        body = msgspec.json.encode(
            {
                "model": self._target.model,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        url = self._target.urls[index % len(self._target.urls)] + "/v1/chat/completions"
        reply = Reply(index, turn, time.perf_counter())
        try:
            headers = {"content-type": "application/json", **self._target.headers}
            # A redirect would carry the key and the images to a server that was not named.
            asked = session.post(url, data=body, headers=headers, allow_redirects=False)
            async with asked as answer:
                if answer.status != 200:
                    reply.error = f"{answer.status}: {(await answer.text(errors='replace'))[:300]}"
                else:
                    await _read(answer, reply)
        except (aiohttp.ClientError, TimeoutError, OSError, *_NO_COMPLETION) as error:
            reply.error = f"{type(error).__name__}: {error}"[:300]
        reply.done = time.perf_counter()
        if not reply.error and not reply.chunks:
            reply.error = "the stream ended without any text"
        return reply


async def _read(answer: aiohttp.ClientResponse, reply: Reply) -> None:
    """Server-sent events into `reply`. An error event or a stream that is cut is an error."""
    is_whole = False
    async for line in answer.content:
        data = line.strip()
        if not data.startswith(b"data:"):
            continue
        now = time.perf_counter()
        data = data[5:].strip()
        if data == b"[DONE]":
            is_whole = True
            continue
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            reply.error = f"an event is not JSON: {error}"
            return
        if event.get("error"):
            reply.error = str(event["error"])[:300]
            return
        for choice in event.get("choices") or []:
            is_whole = is_whole or bool(choice.get("finish_reason"))
            delta = choice.get("delta") or {}
            if text := delta.get("content"):
                reply.text += text
            if text or delta.get("reasoning_content") or delta.get("reasoning"):
                reply.chunks.append(now)
        if usage := event.get("usage"):
            reply.num_prompt_tokens = usage.get("prompt_tokens") or 0
            reply.num_output_tokens = usage.get("completion_tokens") or 0
            with contextlib.suppress(AttributeError):
                details = usage.get("prompt_tokens_details") or {}
                reply.num_cached_tokens = details.get("cached_tokens") or 0
    if not is_whole:
        reply.error = "the stream was cut"
