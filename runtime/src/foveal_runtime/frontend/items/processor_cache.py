"""Values of items in an HTTP process: the cache of processed ones, and where each comes from.

The cache, MMHash → serialised item, is bounded by bytes and owned by input_processor. It saves HF
processing; it shares no eviction decision with the mirrors. A size of 0 switches it off. Never
copies and never changes a value.

An ItemSource answers until its request ends, when a value must be sent or an engine NEEDs it: from
the cache, from the value retained since processing, or by the processor again on the raw media. It
holds a processed value until it was handed out once: what lasts is the raw media.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.plan.errors import MediaUnknown
from foveal_runtime.plan.media import MMHash
from foveal_runtime.telemetry.counts import EvictionAges, GhostLists

ENTRY_BYTES = 256
"""Counted per entry on top of the value: key, object and dictionary slot."""


class ProcessorCache:
    """LRU by bytes.

    Attributes:
        queries, hits, evictions, refused: plain counters. `refused` counts values larger than the
            cache, which are served without it and evict nothing.
        ghosts: what other sizes would bring. ages: how long the evicted had not been asked for.
    """

    def __init__(self, capacity_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        self.refused = 0
        self.ghosts = GhostLists(capacity_bytes)
        self.ages = EvictionAges(clock)
        self._values: OrderedDict[MMHash, bytes | memoryview] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def is_cached(self, mm_hash: MMHash) -> bool:
        """Whether the value is here; changes neither order nor counters."""
        return mm_hash in self._values

    def get(self, mm_hash: MMHash) -> bytes | memoryview | None:
        """The value, made the most recently used; counts a query."""
        self.queries += 1
        value = self._values.get(mm_hash)
        if value is None:
            self.ghosts.query(mm_hash)
            return None
        self.ghosts.query(mm_hash, len(value) + ENTRY_BYTES)
        self.hits += 1
        self._values.move_to_end(mm_hash)
        self.ages.rest(mm_hash)
        return value

    def peek(self, mm_hash: MMHash) -> bytes | memoryview | None:
        """The value, without effect."""
        return self._values.get(mm_hash)

    def commit(self, mm_hash: MMHash, value: bytes | memoryview) -> bool:
        """Stores a value; False when it does not fit. The first value of a key stays."""
        if mm_hash in self._values:
            self._values.move_to_end(mm_hash)
            self.ages.rest(mm_hash)
            return True
        cost = len(value) + ENTRY_BYTES
        self.ghosts.insert(mm_hash, cost)
        if cost > self.capacity_bytes:
            self.refused += self.capacity_bytes > 0
            return False
        while self.used_bytes + cost > self.capacity_bytes:
            victim, old = self._values.popitem(last=False)
            self.ages.evict(victim)
            self.used_bytes -= len(old) + ENTRY_BYTES
            self.evictions += 1
        self._values[mm_hash] = value
        self.ages.rest(mm_hash)
        self.used_bytes += cost
        return True

    def release(self, mm_hash: MMHash) -> None:
        old = self._values.pop(mm_hash, None)
        if old is not None:
            self.ages.leave(mm_hash)
            self.used_bytes -= len(old) + ENTRY_BYTES

    def reset(self) -> None:
        self._values.clear()
        self.ages.clear()
        self.used_bytes = 0
        self.ghosts.reset()

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(len(v) + ENTRY_BYTES for v in self._values.values())
        assert 0 <= self.used_bytes <= max(0, self.capacity_bytes)
        assert self.hits <= self.queries
        assert len(self.ages) == len(self._values)


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
        """See `seams.ValueSource`. Raises MediaUnknown when nothing here can make it."""
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
