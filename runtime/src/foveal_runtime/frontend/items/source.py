"""Source of an item's value until its request ends, for engines that ask for it.

Made by input_processor, asked by `engines.client` when a value must be sent or an engine NEEDs it.
Order: processor cache, the value retained since processing, the processor again on the raw media.
Holds a processed value until it was handed out once: what lasts is the raw media.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.processor_cache import ProcessorCache
from foveal_runtime.plan.errors import MediaUnknown
from foveal_runtime.plan.media import MMHash

Buffer = bytes | memoryview


class RawMedia(Protocol):
    """The encoded media of one part, however it arrived."""

    @property
    def page(self) -> int:
        """Of the document that `read` gives, from 0; -1 when it is the item's own file."""
        ...

    async def read(self) -> Buffer:
        """The original file bytes."""
        ...


class GivenBytes:
    """Media that is in memory: from the caller, or fetched."""

    page = -1

    def __init__(self, data: Buffer) -> None:
        self._data = data

    async def read(self) -> Buffer:
        return self._data


class ReadOnce:
    """Media that many read, such as the pages of a document: all get the same bytes."""

    page = -1

    def __init__(self, raw: RawMedia) -> None:
        self._raw = raw
        self._reading: asyncio.Future[Buffer] | None = None

    async def read(self) -> Buffer:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._raw.read())
        return await asyncio.shield(self._reading)  # a reader that is cancelled leaves the others


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a document, known by what it shows: `digest` has 32 bytes."""

    digest: bytes
    document: RawMedia
    page: int

    async def read(self) -> Buffer:
        return await self.document.read()


class ItemSource:
    """One item's `ValueSource`."""

    def __init__(
        self,
        mm_hash: MMHash,
        cache: ProcessorCache,
        stats: FrontendStats,
        raw: RawMedia | None,
        make: Callable[[RawMedia], Awaitable[Buffer]],
    ) -> None:
        self.mm_hash = mm_hash
        self._cache = cache
        self._stats = stats
        self._raw = raw
        self._make = make
        self._retained: Buffer | None = None

    @property
    def can_make(self) -> bool:
        """False: only an engine that holds the value can run this item (uuid-only media)."""
        return (
            self._raw is not None
            or self._retained is not None
            or self._cache.is_cached(self.mm_hash)
        )

    def retain(self, value: Buffer) -> None:
        """Keeps a freshly processed value for the first send."""
        self._retained = value

    def hold(self, value: Buffer) -> None:
        """Keeps a cached value when nothing else could make it again after its eviction."""
        if self._raw is None:
            self._retained = value

    async def value(self) -> Buffer:
        """See `prepared.ValueSource`. Raises MediaUnknown when nothing here can make it."""
        cached = self._cache.peek(self.mm_hash)
        if cached is not None:
            self._drop_retained()
            self._stats.value_source["processor_cache"] += 1
            return cached
        if self._retained is not None:
            value = self._retained
            self._drop_retained()
            self._stats.value_source["retained"] += 1
            return value
        if self._raw is None:
            self._stats.value_source["lost"] += 1
            raise MediaUnknown("the media behind a uuid is no longer held anywhere; send it again")
        value = await self._make(self._raw)
        self._stats.value_source["recomputed"] += 1
        return value

    def release(self) -> None:
        self._raw = None
        self._retained = None

    def _drop_retained(self) -> None:
        # Without raw media (uuid-only, injected) the value itself is the only way to make it again.
        if self._raw is not None:
            self._retained = None
