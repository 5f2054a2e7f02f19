"""Limits of a receiver, and what it hands to the engine core: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from foveal_runtime.mirror.messages import RequestId
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.media import MMHash

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class ReceiverLimits:
    """Everything a receiver is bounded by. All sizes are bytes.

    Attributes:
        capacity_bytes: C. staging_bytes: S. C + S is all that values ever take.
        largest_request_bytes: items of one request up to this sum are always served, whatever C
            is; 0 = S. Smaller than S leaves more of S for windows when C is small.
        grace_bytes: G, announced as evicted before the room is needed; None = max(1 % of C,
            16 MiB), at most an eighth of C.
        max_cacheable_bytes: larger items are used and forgotten; None = C / 4.
        max_window_bytes: largest window of one session.
        max_capacity_bytes: a resize cannot go above; None = no limit.
    """

    capacity_bytes: int
    staging_bytes: int = 256 * MIB
    largest_request_bytes: int = 0
    grace_bytes: int | None = None
    max_cacheable_bytes: int | None = None
    max_window_bytes: int = 64 * MIB
    max_capacity_bytes: int | None = None
    max_bindings: int = 65536
    max_sessions: int = 256
    max_queued: int = 4096

    @property
    def window_pool_bytes(self) -> int:
        """The part of S that sessions get as windows: all of it when every request fits the
        cache; else at most half, and never so much that the largest request has no room."""
        largest = min(self.largest_request_bytes or self.staging_bytes, self.staging_bytes)
        if self.capacity_bytes >= largest:
            return self.staging_bytes
        return min(self.staging_bytes // 2, self.staging_bytes - largest + self.capacity_bytes)

    @property
    def bypass_bytes(self) -> int:
        """The other part of S: values of requests larger than the cache."""
        return self.staging_bytes - self.window_pool_bytes

    @property
    def min_capacity_bytes(self) -> int:
        """A resize cannot go below. S was divided for the C of the start: if the largest request
        goes through the cache, it must go on fitting, or it would be refused until a restart."""
        return max(0, self.largest_request_bytes - self.bypass_bytes)

    def grace_of(self, capacity_bytes: int) -> int:
        """G for a capacity: an explicit one, or the default."""
        if self.grace_bytes is not None:
            return self.grace_bytes
        return min(max(capacity_bytes // 100, 16 * MIB), capacity_bytes // 8)


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request whose values are all here and pinned until finish(fid, rid).

    `items` maps each distinct hash to its value, in first-use order; `num_hits` of them were here
    before the request and came without a copy; `bypassed`: larger than the cache (warn once).
    """

    fid: str
    rid: RequestId
    body: msgspec.Raw
    items: dict[MMHash, Value]
    num_hits: int
    bypassed: bool
