"""Single flight: identical work under way is done once, whoever asks for it.

Used for fetching, decoding and processing media. A caller that is cancelled leaves; the work goes
on for the others and is cancelled only with the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Flight(Generic[V]):
    task: asyncio.Task[V]
    joined: int = 1


class SingleFlight(Generic[K, V]):
    """One piece of work per key at a time; results are not kept once the flight has landed.

    Attributes:
        joins: how often a caller found its work already under way.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self.joins = 0

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The result of `work()`, or of the flight already under way for `key`; errors too."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_call(work)))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        else:
            flight.joined += 1
            self.joins += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.joined -= 1
            if flight.joined == 0 and not flight.task.done():
                # Nobody waits any more; a newcomer must start afresh, not join what is dying.
                del self._flights[key]
                flight.task.cancel()

    def _landed(self, key: K, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # looked at: an error whose callers all left is no warning


async def _call(work: Callable[[], Awaitable[V]]) -> V:
    return await work()
