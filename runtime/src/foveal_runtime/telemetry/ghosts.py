"""Ghost lists: what the hit ratio would be if a cache had half, twice or four times its size.

The caches feed them with the keys that they are asked for; read at scrape time. Each list is a
small LRU of keys without values. Keys are sampled by their hash (a key is followed always or
never), the lists' sizes shrink with the sample, and the sample shrinks when there are too many
keys: memory is bounded whatever the cache holds. The method is SHARDS by Waldspurger et al. (FAST
2015), with its correction for hot keys. Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

FACTORS = (0.5, 1.0, 2.0, 4.0)


@dataclass(slots=True)
class _List:
    """One LRU of keys and their sizes."""

    capacity: float = 0.0
    hits: float = 0.0
    used: int = 0
    sizes: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def put(self, key: bytes, size: int) -> None:
        if size <= self.capacity:
            self.sizes[key] = size
            self.used += size
            self.trim()

    def trim(self) -> None:
        while self.used > self.capacity:
            self.used -= self.sizes.popitem(last=False)[1]


class GhostLists:
    """Keys that a larger cache would still hold.

    Args:
        capacity: size of the cache, in whatever unit sizes have (bytes, embeddings, blocks).
        max_entries: keys the longest list may have.
        window: after so many queries old ones count half.
    """

    def __init__(self, capacity: int, *, max_entries: int = 4096, window: int = 16384) -> None:
        self._max_entries = max_entries
        self._window = window
        self._capacity = capacity
        self._shift = 0  # one key in 2**shift is followed
        self._limit = 1 << 64
        self._num_queries = 0.0
        self._num_followed = 0.0  # queries that the followed keys stand for
        self._lists = [_List() for _ in FACTORS]
        self.resize(capacity)

    def query(self, key: bytes, size: int | None = None) -> None:
        """The cache was asked for a key (a uniform hash of at least 8 bytes). With `size`, the key
        is in the cache from now on at the latest; without, `insert` may follow."""
        if not self._capacity:
            return
        self._num_queries += 1
        if self._num_queries >= self._window:
            self._age()
        if int.from_bytes(key[:8], "big") >= self._limit:
            return
        weight = 1 << self._shift
        self._num_followed += weight
        for ghost in self._lists:
            if key in ghost.sizes:
                ghost.hits += weight
                ghost.sizes.move_to_end(key)
            elif size is not None:
                ghost.put(key, size)
        if size is not None:
            self._bound()

    def insert(self, key: bytes, size: int) -> None:
        """The cache took a key in."""
        if not self._capacity or int.from_bytes(key[:8], "big") >= self._limit:
            return
        for ghost in self._lists:
            if key not in ghost.sizes:
                ghost.put(key, size)
        self._bound()

    def ratios(self) -> dict[float, float]:
        """Estimated hit ratio over the recent past by factor; empty before the first query."""
        total = self._num_queries
        if not total:
            return {}
        # Followed keys may be asked for more or less often than their share of all keys says. The
        # difference lies with the hottest keys, which any size would hold.
        missing = total - self._num_followed
        return {
            factor: min(max((ghost.hits + missing) / total, 0.0), 1.0)
            for factor, ghost in zip(FACTORS, self._lists, strict=True)
        }

    @property
    def num_keys(self) -> int:
        """Of all lists."""
        return sum(len(ghost.sizes) for ghost in self._lists)

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        for factor, ghost in zip(FACTORS, self._lists, strict=True):
            ghost.capacity = capacity * factor / (1 << self._shift)
            ghost.trim()

    def reset(self) -> None:
        """The cache was emptied on purpose: one of any size would be empty, too."""
        for ghost in self._lists:
            ghost.sizes.clear()
            ghost.used = 0

    def _bound(self) -> None:
        while len(self._lists[-1].sizes) > self._max_entries:
            self._shift += 1
            self._limit >>= 1
            for ghost in self._lists:
                for key in [k for k in ghost.sizes if int.from_bytes(k[:8], "big") >= self._limit]:
                    ghost.used -= ghost.sizes.pop(key)
            self.resize(self._capacity)

    def _age(self) -> None:
        self._num_queries /= 2
        self._num_followed /= 2
        for ghost in self._lists:
            ghost.hits /= 2

    def check_integrity(self) -> None:
        assert self._limit == (1 << 64) >> self._shift
        for ghost in self._lists:
            assert ghost.used == sum(ghost.sizes.values())
            assert ghost.used <= ghost.capacity or not ghost.sizes
            assert len(ghost.sizes) <= self._max_entries
