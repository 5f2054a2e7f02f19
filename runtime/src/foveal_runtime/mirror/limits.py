"""What bounds a receiver, and what it hands to the engine core: plain data."""

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
        capacity_bytes: C. staging_bytes: S; half of it is granted as windows, the other half
            holds the values of requests larger than C (`max_inline_bytes` of WELCOME).
        grace_bytes: G, announced as evicted before the room is needed; None = max(1 % of C,
            16 MiB), at most an eighth of C.
        max_cacheable_bytes: larger items are used and forgotten; None = C / 4.
        max_window_bytes: largest window of one session.
        max_capacity_bytes: a resize cannot go above; None = no limit.
    """

    capacity_bytes: int
    staging_bytes: int = 256 * MIB
    grace_bytes: int | None = None
    max_cacheable_bytes: int | None = None
    max_window_bytes: int = 64 * MIB
    max_capacity_bytes: int | None = None
    max_bindings: int = 65536
    max_sessions: int = 256
    max_queued: int = 4096

    @property
    def bypass_bytes(self) -> int:
        return self.staging_bytes - self.window_pool_bytes

    @property
    def window_pool_bytes(self) -> int:
        return self.staging_bytes // 2

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
