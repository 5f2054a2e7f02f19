"""Stream of engine outputs for one attempt of one request.

Filled by `link`, read by `client`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.mirror.messages import RequestId
from foveal_runtime.plan.errors import FovealError, RateLimited
from foveal_runtime.wire.messages import EngineOutput

MAX_UNREAD = 1024
"""Outputs with log probabilities that may wait for a client that does not read them."""
MAX_UNREAD_PLAIN = 8192
"""The same without log probabilities, which are small: a client may pause for a minute."""


class Lost(NamedTuple):
    """The session of a request ended before the request did."""

    reason: str


class Rejected(NamedTuple):
    """The engine refused the request; `error`: why no value could be made, when that was it."""

    code: str
    error: FovealError | None


Event = EngineOutput | Lost | Rejected


def _ends(event: Event) -> bool:
    return not isinstance(event, EngineOutput) or bool(event.finish)


class Stream:
    """What comes back for one attempt of one request, in order."""

    __slots__ = ("_events", "_news", "request", "rid", "value_error")

    def __init__(self, rid: RequestId, request: PreparedRequest) -> None:
        self.rid = rid
        self.request = request
        self.value_error: FovealError | None = None
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()

    def push(self, event: Event) -> None:
        is_plain = self.request.sampling.logprobs < 0
        most = MAX_UNREAD_PLAIN if is_plain else MAX_UNREAD
        if len(self._events) >= most and not _ends(event):
            if len(self._events) > most:
                return
            what = "outputs" if is_plain else "outputs with log probabilities"
            why = f"{most} {what} were not read: the client is slow"
            event = EngineOutput(self.rid, finish="error", error=(RateLimited.code, why))
        self._events.append(event)
        self._news.set()

    async def next(self) -> Event:
        while not self._events:
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()
