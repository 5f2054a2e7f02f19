"""A small world of frontends and engines around the mirror's state machines, without I/O.

Used by the unit tests, the fuzzer (`mirror_fuzz`) and the exhaustive checker (`mirror_check`): they
choose the moves, the world carries them out and asserts the protocol's guarantees after each one.
Values are bytes that spell their own hash, so a mix-up is seen at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from foveal_runtime.mirror.messages import (
    NIL,
    Bye,
    DownMessage,
    Fill,
    InlineValue,
    Put,
    Refusals,
    Req,
    Up,
)
from foveal_runtime.mirror.receiver import ReadyRequest, Receiver, ReceiverLimits
from foveal_runtime.mirror.refusals import RefusalBook
from foveal_runtime.mirror.sender import Sender, Sending, SendItem, SendValue
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.media import ItemMeta, MMHash
from foveal_runtime.wire.codec import decode_down, decode_up, encode_down, encode_up

Link = tuple[int, int]
NAMESPACE = b"namespace-16-byt"
DAMAGED = b"damaged!"


class Violation(AssertionError):
    """A guarantee of the protocol does not hold."""


def mm_hash(index: int) -> MMHash:
    return b"%032d" % index


def value_bytes(index: int, size_bytes: int) -> bytes:
    return (b"%04d" % index * (size_bytes // 4 + 1))[:size_bytes]


@dataclass(slots=True)
class Task:
    """A user's request. State: new (to send), sent, done, failed (rejected), gone (aborted)."""

    name: int
    frontend: int
    items: tuple[int, ...]
    state: str = "new"
    engine: int = -1
    attempt: int = 0
    source: int = -1

    @property
    def rid(self) -> tuple[str, int]:
        return (str(self.name), self.attempt)


