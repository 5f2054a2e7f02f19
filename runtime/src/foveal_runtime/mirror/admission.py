"""Admission to the value store: one queue, whole-request reservation, NEED/FILL.

The heart of `receiver`, which alone calls it. Requests are admitted strictly in arrival order over
all sessions; the head takes the space of all its items in one step or waits, so no request ever
holds some items while waiting for room (that would deadlock). Never waits for a peer and never
orders anything by what a mirror believes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from foveal_runtime.mirror.messages import ItemRef
from foveal_runtime.mirror.records import ReceiverStats
from foveal_runtime.mirror.session import Pending, RequestKey, Session, SessionRequest, State
from foveal_runtime.mirror.store import Store, Value
from foveal_runtime.plan.media import MMHash

__all__ = ["Pending", "RequestAdmission", "RequestKey", "SessionRequest", "State"]

MM_TOO_LARGE = "mm_too_large"
MM_SOURCE_LOST = "mm_source_lost"
MAX_DEPARTED = 8192


def _differ(known: Value | None, copy: Value) -> bool:
    """Two values of one hash that are not the same bytes."""
    return known is not None and bool(known.digest and copy.digest) and known.digest != copy.digest


class RequestAdmission:
    """Requests on their way to the scheduler.

    `ready` collects complete requests, `lost` those that the engine core must stop; `sessions`
    is the receiver's table.
    """

    def __init__(
        self,
        store: Store,
        sessions: dict[str, Session],
        stats: ReceiverStats,
        grace_bytes: int,
        cacheable_limit: int | None,
    ) -> None:
        self.store = store
        self.sessions = sessions
        self.stats = stats
        self.grace_bytes = grace_bytes
        self.cacheable_limit = cacheable_limit
        self.queue: deque[SessionRequest] = deque()
        self.requests: dict[RequestKey, SessionRequest] = {}
        self.pending: dict[MMHash, Pending] = {}
        self.ready: dict[RequestKey, None] = {}
        self.lost: dict[RequestKey, None] = {}
        self.departed: OrderedDict[MMHash, None] = OrderedDict()
        self.replaced: dict[MMHash, None] = {}  # what was made from them is to be forgotten

    # ---- questions -----------------------------------------------------------------------------
    @property
    def max_cacheable_bytes(self) -> int:
        """Larger items are used and forgotten."""
        limit = self.cacheable_limit
        return self.store.capacity_bytes // 4 if limit is None else limit

    def is_cacheable(self, size_bytes: int) -> bool:
        return size_bytes <= self.max_cacheable_bytes

    def _size(self, item: ItemRef) -> int:
        """An item's size as the store knows it; a peer's word counts only for unknown ones."""
        entry = self.store.lookup_any(item.mm_hash)
        return item.size_bytes if entry is None else entry.size_bytes

    def is_bypass(self, request: SessionRequest) -> bool:
        """More than the cache can ever hold at once: goes past it."""
        total = sum(self._size(item) for item in request.items.values())
        return total > self.store.capacity_bytes

    def _is_admissible(self, request: SessionRequest, bypass: bool) -> bool:
        """Room for the whole request now, counting all that eviction could free. Who needs a wrong
        value waits until nobody pins it, and gets another."""
        store = self.store
        pinned = (store.pinned.get(mm_hash) for mm_hash in request.items)
        if any(entry is not None and entry.wrong for entry in pinned):
            return False
        if bypass:
            idle = sum(self._size(i) for h, i in request.items.items() if self._is_idle(h))
            borrowed = store.would_borrow(self._absent_bytes(request))
            return store.held_bytes + idle + borrowed <= store.capacity_bytes or not borrowed
        new = sum(self._size(item) for h, item in request.items.items() if not store.is_held(h))
        return store.held_bytes + new <= store.capacity_bytes

    def _is_idle(self, mm_hash: MMHash) -> bool:
        return not self.store.is_held(mm_hash) and self.store.lookup(mm_hash) is not None

    def _absent_bytes(self, request: SessionRequest) -> int:
        """What the request needs that is neither here nor on its way."""
        absent = (i for h, i in request.items.items() if self.store.lookup_any(h) is None)
        return sum(item.size_bytes for item in absent)

    def is_too_large(self, request: SessionRequest) -> bool:
        total = sum(self._size(item) for item in request.items.values())
        return total > self.store.capacity_bytes + self.store.bypass_capacity_bytes

    # ---- arrivals ------------------------------------------------------------------------------
    def enqueue(self, request: SessionRequest) -> None:
        """Takes a REQ or PUT into the queue. Call `pump` afterwards."""
        if request.rid is not None and request.state is State.QUEUED:
            self.requests[request.key] = request
            if self.is_too_large(request):
                self._reject(request, MM_TOO_LARGE)
        request.session.queued.append(request.queued_n)
        request.session.staged_bytes += request.staged_bytes
        self.queue.append(request)

    def on_fill(self, fid: str, mm_hash: MMHash, size_bytes: int, value: Value | None) -> None:
        """Data for a reservation. One that cannot be opened (`value` None) is asked for again."""
        pending = self.pending.get(mm_hash)
        if pending is None or pending.asked != fid:
            return
        if size_bytes != self.store.reserved[mm_hash].size_bytes:
            self.stats.num_value_conflicts += 1
            self.on_nofill(fid, mm_hash)
            return
        if value is None:
            self._ask(mm_hash, fid)
            return
        del self.pending[mm_hash]
        waiting = [self.requests[key] for key in pending.waiters]
        self.store.fill(mm_hash, value, len(waiting))
        for request in waiting:
            del request.missing[mm_hash]
            request.held[mm_hash] = None
            self._check_ready(request)

    def on_nofill(self, fid: str, mm_hash: MMHash) -> None:
        """The asked frontend has no value: its own waiters are rejected, others' source is
        asked."""
        pending = self.pending.get(mm_hash)
        if pending is None or pending.asked != fid:
            return
        self.stats.num_nofill += 1
        for key in [key for key in pending.waiters if key[0] == fid]:
            self._reject(self.requests[key], MM_SOURCE_LOST)
        self._retarget(mm_hash)

    def abort(self, request: SessionRequest) -> None:
        """The frontend, or its session, no longer wants it. One that the engine core runs keeps
        its pins until finish(): its values are in use."""
        if request.taken:
            self.lost[request.key] = None
        if request.state is not State.RUNNING:
            self.end(request)

    def end(self, request: SessionRequest) -> None:
        """Pins and waits end. A queued one stays in line, dead: its values may serve those
        behind."""
        if request.state is State.QUEUED:
            request.state = State.DEAD
            del self.requests[request.key]
        else:
            self._drop(request)

    def drop_session(self, session: Session) -> None:
        """`session` is gone from `sessions`: forgets its requests, asks others for what it
        owed."""
        for request in [r for r in self.requests.values() if r.session is session]:
            self.abort(request)
        self.queue = deque(r for r in self.queue if r.session is not session)
        for mm_hash in [h for h, p in self.pending.items() if p.asked == session.fid]:
            self._retarget(mm_hash)

    def release_value(self, request: SessionRequest, mm_hash: MMHash) -> None:
        """Ends one pin before the request is over (`unpin_at=encoded`)."""
        if mm_hash in request.held:
            del request.held[mm_hash]
            self.store.unpin(mm_hash)

    def requeue(self, request: SessionRequest) -> None:
        """A preempted request needs released values again: it gives up all its pins and queues
        hash-only, because whoever holds pins must never wait for room."""
        self._let_go(request)
        if self.sessions.get(request.fid) is not request.session:
            self.lost[request.key] = None
            del self.requests[request.key]
            return
        request.state = State.QUEUED
        self.queue.append(request)

    def refetch(self, request: SessionRequest, damaged: Iterable[MMHash]) -> None:
        """Stored values of a taken request turned out to be damaged: nobody gets them any more,
        and the request queues again, for others."""
        for mm_hash in damaged:
            self._discard(mm_hash)
            self.stats.num_damaged_values += 1
        self.requeue(request)

    def _discard(self, mm_hash: MMHash) -> None:
        """Nobody gets this value any more. Who has it and does not run yet queues again; those that
        run are the engine core's to stop, and whoever needs another waits for that."""
        self.store.discard(mm_hash)
        for request in list(self.requests.values()):
            if mm_hash in request.held and request.state is not State.RUNNING:
                self.requeue(request)

    def reject_hopeless(self) -> None:
        """After a shrink: queued requests that can never fit."""
        for request in self.queue:
            if request.state is State.QUEUED and self.is_too_large(request):
                self._reject(request, MM_TOO_LARGE)

    # ---- the pump ------------------------------------------------------------------------------
    def pump(self) -> None:
        """Admits from the head of the queue while it fits; nobody overtakes."""
        while self.queue:
            request = self.queue[0]
            if request.state is State.DEAD:
                self._leave_queue(request)
                self._keep_values(request)
                continue
            self._replace_differing(request)
            bypass = self.is_bypass(request)
            if bypass and self.is_too_large(request):
                self._reject(request, MM_TOO_LARGE)
                continue
            if not self._is_admissible(request, bypass):
                break
            self._leave_queue(request)
            self._admit(request, bypass)
            self._check_ready(request)
        self.store.doom(self.grace_bytes)

    def _replace_differing(self, request: SessionRequest) -> None:
        """A copy that differs from the value stored under its hash takes its place: it was checked
        on arrival, the other one long ago. A pinned one goes at its last unpin, and the request
        waits for that. Later copies of requests that do not run, and injected ones, never replace
        anything."""
        for mm_hash, copy in request.copies.items():
            entry = self.store.lookup(mm_hash)
            if entry is None or entry.wrong or not _differ(entry.value, copy):
                continue
            self.stats.num_value_conflicts += 1
            self.replaced[mm_hash] = None
            self._discard(mm_hash)

    def _leave_queue(self, request: SessionRequest) -> None:
        """From here on the ack may cover it and its window credit returns."""
        self.queue.popleft()
        if request.queued_n:
            gone = request.session.queued.popleft()
            assert gone == request.queued_n
            request.queued_n = 0
        request.session.staged_bytes -= request.staged_bytes
        request.staged_bytes = 0

    def _keep_values(self, request: SessionRequest) -> None:
        """The values of a request that will not run, where evicting idle ones makes room."""
        store = self.store
        for mm_hash, value in request.copies.items():
            size_bytes = request.items[mm_hash].size_bytes
            if store.lookup_any(mm_hash) is not None:
                self._drop_copy(mm_hash, value, size_bytes)
            elif (
                store.held_bytes + size_bytes <= store.capacity_bytes
                and self.is_cacheable(size_bytes)
            ):  # fmt: skip
                store.make_room(size_bytes)
                store.insert_idle(mm_hash, size_bytes, value)
        request.copies = {}
        store.doom(self.grace_bytes)

    def _admit(self, request: SessionRequest, bypass: bool) -> None:
        """One atomic step, the only one that pins: every item is pinned or reserved after it."""
        store = self.store
        absent = self._absent_bytes(request)
        room = store.would_borrow(absent) if bypass else absent
        if room:
            store.make_room(room, request.items)
        if bypass:
            self.stats.num_bypass_requests += 1
            request.bypassed = True
        request.state = State.RESERVED
        is_first = not request.counted  # who comes back for values it had is in the counts already
        request.counted = True
        self.stats.num_queries += len(request.items) if is_first else 0
        for mm_hash, item in request.items.items():
            copy = request.copies.get(mm_hash)
            if store.lookup_any(mm_hash) is not None:
                if copy is not None:
                    self._drop_copy(mm_hash, copy, item.size_bytes)
                self._join(request, mm_hash, counts_as_hit=copy is None and is_first)
                continue
            silent = bypass or not self.is_cacheable(item.size_bytes)
            store.reserve(mm_hash, item.size_bytes, silent=silent, bypass=bypass)
            if copy is not None:
                store.fill(mm_hash, copy, 1)
                request.held[mm_hash] = None
            else:
                self._start_need(request, item)
        request.copies = {}

    def _join(self, request: SessionRequest, mm_hash: MMHash, counts_as_hit: bool) -> None:
        """The value is here, or on its way for somebody else."""
        if mm_hash in self.store.reserved:
            self.pending[mm_hash].waiters[request.key] = None
            request.missing[mm_hash] = None
            return
        self.store.pin(mm_hash)
        request.held[mm_hash] = None
        request.joined = True
        if counts_as_hit:
            request.num_hits += 1
            self.stats.num_hits += 1

    def _start_need(self, request: SessionRequest, item: ItemRef) -> None:
        source = item.source
        target = source if source is not None and source in self.sessions else request.fid
        pending = self.pending[item.mm_hash] = Pending(target)
        pending.waiters[request.key] = None
        request.missing[item.mm_hash] = None
        if item.mm_hash in self.departed:
            self.stats.num_needs_stale += 1
        else:
            self.stats.num_needs_pull += 1
        self._ask(item.mm_hash, target)

    def _ask(self, mm_hash: MMHash, fid: str) -> None:
        self.pending[mm_hash].asked = fid
        self.sessions[fid].need.append(mm_hash)

    def _retarget(self, mm_hash: MMHash) -> None:
        """The asked frontend cannot answer: the next waiter's is asked; without waiters the space
        goes back."""
        pending = self.pending[mm_hash]
        for fid, _ in pending.waiters:
            self._ask(mm_hash, fid)
            return
        del self.pending[mm_hash]
        self.store.cancel(mm_hash)

    def _drop_copy(self, mm_hash: MMHash, copy: Value, size_bytes: int) -> None:
        """The value is here already; a later one only counts."""
        self.stats.dup_bytes += size_bytes
        entry = self.store.lookup(mm_hash)
        if entry is not None and not entry.wrong and _differ(entry.value, copy):
            self.stats.num_value_conflicts += 1

    # ---- ends ----------------------------------------------------------------------------------
    def _check_ready(self, request: SessionRequest) -> None:
        if request.state is State.RESERVED and not request.missing:
            request.state = State.READY
            self.ready[request.key] = None

    def _reject(self, request: SessionRequest, code: str) -> None:
        """Fails a request explicitly; one in the queue stays there, dead, for its values."""
        rid, session = request.rid, self.sessions.get(request.fid)
        assert rid is not None
        self.stats.rejects[code] += 1
        if session is request.session:
            session.rejected.append((rid, code))
        if request.taken:
            self.lost[request.key] = None
        self.end(request)

    def _drop(self, request: SessionRequest) -> None:
        """Ends pins and waits. A reservation nobody waits for any more stays until its answer."""
        del self.requests[request.key]
        self._let_go(request)

    def _let_go(self, request: SessionRequest) -> None:
        self.ready.pop(request.key, None)
        for mm_hash in request.missing:
            del self.pending[mm_hash].waiters[request.key]
        for mm_hash in request.held:
            self.store.unpin(mm_hash)
        request.missing.clear()
        request.held.clear()

    def note_departed(self, mm_hash: MMHash) -> None:
        """Remembers (bounded) what was evicted lately, to tell stale hints from pulls."""
        self.departed[mm_hash] = None
        self.departed.move_to_end(mm_hash)
        if len(self.departed) > MAX_DEPARTED:
            self.departed.popitem(last=False)

    def check_integrity(self) -> None:
        self.store.check_integrity()
        assert set(self.pending) == set(self.store.reserved)
        pins: Counter[MMHash] = Counter()
        for key, request in self.requests.items():
            assert key == request.key
            assert request.state is not State.DEAD
            pins.update(request.held.keys())
            for mm_hash in request.missing:
                assert key in self.pending[mm_hash].waiters
        assert pins == {h: e.pins for h, e in self.store.pinned.items()}, "a pin leaked"
        for pending in self.pending.values():
            assert pending.asked in self.sessions, "a need is addressed to nobody"
            assert all(key in self.requests for key in pending.waiters)
        for session in self.sessions.values():
            mine = [r for r in self.queue if r.session is session]
            assert [r.queued_n for r in mine if r.queued_n] == list(session.queued)
            assert session.staged_bytes == sum(r.staged_bytes for r in mine)
            assert session.staged_bytes <= session.window_bytes, "I2: staged over the window"
