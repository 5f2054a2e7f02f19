"""The engine's half of the cache mirror: sessions, directory, admission, NEED/FILL. Pure state.

Called by the engine server with decoded messages and opened values, and by the engine core with
finish(). One thread at a time; nothing here blocks, sleeps, reads a clock or a socket.

    replies = receiver.on_message(fid, message, values)   # send them to fid in this order
    for request in receiver.take_ready(): ...             # hand to the scheduler
    for key in receiver.take_aborted(): ...               # stop them, then finish(*key)
    receiver.finish(fid, rid)                             # always, also after errors
    down = receiver.down(fid, outputs)                    # the next numbered message, or None
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from foveal_runtime.mirror.admission import RequestAdmission, RequestKey, SessionRequest, State
from foveal_runtime.mirror.messages import (
    NIL,
    PROTOCOL_VERSION,
    Abort,
    Alias,
    Announced,
    Bye,
    Control,
    Death,
    Down,
    DownMessage,
    Fill,
    Heartbeat,
    Hello,
    ItemRef,
    MirrorNote,
    NoFill,
    Put,
    Refuse,
    Req,
    RequestId,
    Up,
    Welcome,
)  # fmt: skip
from foveal_runtime.mirror.records import ReadyRequest, ReceiverLimits, ReceiverStats
from foveal_runtime.mirror.refusals import RefusalBook
from foveal_runtime.mirror.session import Session, announce
from foveal_runtime.mirror.store import Bindings, Store, Value
from foveal_runtime.plan.media import MMHash

__all__ = ["ReadyRequest", "Receiver", "ReceiverLimits"]

MEDIA_CONFLICT = "media_conflict"
OVERLOADED = "overloaded"
DUPLICATE_REQUEST = "duplicate_request"
MIN_BACKLOG = 4096


class Receiver:
    """The engine's half of all mirrors.

    `boot` changes with every engine start, `namespace` names model and processor, `info` is
    what WELCOME tells the request layer, `death` how the last life ended.
    """

    store_type: type[Store] = Store
    admission_type: type[RequestAdmission] = RequestAdmission
    session_type: type[Session] = Session

    def __init__(
        self,
        limits: ReceiverLimits,
        *,
        namespace: bytes = b"",
        boot: int = 1,
        node: str = "",
        info: msgspec.Raw = NIL,
        death: Death | None = None,
    ) -> None:
        self.limits = limits
        self.namespace = namespace
        self.boot = boot
        self.node = node
        self.info = info
        self.death = death
        self.refusals = RefusalBook()
        self.stats = ReceiverStats()
        self.sessions: dict[str, Session] = {}
        self.store = self.store_type(limits.capacity_bytes, limits.bypass_bytes)
        self.bindings = Bindings(limits.max_bindings)
        self.admission = self.admission_type(
            self.store, self.sessions, self.stats, self._grace(), limits.max_cacheable_bytes
        )
        self._controls: list[Control] = []
        self._ended: list[tuple[str, Bye]] = []

    # ---- sessions ------------------------------------------------------------------------------
    def on_hello(self, hello: Hello) -> Welcome | Bye | None:
        """Opens a session and ends the frontend's former one. None: an old HELLO, ignored."""
        fid, current = hello.frontend_id, self.sessions.get(hello.frontend_id)
        if (
            current is not None
            and current.sid[0] == hello.sid[0]
            and hello.sid[1] <= current.sid[1]
        ):
            return None
        if hello.version != PROTOCOL_VERSION:
            return Bye(hello.sid, "version_mismatch")
        if hello.namespace != self.namespace:
            return Bye(hello.sid, "ns_mismatch")
        if current is None and len(self.sessions) >= self.limits.max_sessions:
            return Bye(hello.sid, "too_many_sessions")
        if current is not None:
            self._close(current, "new_hello")
        left = self.limits.window_pool_bytes - sum(s.window_bytes for s in self.sessions.values())
        window = min(self.limits.max_window_bytes, left // self.limits.window_divisor)
        session = self.session_type(fid, hello.sid, hello.node, window)
        self.sessions[fid] = session
        return Welcome(
            sid=session.sid,
            k=session.next_k(),
            boot=self.boot,
            capacity_bytes=self.store.capacity_bytes,
            window_bytes=window,
            max_inline_bytes=self.store.capacity_bytes + self.limits.bypass_bytes,
            node=self.node,
            directory=self.directory(),
            bindings=tuple(self.bindings.table.items()),
            info=self.info,
            max_cacheable_bytes=self.admission.max_cacheable_bytes,
            refusals=self.refusals.snapshot(),
            death=self.death,
        )

    def on_session_lost(self, fid: str, reason: str = "lost") -> None:
        """The transport or the heartbeat says that `fid` is gone; unknown ids are ignored."""
        session = self.sessions.get(fid)
        if session is not None:
            self._close(session, reason)

    def directory(self) -> tuple[Announced, ...]:
        """All that mirrors may believe in, least recently used first, pinned last."""
        return tuple(announce(h, self.store) for h in self.store.announced())

    # ---- messages up ---------------------------------------------------------------------------
    def on_message(
        self, fid: str, message: Up, values: Mapping[MMHash, Value] | None = None
    ) -> list[DownMessage]:
        """Takes in one decoded message; returns what to answer at once.

        Args:
            fid: who sent it, as the transport knows (HELLO must name the same id).
            values: opened values of this message by hash. One that the message carries but that
                could not be opened is left out: it is asked for by NEED.
        """
        if isinstance(message, Hello):
            if message.frontend_id != fid:
                return [Bye(message.sid, "wrong_frontend_id")]
            answer = self.on_hello(message)
            return [] if answer is None else [answer]
        session = self.sessions.get(fid)
        if session is None or message.sid != session.sid:
            return [Bye(message.sid, "unknown_session")]
        if isinstance(message, Heartbeat):
            return []
        reason = self._number(session, message)
        if not reason:
            reason = self._dispatch(session, message, values or {})
        if reason:
            self._close(session, reason)
            return [Bye(session.sid, reason)]
        self._settle()
        return []

    def _number(
        self, session: Session, message: Req | Put | Fill | NoFill | Abort | Control | Refuse
    ) -> str:
        if message.n != session.expected:
            return "gap"
        session.expected += 1
        return ""

    def _dispatch(
        self,
        session: Session,
        message: Req | Put | Fill | NoFill | Abort | Control | Refuse,
        values: Mapping[MMHash, Value],
    ) -> str:
        """Returns a reason to end the session, or ""."""
        admission, fid = self.admission, session.fid
        if isinstance(message, Req | Put):
            return self._on_items(session, message, values)
        if isinstance(message, Fill):
            value = values.get(message.mm_hash)
            admission.on_fill(fid, message.mm_hash, message.size_bytes, value)
        elif isinstance(message, NoFill):
            admission.on_nofill(fid, message.mm_hash)
        elif isinstance(message, Abort):
            request = admission.requests.get((fid, message.rid))
            if request is not None:
                admission.abort(request)
        elif isinstance(message, Refuse):
            if self.refusals.join(message.refusals):
                for other in self.sessions.values():
                    other.refusals = self.refusals.snapshot()
        else:
            self._on_control(message)
        return ""

    def _on_items(
        self, session: Session, message: Req | Put, values: Mapping[MMHash, Value]
    ) -> str:
        carried = [item for item in message.items if item.value is not None]
        copies = {i.mm_hash: values[i.mm_hash] for i in carried if i.mm_hash in values}
        carried_bytes = sum(item.size_bytes for item in carried)
        if carried_bytes:
            session.log.append((message.n, carried_bytes))
        rid = message.rid if isinstance(message, Req) else None
        body = message.body if isinstance(message, Req) else NIL
        items = {item.mm_hash: item for item in message.items}
        request = SessionRequest(session, message.n, rid, items, copies, body)
        if session.staged_bytes + request.staged_bytes > session.window_bytes:
            return "window"
        code = self._refusal(request, message.binds)
        if code:
            self.stats.rejects[code] += 1
            request.state = State.DEAD
            if rid is not None:
                session.rejected.append((rid, code))
        if not request.items and request.state is State.QUEUED:
            self._admit_text(request)
        elif request.copies or request.state is State.QUEUED:
            self.admission.enqueue(request)
        return ""  # what is dead and brought no values is answered already

    def _refusal(self, request: SessionRequest, binds: tuple[tuple[Alias, MMHash], ...]) -> str:
        """Binds the uuids, or says why the request cannot be taken."""
        conflicts = self.bindings.conflicts(binds)
        if conflicts:
            for alias in conflicts:  # the binder learns what the uuid stands for
                request.session.dirty_aliases[alias] = None
            return MEDIA_CONFLICT
        for alias, mm_hash in binds:
            self.bindings.bind(alias, mm_hash)
        if request.rid is not None and request.key in self.admission.requests:
            return DUPLICATE_REQUEST
        if len(self.admission.queue) >= self.limits.max_queued:
            return OVERLOADED
        return ""

    def _admit_text(self, request: SessionRequest) -> None:
        """Without items there is nothing to wait for."""
        request.queued_n = 0
        request.state = State.READY
        self.admission.requests[request.key] = request
        self.admission.ready[request.key] = None

    def _on_control(self, message: Control) -> None:
        if message.action == "reset_mm":
            self.reset()
        elif message.action == "resize_ipc":
            self.resize(message.value)
        self._controls.append(message)

    def insert(self, fid: str, values: Mapping[MMHash, Value]) -> None:
        """Takes the next numbered message of `fid` as having brought `values` (`facade`)."""
        session = self.sessions[fid]
        items = {h: ItemRef(h, len(value.data)) for h, value in values.items()}
        record = SessionRequest(session, session.expected, None, items, dict(values), NIL)
        record.staged_bytes = 0
        session.expected += 1
        self.admission.enqueue(record)
        self._settle()

    # ---- the engine core's side ----------------------------------------------------------------
    def take_ready(self) -> list[ReadyRequest]:
        """Requests whose values are complete, in the order they became so; each is handed out
        once (again only after `requeue`)."""
        ready, self.admission.ready = self.admission.ready, {}
        taken = []
        for key in ready:
            request = self.admission.requests[key]
            request.state, request.taken = State.RUNNING, True
            items: dict[MMHash, Value] = {}
            for mm_hash in request.items:
                entry = self.store.lookup(mm_hash)
                assert entry is not None, "I1: a value is missing"
                assert not entry.wrong, "a value that was found wrong is handed out"
                assert entry.value is not None
                items[mm_hash] = entry.value
            taken.append(
                ReadyRequest(
                    key[0],
                    key[1],
                    request.body,
                    items,
                    request.num_hits,
                    request.joined,
                    request.bypassed,
                )
            )
        return taken

    def take_aborted(self) -> list[RequestKey]:
        """Taken requests that nobody wants any more: stop each, then finish() it."""
        lost, self.admission.lost = self.admission.lost, {}
        return list(lost)

    def take_controls(self) -> list[Control]:
        """Administration to carry out; reset_mm and resize_ipc are done here already."""
        controls, self._controls = self._controls, []
        return controls

    def take_ended(self) -> list[tuple[str, Bye]]:
        """Frontends whose session ended because of what others did, and what to tell them."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, fid: str, rid: RequestId) -> bool:
        """Ends a request's pins. False when it is not known (it was dropped before)."""
        request = self.admission.requests.get((fid, rid))
        if request is None:
            return False
        self.admission.lost.pop(request.key, None)
        self.admission.end(request)
        self._settle()
        return True

    def release_value(self, fid: str, rid: RequestId, mm_hash: MMHash) -> None:
        """`unpin_at=encoded`: the encoder output is cached, the value itself may go."""
        request = self.admission.requests.get((fid, rid))
        if request is not None:
            self.admission.release_value(request, mm_hash)
            self._settle()

    def requeue(self, fid: str, rid: RequestId) -> None:
        """A preempted request must encode a released value again. It comes back by take_ready,
        or by take_aborted when its frontend is gone."""
        request = self.admission.requests.get((fid, rid))
        if request is not None and request.state is State.RUNNING:
            self.admission.requeue(request)
            self._settle()

    def refetch(self, fid: str, rid: RequestId, damaged: Iterable[MMHash]) -> None:
        """A request was handed values that no longer have their digest: it comes back by
        take_ready with others, which are asked for."""
        request = self.admission.requests.get((fid, rid))
        if request is not None and request.state is State.RUNNING:
            self.admission.refetch(request, damaged)
            self._settle()

    def take_replaced(self) -> list[MMHash]:
        """Hashes whose value was replaced by one that differs, and those whose wrong value nobody
        uses any more: until then, whoever does makes wrong things of it."""
        wrong = self.admission.replaced | self.store.wrong
        self.admission.replaced, self.store.wrong = {}, {}
        return list(wrong)

    def reset(self) -> None:
        """Frees every unpinned value; late hints are answered by NEED."""
        self.store.reset()
        self._settle()

    def resize(self, capacity_bytes: int) -> None:
        """Changes C, up to that of the start: the rest of the memory is planned for others. A
        shrink below the pinned bytes lets them end first."""
        chosen = min(capacity_bytes, self.limits.capacity_bytes)
        self.store.resize(max(self.limits.min_capacity_bytes, chosen))
        self.admission.grace_bytes = self._grace()
        self.admission.reject_hopeless()
        for session in self.sessions.values():
            session.capacity_changed = True
        self._settle()

    # ---- messages down -------------------------------------------------------------------------
    def wants_immediate_flush(self, fid: str) -> bool:
        """True: send down(fid) now. Otherwise within 50 ms, or with the next outputs."""
        session = self.sessions.get(fid)
        return session is not None and session.wants_immediate_flush()

    def has_news(self, fid: str) -> bool:
        """flush(fid) would say something."""
        session = self.sessions.get(fid)
        return session is not None and session.has_news()

    def flush(self, fid: str) -> MirrorNote | None:
        """What changed for `fid` since its last note; None when nothing did."""
        session = self.sessions.get(fid)
        return None if session is None else session.flush(self.store, self.bindings)

    def down(self, fid: str, outputs: msgspec.Raw | None = None) -> Down | None:
        """The next numbered message: a note, `outputs`, or both; None when there is neither or no
        session. It must be sent: a number that never arrives ends the session."""
        session = self.sessions.get(fid)
        if session is None:
            return None
        note = self.flush(fid)
        if note is None and outputs is None:
            return None
        return Down(session.sid, session.next_k(), note, NIL if outputs is None else outputs)

    # ---- internals -----------------------------------------------------------------------------
    def _grace(self) -> int:
        return self.limits.grace_of(self.store.capacity_bytes)

    def _close(self, session: Session, reason: str) -> None:
        del self.sessions[session.fid]
        self.stats.session_ends[reason] += 1
        self.admission.drop_session(session)
        self._settle()

    def _settle(self) -> None:
        """After every event: admit what fits, tell all sessions what changed."""
        self.admission.pump()
        changed = self.store.drain_changed()
        for mm_hash in changed:
            if not self.store.is_announced(mm_hash):
                self.admission.note_departed(mm_hash)
        aliases = self.bindings.drain_changed()
        if not changed and not aliases:
            return
        # With what has just gone: that a reset empties the store is no backlog.
        limit = max(MIN_BACKLOG, 2 * (self.store.num_entries + len(changed)))
        for session in list(self.sessions.values()):
            session.dirty.update(changed)
            session.dirty_aliases.update(aliases)
            session.max_dirty = max(session.max_dirty, limit)
            alive = self.sessions.get(session.fid) is session
            if alive and len(session.dirty) > session.max_dirty:  # its next WELCOME is smaller
                self._ended.append((session.fid, Bye(session.sid, "backlog")))
                self._close(session, "backlog")

    def check_integrity(self) -> None:
        """Asserts every invariant; tests and idle loops call it."""
        self.admission.check_integrity()
        granted = sum(s.window_bytes for s in self.sessions.values())
        assert granted <= self.limits.window_pool_bytes
        own_pool = self.store.bypass_bytes - self.store.borrowed_bytes
        assert granted + own_pool <= self.limits.staging_bytes, "I2: over S"
