"""A request on the engine's side, from its arrival to its end; and what is asked for on its behalf.

Plain records: `admission` alone changes them.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from foveal_runtime.mirror.messages import ItemRef, RequestId
from foveal_runtime.mirror.session import Session
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.media import MMHash

RequestKey = tuple[str, RequestId]
"""(frontend id, (request id, attempt))."""


class State(Enum):
    QUEUED = auto()  # in the queue, holds nothing
    DEAD = auto()  # in the queue for its values alone (aborted, rejected, PUT)
    RESERVED = auto()  # holds pins and reservations, data on the way
    READY = auto()  # complete, not yet taken by the engine core
    RUNNING = auto()  # taken; ends by finish() only


class SessionRequest:
    """One REQ (or PUT: `rid` is None) on the engine's side.

    `session` is the one it came by; `copies` are values sent along; `held` hashes it pins;
    `missing` hashes it waits for. `queued_n` is its n while it holds back the ack, else 0.
    `taken`: the engine core has seen it and must be told when it goes without finish().
    """

    __slots__ = (
        "body", "bypassed", "copies", "fid", "held", "items", "missing", "num_hits", "queued_n",
        "rid", "session", "staged_bytes", "state", "taken",
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        n: int,
        rid: RequestId | None,
        items: tuple[ItemRef, ...],
        copies: dict[MMHash, Value],
        body: msgspec.Raw,
    ) -> None:
        self.session = session
        self.fid = session.fid
        self.queued_n = n
        self.rid = rid
        self.items = {item.mm_hash: item for item in items}
        self.copies = copies
        self.body = body
        self.state = State.DEAD if rid is None else State.QUEUED
        self.held: dict[MMHash, None] = {}
        self.missing: dict[MMHash, None] = {}
        self.num_hits = 0
        self.taken = False
        self.bypassed = False
        self.staged_bytes = sum(self.items[h].size_bytes for h in copies)

    @property
    def key(self) -> RequestKey:
        assert self.rid is not None
        return (self.fid, self.rid)


class Pending:
    """A reservation: who was asked for the data, who waits for it."""

    __slots__ = ("asked", "waiters")

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.waiters: dict[RequestKey, None] = {}
