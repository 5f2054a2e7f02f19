"""Exhaustive search of small instances finds nothing wrong, and finds what each rule is for.

Each weakened variant below leaves out one rule of the protocol. If the checker ever lets one pass,
the checker (or the rule) has become worthless.
"""

import pytest
from mirror_check import INSTANCES, Instance, Search
from mirror_fuzz import Run, fuzz
from mirror_snapshot import copy, fingerprint
from mirror_world import Violation

from foveal_runtime.mirror.admission import RequestAdmission, State
from foveal_runtime.mirror.messages import Down, Heartbeat, Hello
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.mirror.session import Session
from foveal_runtime.mirror.store import Store

COMPLETE = ["repeat-1x1", "zero-2x1", "silent-crash-1x1", "shrink-1x1", "break-1x1"]
BOUNDED = sorted(set(INSTANCES) - set(COMPLETE))


@pytest.mark.parametrize("name", COMPLETE)
def test_every_order_of_events_is_right(name):
    search = Search(INSTANCES[name])
    search.run()
    assert search.is_complete
    print(name, search.num_states, "states")


@pytest.mark.parametrize("name", BOUNDED)
def test_the_first_thousand_states_are_right(name):
    """The whole search runs under `make soak`."""
    Search(INSTANCES[name]).run(max_states=1000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BOUNDED)
def test_every_order_of_events_is_right_in_larger_instances(name):
    Search(INSTANCES[name]).run(max_seconds=600)


def test_random_schedules_hold_every_guarantee():
    runs, counts = fuzz(first_seed=0, num_steps=60_000, max_seconds=40)
    print(runs, "runs", dict(counts))
    assert counts["steps"] > 5_000
    for kind in ("needs", "stale", "bypasses", "crash_engine", "crash_frontend", "resize"):
        assert counts[kind] > 0, f"the fuzzer never met {kind}"
    assert counts["replaced"] > counts["steps"] / 2000, "wrong values are hardly ever replaced"


def test_snapshots_are_independent_and_equal():
    """A forgotten class or attribute would let one branch of the search disturb another."""
    for seed in range(20):
        run = Run(seed)
        for _ in range(60):
            moves = run._moves()
            if not moves:
                break
            state = (run.world, {})
            before = fingerprint(state)
            run.world, _ = copy(state)
            assert fingerprint((run.world, {})) == before
            move = run.rng.choice(moves)
            move = run.on_this_world(move)
            getattr(run, "_" + move[0])(*move[1:])
            run.world.check()
            assert fingerprint(state) == before, f"seed {seed}: {move} changed its origin"


# ---- what each rule is for ---------------------------------------------------------------------
class NoNeed(RequestAdmission):
    """A hash-only item that is not there is not asked for ("Expected a cached item")."""

    def _ask(self, mm_hash, fid):
        self.pending[mm_hash].asked = fid


class NoEpoch(Receiver):
    """A restarted engine continues the old stream, as after a bare reconnect."""

    def on_message(self, fid, message, values=None):
        if fid not in self.sessions and not isinstance(message, Hello):
            if isinstance(message, Heartbeat):
                return []
            session = self.session_type(fid, message.sid, "", self.limits.max_window_bytes)
            session.expected, session.k = message.n, 1
            self.sessions[fid] = session
        return super().on_message(fid, message, values)


class NoSidFilter(Sender):
    """A note of the session before is taken for one of this session."""

    def on_down(self, message):
        if isinstance(message, Down) and message.sid != self.sid and message.note is not None:
            self._on_ack(message.note.ack)
        return super().on_down(message)


class NoPins(Store):
    """What a running request uses may be evicted."""

    @property
    def held_bytes(self):
        return self.reserved_bytes

    def _free_one(self, keep):
        if super()._free_one(keep):
            return True
        for mm_hash, entry in list(self.pinned.items()):
            if mm_hash not in keep:
                self.pinned_bytes -= entry.size_bytes
                del self.pinned[mm_hash]
                return True
        return False


class ItemByItem(RequestAdmission):
    """Items are taken one by one as they fit, by everybody in the queue."""

    def pump(self):
        for request in [r for r in self.queue if r.state is State.QUEUED]:
            for mm_hash, item in request.items.items():
                store = self.store
                if mm_hash in request.held or (store.lookup(mm_hash) is None and (
                    store.used_bytes + item.size_bytes > store.capacity_bytes
                )):  # fmt: skip
                    continue
                if store.lookup(mm_hash) is None:
                    store.reserve(mm_hash, item.size_bytes, silent=False, bypass=False)
                    store.fill(mm_hash, request.copies[mm_hash], 1)
                else:
                    store.pin(mm_hash)
                request.held[mm_hash] = None
            if len(request.held) == len(request.items):
                self.queue.remove(request)
                request.session.queued.remove(request.queued_n)
                request.session.staged_bytes -= request.staged_bytes
                request.staged_bytes = request.queued_n = 0
                request.state = State.RESERVED
                self._check_ready(request)


class FillInWindow(Sender):
    """A FILL waits for window credit like any value."""

    def fill(self, mm_hash, value):
        return super().fill(mm_hash, value) if self._fits_window(len(value.data)) else None


