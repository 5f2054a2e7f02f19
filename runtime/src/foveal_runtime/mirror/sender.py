"""The frontend's half of the cache mirror, one object per link to an engine. Pure state.

Called by the engine client. One thread; nothing here blocks, sleeps or reads a clock or a socket.

    link.send(sender.hello())                         # then wait for a WELCOME event
    carry = sender.plan_send(items)                   # which values to have at hand; no effects
    sending = sender.request(rid, items, body, values)   # plan + commit: send it in the same step
    link.send(encode(sending.message, sending.frames))   # nothing may await in between
    event = sender.on_down(message)                   # needs, rejections, outputs, session over

A mirror is a set of hints. `believes(h)` is all of it: announced, or sent and not yet acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from foveal_runtime.mirror.messages import (
    MAX_VALUE_BYTES,
    NIL,
    PROTOCOL_VERSION,
    Abort,
    Alias,
    Bye,
    Control,
    Down,
    DownMessage,
    EngineHeartbeat,
    Fill,
    Heartbeat,
    Hello,
    InlineValue,
    ItemRef,
    MirrorNote,
    NoFill,
    Put,
    Refusals,
    Refuse,
    Req,
    RequestId,
    SessionId,
    SharedValue,
    ValueRef,
    Welcome,
)  # fmt: skip
from foveal_runtime.mirror.records import DownEvent, SenderStats, Sending, SendItem, SendValue
from foveal_runtime.mirror.refusals import RefusalBook
from foveal_runtime.mirror.store import Buffer
from foveal_runtime.plan.errors import MediaTooLarge, Overloaded
from foveal_runtime.plan.media import ItemMeta, MMHash

__all__ = ["DownEvent", "SendItem", "SendValue", "Sender", "Sending"]


class Sender:
    """The frontend's half of one mirror.

    `frontend_boot` is a u64 that changes with every frontend start, and with every link to the same
    engine; `refusals` is the book that all senders of the frontend share.
    """

    def __init__(
        self,
        frontend_id: str,
        *,
        frontend_boot: int,
        namespace: bytes = b"",
        node: str = "",
        refusals: RefusalBook | None = None,
    ) -> None:
        self.frontend_id = frontend_id
        self.frontend_boot = frontend_boot
        self.namespace = namespace
        self.node = node
        self.refusals = refusals or RefusalBook()
        self.stats = SenderStats()
        self.count = 0
        self.unfinished: dict[RequestId, tuple[MMHash, ...]] = {}
        self._clear()

    def _clear(self) -> None:
        self.is_up = False
        self.is_opening = False
        self.engine_node = ""
        self.capacity_bytes = self.window_bytes = self.max_inline_bytes = 0
        self.max_cacheable_bytes = 0
        self.next_n = 1
        self.k = 0
        self.acked = 0
        self.confirmed: dict[MMHash, tuple[int, ItemMeta | None]] = {}
        self.optimistic: dict[MMHash, int] = {}
        self.log: deque[tuple[int, int]] = deque()
        self.inflight_bytes = 0
        self.open_needs: dict[MMHash, None] = {}
        self.bindings: dict[Alias, MMHash] = {}
        self.known_refusals: Refusals | None = None  # by the engine, as far as we know

    # ---- questions (no effects) ----------------------------------------------------------------
    @property
    def sid(self) -> SessionId:
        return (self.frontend_boot, self.count)

    def believes(self, mm_hash: MMHash) -> bool:
        """The engine announced it, or it is on the way there."""
        return mm_hash in self.confirmed or mm_hash in self.optimistic

    def lookup_binding(self, alias: Alias) -> MMHash | None:
        return self.bindings.get(alias)

    def shares_node(self) -> bool:
        """Frontend and engine see the same shared-memory directory."""
        return self.is_up and bool(self.node) and self.node == self.engine_node

    def is_needed(self, mm_hash: MMHash) -> bool:
        """An unfinished request of this link uses it: NEED must be answered by FILL if at all
        possible."""
        return any(mm_hash in hashes for hashes in self.unfinished.values())

    def owes_refusals(self) -> bool:
        """The engine is not known to have the whole book of refusals."""
        return self.is_up and self.known_refusals not in (None, self.refusals.snapshot())

    def plan_send(self, items: Sequence[SendItem]) -> list[MMHash]:
        """The hashes whose values `request` would send now: not believed, and within the window.
        Values of the others are not needed unless a NEED comes."""
        carry, planned = [], 0
        for item in items:
            if self.believes(item.mm_hash):
                continue
            if self._fits_window(planned + item.size_bytes):
                carry.append(item.mm_hash)
                planned += item.size_bytes
        return carry

    def _fits_window(self, size_bytes: int) -> bool:
        return self.inflight_bytes + size_bytes <= self.window_bytes

    def check_size(self, items: Sequence[SendItem]) -> None:
        """Raises MediaTooLarge when the engine could never hold the items of one request, or no
        message could carry one of them."""
        largest = max((item.size_bytes for item in items), default=0)
        if largest > MAX_VALUE_BYTES:
            raise MediaTooLarge(
                f"one of the request's media takes {largest} bytes once it is processed; an engine "
                f"takes at most {MAX_VALUE_BYTES} bytes of one item: send a smaller or shorter one"
            )
        total = sum(item.size_bytes for item in items)
        limit = max(self.capacity_bytes, self.max_inline_bytes)
        if total > limit:
            raise MediaTooLarge(
                f"the processed media of one request take {total} bytes; this deployment's "
                f"engines take at most {limit} (caches.ipc.size): send fewer or smaller items"
            )

    # ---- session -------------------------------------------------------------------------------
    def hello(self) -> Sending:
        """Opens a session. A former one must have been ended (`end_session`, or an event)."""
        assert not self.unfinished, "lost requests were not taken over"
        self._clear()
        self.count += 1
        self.is_opening = True
        message = Hello(
            PROTOCOL_VERSION, self.frontend_id, self.sid, self.namespace, self.node
        )  # fmt: skip
        return Sending(message, [])

    def end_session(self, reason: str) -> list[RequestId]:
        """The stream is broken (send failed, heartbeat lost). Returns the requests to issue
        again."""
        lost = list(self.unfinished)
        self.unfinished.clear()
        if self.is_up or self.is_opening:
            self.stats.session_resets[reason] += 1
        self._clear()
        return lost

    def heartbeat(self) -> Sending:
        return Sending(Heartbeat(self.sid), [])

    # ---- messages up ---------------------------------------------------------------------------
    def request(
        self,
        rid: RequestId,
        items: Sequence[SendItem],
        body: msgspec.Raw,
        values: Mapping[MMHash, SendValue],
        binds: Iterable[tuple[Alias, MMHash]] = (),
    ) -> Sending:
        """Plans and commits in one step; the caller sends the result at once.

        Args:
            items: distinct items in first-use order. An item that is not believed goes with its
                value when `values` has it and the window allows, else the engine will ask.
            rid: (request id, attempt); never used before on any link.

        Raises:
            Overloaded: no session. MediaTooLarge: see check_size. Nothing has changed then.
        """
        self._require_session()
        self.check_size(items)
        assert rid not in self.unfinished, "a request id is used twice"
        n = self._take_number()
        refs, frames, sent_bytes = self._stamp(items, values, n, kind="req")
        self._log(n, sent_bytes)
        self.unfinished[rid] = tuple(item.mm_hash for item in items)
        return Sending(Req(self.sid, n, rid, refs, body, tuple(binds)), frames)

    def put(
        self,
        items: Sequence[SendItem],
        values: Mapping[MMHash, SendValue],
        binds: Iterable[tuple[Alias, MMHash]] = (),
    ) -> Sending | None:
        """Values without a request: those not believed that fit the window. None when nothing is
        left to send."""
        self._require_session()
        carry = set(self.plan_send(items)) & set(values)
        chosen = [item for item in items if item.mm_hash in carry]
        pairs = tuple(binds)
        if not chosen and not pairs:
            return None
        n = self._take_number()
        refs, frames, sent_bytes = self._stamp(chosen, values, n, kind="put")
        self._log(n, sent_bytes)
        return Sending(Put(self.sid, n, refs, pairs), frames)

    def put_always(self, items: Sequence[SendItem], values: Mapping[MMHash, SendValue]) -> Sending:
        """Like put, but takes a number even when nothing is left to send (`facade`)."""
        self._require_session()
        n = self._take_number()
        refs, frames, sent_bytes = self._stamp(items, values, n, kind="put")
        self._log(n, sent_bytes)
        return Sending(Put(self.sid, n, refs), frames)

    def fill(self, mm_hash: MMHash, value: SendValue) -> Sending | None:
        """Answers a NEED; needs no window. None: the need is not open (any more)."""
        if not self._close_need(mm_hash):
            return None
        n = self._take_number()
        ref, frames = self._carry(value, 1, "fill")
        if self._is_kept(len(value.data)):
            self.optimistic[mm_hash] = n
        return Sending(Fill(self.sid, n, mm_hash, len(value.data), ref), frames)

    def nofill(self, mm_hash: MMHash) -> Sending | None:
        """Says that no value can be had; requests of this link that wait for it are rejected with
        mm_source_lost. None: the need is not open."""
        if not self._close_need(mm_hash):
            return None
        self.stats.num_nofill += 1
        return Sending(NoFill(self.sid, self._take_number(), mm_hash), [])

    def abort(self, rid: RequestId) -> Sending | None:
        """Gives a request up. None: it is not under way on this link."""
        if self.unfinished.pop(rid, None) is None or not self.is_up:
            return None
        return Sending(Abort(self.sid, self._take_number(), rid), [])

    def control(self, action: str, value: int = 0, lora: tuple[str, ...] = ()) -> Sending:
        self._require_session()
        return Sending(Control(self.sid, self._take_number(), action, value, lora), [])

    def refuse(self) -> Sending | None:
        """Tells the engine of refusals that it does not know. None: it knows them all."""
        if not self.owes_refusals():
            return None
        self.known_refusals = self.refusals.snapshot()
        return Sending(Refuse(self.sid, self._take_number(), self.known_refusals), [])

    def finished(self, rid: RequestId) -> None:
        """Its last output came; the answer duty ends."""
        self.unfinished.pop(rid, None)

    def reset(self) -> None:
        """Forgets what the engine has. One-sided and harmless: values are sent again until the
        next announcement of each."""
        self.confirmed.clear()
        self.optimistic.clear()

    # ---- messages down -------------------------------------------------------------------------
    def on_down(self, message: DownMessage) -> DownEvent:
        """Takes in one message of the engine. A message of another session changes nothing."""
        event = DownEvent()
        if message.sid != self.sid or not (self.is_up or self.is_opening):
            return event
        if isinstance(message, Bye):
            event.death = message.death
            self._over(event, message.reason)
        elif isinstance(message, EngineHeartbeat):
            event.heartbeat = message
        elif message.k != self.k + 1:
            self._over(event, "gap")
        elif isinstance(message, Welcome):
            self.k = message.k
            self._on_welcome(message)
            event.welcome, event.death = message, message.death
            self._on_refusals(message.refusals, event)
        elif not self.is_up:
            self._over(event, "gap")
        else:
            self._on_down(message, event)
        return event

    def _on_down(self, message: Down, event: DownEvent) -> None:
        self.k = message.k
        if message.note is not None:
            self._on_note(message.note, event)
        event.outputs = None if message.outputs == NIL else message.outputs

    def _on_welcome(self, welcome: Welcome) -> None:
        self.is_up, self.is_opening = True, False
        self.engine_node = welcome.node
        self.capacity_bytes = welcome.capacity_bytes
        self.window_bytes = welcome.window_bytes
        self.max_inline_bytes = welcome.max_inline_bytes
        self.max_cacheable_bytes = welcome.max_cacheable_bytes
        self.confirmed = {a.mm_hash: (a.size_bytes, a.meta) for a in welcome.directory}
        self.bindings = dict(welcome.bindings)

    def _on_note(self, note: MirrorNote, event: DownEvent) -> None:
        for mm_hash in note.minus:
            self.confirmed.pop(mm_hash, None)
        for announced in note.plus:
            self.confirmed[announced.mm_hash] = (announced.size_bytes, announced.meta)
        for alias in note.unbound:
            self.bindings.pop(alias, None)
        self.bindings.update(note.bound)
        if note.capacity_bytes is not None:
            self.capacity_bytes = note.capacity_bytes
        self._on_refusals(note.refusals, event)
        self._on_ack(note.ack)
        for mm_hash in note.need:
            self.open_needs[mm_hash] = None
            event.needs.append(mm_hash)
            self.stats.num_needs += 1
        for rid, code in note.rejected:
            if self.unfinished.pop(rid, None) is not None:
                event.rejected.append((rid, code))

    def _on_refusals(self, told: Refusals | None, event: DownEvent) -> None:
        if told is not None:
            self.known_refusals = told
            event.has_refusals = self.refusals.join(told)

    def _on_ack(self, ack: int) -> None:
        """Everything up to n = ack has been used: its announcements are in `confirmed` by now."""
        if ack <= self.acked:
            return
        self.acked = ack
        while self.log and self.log[0][0] <= ack:
            self.inflight_bytes -= self.log.popleft()[1]
        # Values enter `optimistic` in the order of n unless a hash is sent again.
        for mm_hash in [h for h, n in self.optimistic.items() if n <= ack]:
            del self.optimistic[mm_hash]

    def _over(self, event: DownEvent, reason: str) -> None:
        event.session_over = reason
        event.lost = self.end_session(reason)

    # ---- internals -----------------------------------------------------------------------------
    def _require_session(self) -> None:
        if not self.is_up:
            raise Overloaded("the engine is not connected")

    def _take_number(self) -> int:
        n = self.next_n
        self.next_n += 1
        return n

    def _log(self, n: int, size_bytes: int) -> None:
        if size_bytes:
            self.log.append((n, size_bytes))
            self.inflight_bytes += size_bytes

    def _close_need(self, mm_hash: MMHash) -> bool:
        if not self.is_up or mm_hash not in self.open_needs:
            return False
        del self.open_needs[mm_hash]
        return True

    def _is_kept(self, size_bytes: int) -> bool:
        """False: used and forgotten by the engine, so nothing to believe in."""
        return size_bytes <= min(self.capacity_bytes, self.max_cacheable_bytes)

    def _stamp(
        self, items: Sequence[SendItem], values: Mapping[MMHash, SendValue], n: int, *, kind: str
    ) -> tuple[tuple[ItemRef, ...], list[Buffer], int]:
        """Decides per item: hash alone, or hash and value; commits what it decides."""
        keeps = sum(item.size_bytes for item in items) <= self.capacity_bytes
        refs: list[ItemRef] = []
        frames: list[Buffer] = []
        sent_bytes = 0
        for item in items:
            ref: ValueRef | None = None
            self.stats.num_queries += 1
            if self.believes(item.mm_hash):
                self.stats.num_hits += 1
                self.stats.bytes_avoided += item.size_bytes
            elif item.mm_hash in values and self._fits_window(sent_bytes + item.size_bytes):
                value = values[item.mm_hash]
                assert len(value.data) == item.size_bytes, "size is the length of the value"
                ref, more = self._carry(value, len(frames) + 1, kind)
                frames.extend(more)
                sent_bytes += item.size_bytes
                if keeps and self._is_kept(item.size_bytes):
                    self.optimistic[item.mm_hash] = n
            else:
                self.stats.num_pulls += 1
            refs.append(ItemRef(item.mm_hash, item.size_bytes, ref, item.source))
        assert len({r.mm_hash for r in refs}) == len(refs), "items must be distinct"
        return tuple(refs), frames, sent_bytes

    def _carry(self, value: SendValue, frame: int, kind: str) -> tuple[ValueRef, list[Buffer]]:
        size_bytes = len(value.data)
        if value.shared_name and self.shares_node():
            self.stats.bytes_sent["shm"] += size_bytes
            return SharedValue(value.shared_name, size_bytes, value.digest), []
        self.stats.bytes_sent[kind] += size_bytes
        return InlineValue(frame, value.digest), [value.data]

    def check_integrity(self) -> None:
        assert self.inflight_bytes == sum(size for _, size in self.log)
        assert all(n > self.acked for n, _ in self.log)
        assert all(self.acked < n < self.next_n for n in self.optimistic.values())
        assert self.inflight_bytes <= self.window_bytes or not self.is_up
