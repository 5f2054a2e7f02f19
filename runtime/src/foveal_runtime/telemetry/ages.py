"""Ages of evicted cache entries since their last use: a histogram that the cache itself keeps.

Read at scrape time. Short ages say that a cache turns over before clients can reuse what it holds.
Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from foveal_runtime.plan.metrics.metric import AGE_BUCKETS
from foveal_runtime.telemetry.histogram import Histogram


class EvictionAges:
    """Stamps are at most as many as the cache has entries.

    Args:
        remembered: of how many keys `take_lately` is told that they were evicted.

    Attributes: `seen`, the ages.
    """

    def __init__(self, clock: Callable[[], float], *, remembered: int = 0) -> None:
        self.clock = clock
        self._remembered = remembered
        self.seen = Histogram(AGE_BUCKETS)
        self._stamps: dict[bytes, float] = {}
        self._lately: OrderedDict[bytes, None] = OrderedDict()

    def rest(self, key: bytes) -> None:
        """The entry was used and rests from now on."""
        self._stamps[key] = self.clock()

    def evict(self, key: bytes) -> None:
        """It went to make room."""
        stamp = self._stamps.pop(key, None)
        if stamp is not None:
            self.seen.observe(self.clock() - stamp)
        self._lately[key] = None
        if len(self._lately) > self._remembered:
            self._lately.popitem(last=False)

    def take_lately(self, key: bytes) -> bool:
        """Whether it is one of the last `remembered` that were evicted; once for each eviction."""
        return self._lately.pop(key, self) is None

    @property
    def num_lately(self) -> int:
        return len(self._lately)

    def leave(self, key: bytes) -> None:
        """It went for another reason, which says nothing about the cache's size."""
        self._stamps.pop(key, None)

    def clear(self) -> None:
        """All of them went for another reason."""
        self._stamps.clear()

    def __len__(self) -> int:
        return len(self._stamps)