class EarlyAck(Session):
    """Messages are acknowledged when received, not when admitted."""

    def lookup_ack(self):
        return self.expected - 1


class NoRetarget(RequestAdmission):
    """What a dead frontend was asked for is not asked of another."""

    def _retarget(self, mm_hash):
        pass


class ShortMemory(Sender):
    """A value can be produced only until its request is acknowledged."""

    def is_needed(self, mm_hash):
        return super().is_needed(mm_hash) and self.acked < self.next_n - 1


class PoliteFree(RequestAdmission):
    """A value is freed only when no hint on its way means it."""

    def _is_admissible(self, request, bypass):
        hinted = {h for r in self.queue if r is not request for h in r.items if h not in r.copies}
        wanted = sum(i.size_bytes for h, i in request.items.items() if not self.store.is_held(h))
        kept = sum(
            e.size_bytes for h, e in self.store.idle.items() if h in hinted - set(request.items)
        )
        room = self.store.capacity_bytes - self.store.held_bytes - kept
        return super()._is_admissible(request, bypass) and wanted <= room


class SilentEviction(Store):
    """An eviction for room is not announced."""

    def _free_one(self, keep):
        before = dict(self.changed)
        freed = super()._free_one(keep)
        self.changed = before
        return freed


class LongHope(Sender):
    """A sent value is believed in until it is announced, whatever the engine acknowledges."""

    def _on_ack(self, ack):
        hopes = dict(self.optimistic)
        super()._on_ack(ack)
        self.optimistic = {h: ack + 1 for h in hopes if h not in self.confirmed}


class LeakySession(RequestAdmission):
    """The requests of a session that ended stay."""

    def drop_session(self, session):
        self.queue = type(self.queue)(r for r in self.queue if r.session is not session)


class WindowBlind(Sender):
    """Values are sent whatever is in flight."""

    def _fits_window(self, size_bytes):
        return True


def engine(kind: type) -> type[Receiver]:
    """A receiver with one weakened part."""
    part = {Store: "store_type", RequestAdmission: "admission_type", Session: "session_type"}
    [name] = [name for base, name in part.items() if issubclass(kind, base)]
    return type(kind.__name__, (Receiver,), {name: kind})


STALE = INSTANCES["evict-repeat-1x1"]
PULL = Instance(frontends=1, tasks=((0, (0,), 0),), window=0)
THREE = Instance(frontends=1, sizes=(1, 1, 1), tasks=((0, (0,), 0), (0, (1,), 0), (0, (2,), 0)))
VARIANTS = {
    "no-need": (STALE, engine(NoNeed), Sender, "I3"),
    "no-epoch": (INSTANCES["silent-crash-1x1"], NoEpoch, Sender, "."),
    "no-sid-filter": (
        Instance(frontends=1, tasks=((0, (0,), 0), (0, (1,), 0)), breaks=1),
        Receiver,
        NoSidFilter,
        ".",
    ),
    "no-pins": (INSTANCES["plain-2x1"], engine(NoPins), Sender, "."),
    "item-by-item": (INSTANCES["disjoint-2x1"], engine(ItemByItem), Sender, "I3"),
    "fill-in-window": (
        Instance(
            frontends=1,
            sizes=(1, 1, 1),
            tasks=((0, (0, 1), 0), (0, (2,), 0)),
            capacity=2,
        ),
        Receiver,
        FillInWindow,
        "I3",
    ),
    "early-ack": (
        Instance(frontends=1, sizes=(1, 1, 1), tasks=((0, (0,), 0), (0, (1,), 0), (0, (2,), 0))),
        engine(EarlyAck),
        Sender,
        "I2",
    ),
    "no-retarget": (INSTANCES["frontend-crash-2x1"], engine(NoRetarget), Sender, "."),
    "short-memory": (PULL, Receiver, ShortMemory, "I3"),
    "polite-free": (
        Instance(frontends=1, tasks=((0, (0,), 0), (0, (1,), 0), (0, (0,), 0)), window=2),
        engine(PoliteFree),
        Sender,
        "I3",
    ),
    "silent-eviction": (INSTANCES["plain-2x1"], engine(SilentEviction), Sender, "I6"),
    "long-hope": (INSTANCES["repeat-1x1"], Receiver, LongHope, "."),
    "leaky-session": (INSTANCES["frontend-crash-2x1"], engine(LeakySession), Sender, "."),
    "window-blind": (THREE, Receiver, WindowBlind, "."),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_checker_sees_what_a_missing_rule_does(name):
    instance, receiver_type, sender_type, guarantee = VARIANTS[name]
    with pytest.raises(Violation, match=guarantee) as caught:
        Search(instance, receiver_type=receiver_type, sender_type=sender_type).run(
            max_states=20_000
        )
    print(caught.value)


class FirstStays(RequestAdmission):
    """A copy that differs replaces nothing: who brings it is answered from the stored one."""

    def _replace_differing(self, request):
        pass


def test_the_fuzzer_sees_values_that_are_not_replaced():
    with pytest.raises(Violation, match="who brought a value was handed another one"):
        Run(0, receiver_type=engine(FirstStays)).run()
