"""The cache of processed items in an HTTP process: MMHash → serialised item, bounded by bytes.

Owned by input_processor. It saves HF processing; it shares no eviction decision with the mirrors.
A size of 0 switches it off. Never copies and never changes a value.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from foveal_runtime.plan.media import MMHash
from foveal_runtime.telemetry.ages import EvictionAges
from foveal_runtime.telemetry.ghosts import GhostLists

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
