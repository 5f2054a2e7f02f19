"""Plain data of both halves of the mirror: limits, what goes in and comes out, and counters.

Nothing here decides; telemetry/ turns the counters into metrics.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from foveal_runtime.mirror.messages import Death, EngineHeartbeat, RequestId, Up, Welcome
from foveal_runtime.mirror.store import Buffer, Value
from foveal_runtime.plan.config import MIB
from foveal_runtime.plan.media import MMHash


@dataclass(slots=True)
class ReceiverStats:
    """Counts since engine start. `rejects` by code; `dup_bytes` are values that came twice."""

    num_queries: int = 0
    num_hits: int = 0
    num_needs_stale: int = 0
    num_needs_pull: int = 0
    num_nofill: int = 0
    dup_bytes: int = 0
    num_value_conflicts: int = 0
    num_damaged_values: int = 0
    num_bypass_requests: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    session_ends: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class SenderStats:
    """Counts of one link since frontend start.

    Attributes:
        num_queries, num_hits: items sent, and those sent as a hash alone because believed.
        bytes_avoided: sizes of the hits. `bytes_sent` by kind: req, fill, put, shm.
        num_pulls: items sent without value for want of window. session_resets: by reason.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_pulls: int = 0
    bytes_avoided: int = 0
    num_needs: int = 0
    num_nofill: int = 0
    bytes_sent: dict[str, int] = field(
        default_factory=lambda: {"req": 0, "fill": 0, "put": 0, "shm": 0}
    )
    session_resets: Counter[str] = field(default_factory=Counter)


class SendItem(NamedTuple):
    """One distinct item of a request. `source`: frontend or injector to ask first when missing."""

    mm_hash: MMHash
    size_bytes: int
    source: str | None = None


class SendValue(NamedTuple):
    """A serialised value to send: inline `data`, or the name of a shared-memory file with it.

    `digest` is the 8-byte BLAKE3 of the bytes (`wire.codec.digest`).
    """

    data: Buffer
    digest: bytes
    shared_name: str = ""


class Sending(NamedTuple):
    """A message and the value frames that follow it, in frame order."""

    message: Up
    frames: list[Buffer]


@dataclass(slots=True)
class DownEvent:
    """What a message from the engine means for the request layer, in the order to act on it.

    Attributes:
        session_over: why the session ended, "" when it goes on. `lost`: unfinished requests to
            issue again (a new attempt number, here or elsewhere).
        welcome: the session is open.
        needs: hashes to answer, each exactly once, with fill() or nofill(). Answer inline: a need
            may mean that a shared file could not be opened.
        rejected: (rid, code) of requests that failed; they are finished.
        outputs: opaque here; act on it after the above.
        heartbeat: the engine is alive (and how far).
        death: how a life of this engine ended. `has_refusals`: the book of refusals has grown.
    """

    session_over: str = ""
    lost: list[RequestId] = field(default_factory=list)
    welcome: Welcome | None = None
    needs: list[MMHash] = field(default_factory=list)
    rejected: list[tuple[RequestId, str]] = field(default_factory=list)
    outputs: msgspec.Raw | None = None
    heartbeat: EngineHeartbeat | None = None
    death: Death | None = None
    has_refusals: bool = False


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
        max_window_bytes: largest window of one session. window_divisor: a session gets this part
            of what is left at most, so that there is always something left for the next one.
        max_sessions: HTTP processes: 256 pods of 24, and a quarter more during a rollout.
    """

    capacity_bytes: int
    staging_bytes: int = 256 * MIB
    largest_request_bytes: int = 0
    grace_bytes: int | None = None
    max_cacheable_bytes: int | None = None
    max_window_bytes: int = 64 * MIB
    window_divisor: int = 2
    max_bindings: int = 16384
    max_sessions: int = 8192
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
    before the request and came without a copy; `joined`: some value was here before, with or
    without a copy; `bypassed`: larger than the cache (warn once).
    """

    fid: str
    rid: RequestId
    body: msgspec.Raw
    items: dict[MMHash, Value]
    num_hits: int
    joined: bool
    bypassed: bool
