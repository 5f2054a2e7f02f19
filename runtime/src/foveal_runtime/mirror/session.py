"""The engine's half of one session, and the requests that came by it.

Owned by `receiver`; `admission` appends needs and rejections. Dies with the session: it is the
epoch. Of a request `admission` alone changes the record.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from foveal_runtime.mirror.messages import (
    Alias,
    Announced,
    ItemRef,
    MirrorNote,
    Refusals,
    RequestId,
    SessionId,
)
from foveal_runtime.mirror.store import Bindings, Store, Value
from foveal_runtime.plan.media import MMHash


class Session:
    """One life of the link to frontend `fid`.

    Attributes:
        expected: n of the next numbered message. k: number of the last message down.
        queued: n of this session's records that wait for admission, ascending.
        log: (n, value bytes) of received messages whose ack was not sent yet.
        staged_bytes: values that wait in queued records; never above `window_bytes`.
        max_dirty: what `dirty` may reach before the next note.
    """

    def __init__(self, fid: str, sid: SessionId, node: str, window_bytes: int) -> None:
        self.fid = fid
        self.sid = sid
        self.node = node
        self.window_bytes = window_bytes
        self.expected = 1
        self.k = 0
        self.acked = 0
        self.queued: deque[int] = deque()
        self.log: deque[tuple[int, int]] = deque()
        self.staged_bytes = 0
        self.dirty: dict[MMHash, None] = {}
        self.max_dirty = 0
        self.dirty_aliases: dict[Alias, None] = {}
        self.need: list[MMHash] = []
        self.rejected: list[tuple[RequestId, str]] = []
        self.capacity_changed = False
        self.refusals: Refusals | None = None  # to tell

    def next_k(self) -> int:
        self.k += 1
        return self.k

    def lookup_ack(self) -> int:
        """Everything up to this n has left the queue."""
        return (self.queued[0] if self.queued else self.expected) - 1

    def wants_immediate_flush(self) -> bool:
        """Somebody waits for a word: a need, a rejection, or half a window of credit."""
        if self.need or self.rejected or self.refusals is not None:
            return True
        ack, credit = self.lookup_ack(), 0
        for n, size_bytes in self.log:
            if n > ack:
                break
            credit += size_bytes
        return credit * 2 > self.window_bytes

    def has_news(self) -> bool:
        """flush() would say something."""
        changes = self.dirty or self.dirty_aliases or self.need or self.rejected or self.refusals
        return bool(changes) or self.capacity_changed or self.lookup_ack() != self.acked

    def flush(self, store: Store, bindings: Bindings) -> MirrorNote | None:
        """What to tell the frontend since the last note; None when there is nothing."""
        if not self.has_news():
            return None
        ack = self.lookup_ack()
        plus, minus = [], []
        for mm_hash in self.dirty:
            if store.is_announced(mm_hash):
                plus.append(announce(mm_hash, store))
            else:
                minus.append(mm_hash)
        bound, unbound = [], []
        for alias in self.dirty_aliases:
            target = bindings.lookup(alias)
            if target is None:
                unbound.append(alias)
            else:
                bound.append((alias, target))
        note = MirrorNote(
            ack, tuple(plus), tuple(minus), tuple(self.need), tuple(self.rejected),
            tuple(bound), tuple(unbound), store.capacity_bytes if self.capacity_changed else None,
            self.refusals,
        )  # fmt: skip
        self.acked = ack
        while self.log and self.log[0][0] <= ack:
            self.log.popleft()
        self.dirty, self.dirty_aliases, self.need, self.rejected = {}, {}, [], []
        self.max_dirty = 0
        self.capacity_changed, self.refusals = False, None
        return note


def announce(mm_hash: MMHash, store: Store) -> Announced:
    entry = store.lookup(mm_hash)
    assert entry is not None
    assert entry.value is not None
    return Announced(mm_hash, entry.size_bytes, entry.value.meta)


RequestKey = tuple[str, RequestId]
"""(frontend id, (request id, attempt))."""


class State(Enum):
    QUEUED = auto()  # in the queue, holds nothing
    DEAD = auto()  # in the queue for its values alone (aborted, rejected, PUT)
    RESERVED = auto()  # holds pins and reservations, data on the way
    READY = auto()  # complete, not yet taken by the engine core
    RUNNING = auto()  # taken; ends by finish() only


@dataclass(slots=True, eq=False)
class SessionRequest:
    """One REQ (or PUT: `rid` is None) on the engine's side.

    `session` is the one it came by; `copies` are values sent along; `held` hashes it pins;
    `missing` hashes it waits for. `queued_n` is its n while it holds back the ack, else 0.
    `taken`: the engine core has seen it and must be told when it goes without finish().
    `counted`: it was admitted once. `joined`: a value was in the store before it.
    """

    session: Session
    queued_n: int
    rid: RequestId | None
    items: dict[MMHash, ItemRef]
    copies: dict[MMHash, Value]
    body: msgspec.Raw
    fid: str = field(init=False)
    state: State = field(init=False)
    held: dict[MMHash, None] = field(default_factory=dict, init=False)
    missing: dict[MMHash, None] = field(default_factory=dict, init=False)
    num_hits: int = field(default=0, init=False)
    taken: bool = field(default=False, init=False)
    counted: bool = field(default=False, init=False)
    joined: bool = field(default=False, init=False)
    bypassed: bool = field(default=False, init=False)
    staged_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.fid = self.session.fid
        self.state = State.DEAD if self.rid is None else State.QUEUED
        self.staged_bytes = sum(self.items[h].size_bytes for h in self.copies)

    @property
    def key(self) -> RequestKey:
        assert self.rid is not None
        return (self.fid, self.rid)


@dataclass(slots=True, eq=False)
class Pending:
    """A reservation: who was asked for the data, who waits for it."""

    asked: str
    waiters: dict[RequestKey, None] = field(default_factory=dict)