class World:
    """`sizes[i]` is the size of item i. `codec` sends every message through the wire's bytes."""

    def __init__(
        self,
        num_frontends: int,
        num_engines: int,
        sizes: list[int],
        limits: ReceiverLimits,
        *,
        receiver_type: type[Receiver] = Receiver,
        sender_type: type[Sender] = Sender,
        codec: bool = False,
    ) -> None:
        self.sizes = sizes
        self.limits = limits
        self.receiver_type = receiver_type
        self.codec = codec
        self.boot = 1
        self.receivers = [self._new_receiver() for _ in range(num_engines)]
        self.links = [(f, e) for f in range(num_frontends) for e in range(num_engines)]
        self.books = [RefusalBook() for _ in range(num_frontends)]
        self.sender_type = sender_type
        self.senders = {link: self._new_sender(link, 1) for link in self.links}
        self.up: dict[Link, deque[Sending]] = {k: deque() for k in self.links}
        self.down: dict[Link, deque[DownMessage]] = {k: deque() for k in self.links}
        self.broken: dict[Link, bool] = dict.fromkeys(self.links, True)
        self.needs: dict[Link, deque[MMHash]] = {k: deque() for k in self.links}
        self.tasks: dict[int, Task] = {}
        self.running: list[dict[tuple[str, tuple[str, int]], ReadyRequest]] = [
            {} for _ in range(num_engines)
        ]
        self.done: dict[Link, list[tuple[str, int]]] = {k: [] for k in self.links}
        self.unmakeable: set[int] = set()
        self.carried: dict[tuple[str, tuple[str, int]], frozenset[MMHash]] = {}

    def _new_receiver(self) -> Receiver:
        return self.receiver_type(self.limits, namespace=NAMESPACE, boot=self.boot)

    def _new_sender(self, link: Link, boot: int) -> Sender:
        name, book = f"f{link[0]}", self.books[link[0]]
        return self.sender_type(name, frontend_boot=boot, namespace=NAMESPACE, refusals=book)

    # ---- frontends -----------------------------------------------------------------------------
    def send_value(self, index: int) -> SendValue:
        return SendValue(value_bytes(index, self.sizes[index]), b"%08d" % index)

    def send_items(self, items: tuple[int, ...], source: int = -1) -> list[SendItem]:
        name = f"f{source}" if source >= 0 else None
        return [SendItem(mm_hash(i), self.sizes[i], name) for i in items]

    def add_task(self, frontend: int, items: tuple[int, ...], source: int = -1) -> Task:
        name = len(self.tasks)
        task = self.tasks[name] = Task(name, frontend, items, source=source)
        return task

    def hello(self, link: Link) -> None:
        """The frontend opens a session (it has noticed that there is none)."""
        self._lost(link, self.senders[link].end_session("test"))
        self.broken[link] = False
        self.up[link].append(self.senders[link].hello())

    def send(self, task: Task, engine: int, **binds: object) -> Sending:
        link = (task.frontend, engine)
        sender = self.senders[link]
        task.attempt += 1
        items = self.send_items(task.items, task.source)
        values = {mm_hash(i): self.send_value(i) for i in task.items}
        quiet = self.is_quiet(link)
        believed = {h for h in values if sender.believes(h)}
        carry = sender.plan_send(items)
        sending = sender.request(task.rid, items, NIL, values, **binds)  # type: ignore[arg-type]
        message = sending.message
        assert isinstance(message, Req)
        carried = [i.mm_hash for i in message.items if i.value is not None]
        if carried != carry:
            raise Violation("plan_send promised something else")
        if quiet and any(self.receivers[engine].store.is_announced(h) for h in carried):
            raise Violation("I5: an announced value was sent on a quiet link")
        if believed & set(carried):
            raise Violation("a believed value was sent")
        self.up[link].append(sending)
        task.state, task.engine = "sent", engine
        return sending

    def put(self, link: Link, items: tuple[int, ...], binds: tuple = ()) -> bool:
        values = {mm_hash(i): self.send_value(i) for i in items}
        return self._post(link, self.senders[link].put(self.send_items(items), values, binds))

    def _post(self, link: Link, sending: Sending | None) -> bool:
        """Puts on its way what the frontend has to say, if anything."""
        if sending is not None:
            self.up[link].append(sending)
        return sending is not None

    def abort(self, task: Task) -> None:
        link = (task.frontend, task.engine)
        self._post(link, self.senders[link].abort(task.rid))
        task.state = "gone"

    def note_refusal(self, frontend: int, key: int, at: float) -> None:
        """A frontend convicts a request (key > 0), or an administrator clears the book there."""
        entry = (b"%016d" % key, at, f"shape {key}")
        told = Refusals(entries=(entry,)) if key else Refusals(cleared_at=at)
        self.books[frontend].join(told)

    def refuse(self, link: Link) -> bool:
        """The frontend tells the engine what it is not known to know."""
        return self._post(link, self.senders[link].refuse())

    def answer(self, link: Link) -> None:
        """The frontend answers its oldest open NEED, as its answer duty demands."""
        wanted = self.needs[link].popleft()
        index, sender = int(wanted), self.senders[link]
        if sender.is_needed(wanted) and index not in self.unmakeable:
            sending = sender.fill(wanted, self.send_value(index))
        else:
            sending = sender.nofill(wanted)
        if not self._post(link, sending) and wanted in sender.open_needs:
            self.needs[link].append(wanted)

    def deliver_down(self, link: Link) -> None:
        message = self.down[link].popleft()
        if self.codec:
            message = decode_down(encode_down(message))
        sender = self.senders[link]
        if self.broken[link]:
            return
        event = sender.on_down(message)
        if event.session_over:
            self.broken[link] = True
            self._lost(link, event.lost)
        self.needs[link].extend(event.needs)
        for rid, code in event.rejected:
            self._rejected(link, rid, code)
        if event.outputs is not None:
            for name, attempt in msgspec.msgpack.decode(event.outputs):
                sender.finished((name, attempt))
                task = self.tasks[int(name)]
                if task.state == "sent" and task.rid == (name, attempt):
                    task.state = "done"

    def _rejected(self, link: Link, rid: tuple[str, int], code: str) -> None:
        task = self.tasks[int(rid[0])]
        if task.state == "sent" and task.rid == rid:
            task.state = "failed" if code in ("mm_too_large", "media_conflict") else "new"
            if code == "mm_source_lost":
                task.state = "failed"
                if not any(i in self.unmakeable for i in task.items):
                    raise Violation("I3: rejected for a value that its frontend could make")

    def _lost(self, link: Link, rids: list[tuple[str, int]]) -> None:
        self.needs[link].clear()
        for name, attempt in rids:
            task = self.tasks[int(name)]
            if task.state == "sent" and task.attempt == attempt:
                task.state = "new"

    # ---- engines -------------------------------------------------------------------------------
    def deliver_up(self, link: Link) -> None:
        sending = self.up[link].popleft()
        message, values = self.open(sending)
        receiver = self.receivers[link[1]]
        if isinstance(message, Req):
            self.carried[f"f{link[0]}", message.rid] = frozenset(values)
        answers = receiver.on_message(f"f{link[0]}", message, values)
        if any(isinstance(answer, Bye) and answer.reason == "window" for answer in answers):
            raise Violation("I2: staged bytes over the window")
        self.down[link].extend(answers)

    def open(self, sending: Sending) -> tuple[Up, Mapping[MMHash, Value]]:
        message, frames = sending.message, [b"", *sending.frames]
        if self.codec:
            frames = [memoryview(frame) for frame in encode_up(sending)]
            message = decode_up(frames)
        values: dict[MMHash, Value] = {}
        if isinstance(message, Req | Put | Fill):
            refs = [message] if isinstance(message, Fill) else message.items
            for item in refs:
                if isinstance(item.value, InlineValue):
                    data = frames[item.value.frame]
                    meta = ItemMeta(0, int(item.mm_hash), 1)
                    values[item.mm_hash] = Value(data, meta, item.value.digest)
        return message, values

    def take(self, engine: int) -> None:
        """The engine core takes what is complete and stops what is no longer wanted."""
        receiver = self.receivers[engine]
        while self.has_news_for_core(engine):
            self._recall(engine)
            for ready in receiver.take_ready():
                self._check_own(ready, self.carried.pop((ready.fid, ready.rid), frozenset()))
                damaged = [h for h, value in ready.items.items() if value.data == DAMAGED]
                if damaged:
                    receiver.refetch(ready.fid, ready.rid, damaged)
                    continue
                self._check_values(ready)
                self.running[engine][ready.fid, ready.rid] = ready
            for key in receiver.take_aborted():
                self.running[engine].pop(key, None)
                receiver.finish(*key)

    def has_news_for_core(self, engine: int) -> bool:
        admission = self.receivers[engine].admission
        return bool(admission.ready or admission.lost or admission.replaced)

    def _recall(self, engine: int) -> None:
        """Running requests give wrong values up and get others."""
        receiver, running = self.receivers[engine], self.running[engine]
        while wrong := set(receiver.take_replaced()):
            for key in [key for key, ready in running.items() if wrong & ready.items.keys()]:
                del running[key]
                receiver.requeue(*key)

    def _check_own(self, ready: ReadyRequest, carried: Iterable[MMHash]) -> None:
        for h in carried:
            if ready.items[h].digest != b"%08d" % int(h):
                raise Violation("who brought a value was handed another one")

    def finish(self, engine: int, key: tuple[str, tuple[str, int]]) -> None:
        ready = self.running[engine].pop(key)
        self._check_values(ready)
        receiver = self.receivers[engine]
        for h in ready.items:
            entry = receiver.store.pinned.get(h)
            if entry is None or entry.value.data not in (ready.items[h].data, DAMAGED):
                raise Violation("I1: a running request lost a value")
        if not receiver.finish(*key):
            raise Violation("a running request is unknown")
        fid = int(key[0][1:])
        if key[0] in receiver.sessions:
            self.done[fid, engine].append(key[1])

    def _check_values(self, ready: ReadyRequest) -> None:
        task = self.tasks[int(ready.rid[0])]
        if tuple(int(h) for h in ready.items) != task.items:
            raise Violation("I1: other items than asked for")
        for h, value in ready.items.items():
            if bytes(value.data) != value_bytes(int(h), self.sizes[int(h)]):
                raise Violation("I1: a request sees another item's value")

    def flush(self, link: Link) -> bool:
        outputs, self.done[link] = self.done[link], []
        raw = msgspec.Raw(msgspec.msgpack.encode(outputs)) if outputs else None
        message = self.receivers[link[1]].down(f"f{link[0]}", raw)
        if message is not None:
            self.down[link].append(message)
        return message is not None

    def has_news(self, link: Link) -> bool:
        fid = f"f{link[0]}"
        receiver = self.receivers[link[1]]
        return fid in receiver.sessions and (receiver.has_news(fid) or bool(self.done[link]))

    # ---- faults --------------------------------------------------------------------------------
    def break_link(
        self, link: Link, keep_up: list[bool], keep_down: list[bool], *, notice: bool
    ) -> None:
        """The stream breaks; of the messages in flight those marked survive. `notice`: the engine
        hears of it."""
        self._lose(self.up[link], keep_up)
        self._lose(self.down[link], keep_down)
        self.broken[link] = True
        self._lost(link, self.senders[link].end_session("break"))
        if notice:
            self.receivers[link[1]].on_session_lost(f"f{link[0]}")
            self.take(link[1])
            self.done[link] = []

    @staticmethod
    def _lose(queue: deque, keep: list[bool]) -> None:
        kept = [message for message, stays in zip(queue, keep, strict=False) if stays]
        queue.clear()
        queue.extend(kept)

    @staticmethod
    def damage(value: Value) -> Value:
        """The same value after its bytes have changed in memory."""
        return value._replace(data=DAMAGED)

    def crash_engine(self, engine: int) -> None:
        """A new engine process: nothing remembered."""
        self.boot += 1
        self.receivers[engine] = self._new_receiver()
        self.running[engine] = {}
        self.done |= {link: [] for link in self.links if link[1] == engine}

    def crash_frontend(self, frontend: int) -> None:
        """A new frontend process: its users' connections died with it."""
        self.books[frontend] = RefusalBook()
        for task in self.tasks.values():
            if task.frontend == frontend and task.state in ("new", "sent"):
                task.state = "gone"
        for link in self.links:
            if link[0] == frontend:
                self.senders[link] = self._new_sender(link, self.senders[link].frontend_boot + 1)
                self.broken[link] = True
                self.needs[link].clear()

    # ---- judgement -----------------------------------------------------------------------------
    def is_quiet(self, link: Link) -> bool:
        """Nothing in flight, nothing to say, everything acknowledged."""
        sender, receiver = self.senders[link], self.receivers[link[1]]
        if self.broken[link] or not sender.is_up or self.up[link] or self.down[link]:
            return False
        session = receiver.sessions.get(f"f{link[0]}")
        if session is None or session.sid != sender.sid or self.has_news(link):
            return False
        return not sender.owes_refusals() and sender.acked == sender.next_n - 1

    def check(self) -> None:
        """Every guarantee that can be seen in one state."""
        try:
            for receiver in self.receivers:
                receiver.check_integrity()
            for sender in self.senders.values():
                sender.check_integrity()
        except AssertionError as error:
            raise Violation(str(error) or "integrity") from error
        for link in self.links:
            if self.is_quiet(link):
                self._check_converged(link)

    def _check_converged(self, link: Link) -> None:
        sender, receiver = self.senders[link], self.receivers[link[1]]
        announced = {a.mm_hash: (a.size_bytes, a.meta) for a in receiver.directory()}
        if sender.confirmed != announced or sender.optimistic or sender.inflight_bytes:
            raise Violation("I6: a quiet mirror differs from the engine")
        if sender.bindings != dict(receiver.bindings.table):
            raise Violation("I6: bindings differ on a quiet link")
        if sender.refusals.snapshot() != receiver.refusals.snapshot():
            raise Violation("I6: refusals differ on a quiet link")

    def is_settled(self) -> bool:
        return all(task.state in ("done", "failed", "gone") for task in self.tasks.values())

    def check_end(self) -> None:
        """After everything is settled and delivered: nothing is left behind."""
        for receiver in self.receivers:
            admission = receiver.admission
            if admission.queue or admission.requests or admission.pending:
                raise Violation("leak: an engine still holds something for nobody")
            if receiver.store.held_bytes or receiver.store.bypass_bytes:
                raise Violation("leak: pinned or reserved bytes for nobody")

    def settle(self, max_rounds: int = 200) -> None:
        """Carries everything out in a fixed order until nothing moves; for unit tests."""
        for _ in range(max_rounds):
            moved = False
            for link in self.links:
                if self.broken[link]:
                    self.hello(link)
                moved |= self.refuse(link)
                moved |= self._deliver_all(link)
            for engine in range(len(self.receivers)):
                self.take(engine)
                for key in list(self.running[engine]):
                    self.finish(engine, key)
                    moved = True
            for link in self.links:
                moved |= self.has_news(link) and self.flush(link)
            for task in self.tasks.values():
                link = (task.frontend, task.name % len(self.receivers))
                if task.state == "new" and self.senders[link].is_up:
                    self.send(task, link[1])
                    moved = True
            self.check()
            if not moved:
                return
        raise Violation("I3: does not settle")

    def _deliver_all(self, link: Link) -> bool:
        moved = False
        while self.up[link] or self.down[link] or self.needs[link]:
            moved = True
            if self.up[link]:
                self.deliver_up(link)
            if self.down[link]:
                self.deliver_down(link)
            if self.needs[link]:
                self.answer(link)
        return moved
