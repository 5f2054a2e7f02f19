"""The encoder cache: outputs by content, their users, and eviction when space is needed.

Used by `scheduler` only. Outputs are keyed by content (MMHash), shared by all requests, counted in
embeddings, and kept after their last user until the space is needed (lazily freed). Behind the
device cache lies an optional host tier. Never touches tensors: the runner obeys the lists that
`take_moves` returns. Questions (`has_*`, `can_*`, `lookup`, `fits`) change nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from foveal_runtime.engine.caches.host_tier import HostTier
from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.plan.media import MMHash
from foveal_runtime.telemetry.ages import EvictionAges
from foveal_runtime.telemetry.ghosts import GhostLists

Where = Literal["device", "reclaim", "host", "absent"]
"""device: usable now; reclaim: evicted in this pass, the tensor still exists; host: can be
loaded; absent: must be encoded."""


class EncoderUser(Protocol):
    """What the cache asks of a request."""

    request_id: str
    mm_inputs: tuple[MMInput, ...]
    mm_embeds: tuple[int, ...]


class Moves(NamedTuple):
    """What one pass asks of the runner, in the order it must be done: store, free, drop, load,
    encode."""

    store: list[MMHash]
    free: list[MMHash]
    drop_host: list[MMHash]
    load: list[MMHash]
    encode: list[MMHash]


class Kept(NamedTuple):
    """An output worth keeping over a restart. `cost_seconds`: of encoding one embedding; 0 =
    not known any more."""

    mm_hash: MMHash
    num_embeds: int
    cost_seconds: float


@dataclass(slots=True, eq=False)
class _Entry:
    """`users`: request id -> occurrences of the item that it holds. `cost_seconds`: of encoding one
    embedding."""

    num_embeds: int
    users: dict[str, int] = field(default_factory=dict)
    cost_seconds: float = 0.0
    doomed: bool = False
    priority: float = 0.0
    stamp: int = 0


class EncoderCacheManager:
    """Books of the encoder cache.

    Args:
        cache_size: embeddings in the device cache.
        host: the tier behind it.
        eviction: "lru" evicts what was released first; "cost" weighs in what an embedding took
            to encode (greedy-dual: a priority is the clock at release + seconds per embedding,
            and the clock follows the evicted).
        ages: hears how long evicted outputs had been nobody's.
    """

    def __init__(
        self,
        cache_size: int,
        *,
        host: HostTier | None = None,
        eviction: Literal["lru", "cost"] = "lru",
        ages: EvictionAges | None = None,
    ) -> None:
        self.cache_size = cache_size
        self.host = HostTier(0, 0) if host is None else host
        self.num_free_embeds = cache_size
        self.num_idle_embeds = 0
        self.num_evictions = 0
        self.num_resets = 0
        self.num_host_evictions = 0
        self.queries: Counter[int] = Counter()  # occurrences looked up, by modality
        self.hits: Counter[tuple[int, str]] = Counter()  # by modality and tier ("device", "host")
        self.hit_embeds: Counter[int] = Counter()  # by modality: not encoded again
        # A hit in either tier saves the encoder, so the two count as one cache here.
        embed_bytes = self.host.embed_bytes
        host_embeds = self.host.capacity_bytes // embed_bytes if embed_bytes else 0
        self.ghosts = GhostLists(cache_size + host_embeds)
        self.ages = EvictionAges(lambda: 0.0) if ages is None else ages
        self.num_encoded_again = 0
        self._by_cost = eviction == "cost"
        self._clock = 0.0
        self._stamp = 0
        self._heap: list[tuple[float, int, MMHash]] = []
        self._entries: dict[MMHash, _Entry] = {}
        self._idle: OrderedDict[MMHash, None] = OrderedDict()  # nobody's, oldest release first
        self._held: dict[str, set[int]] = {}  # request id -> input ids it holds
        self._freed: dict[MMHash, None] = {}
        self._lost: dict[MMHash, None] = {}  # to be dropped too, if the runner has it at all
        # What this pass did, not yet told to the runner.
        self._fresh: dict[MMHash, Where] = {}
        self._store: dict[MMHash, None] = {}
        self._drop_host: dict[MMHash, None] = {}

    # ---- questions ------------------------------------------------------------------------------

    @property
    def num_used_embeds(self) -> int:
        """Embeddings that some request holds."""
        return self.cache_size - self.num_free_embeds - self.num_idle_embeds

    @property
    def num_references(self) -> int:
        """Items held by requests, an item counted once for each occurrence."""
        return sum(len(held) for held in self._held.values())

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, mm_hash: MMHash) -> Where:
        if mm_hash in self._entries:
            return "device"
        if mm_hash in self._freed:
            return "reclaim"
        return "host" if mm_hash in self.host else "absent"

    def known_embeds(self, mm_hash: MMHash) -> int | None:
        """Embeddings that the key stands for, when it is known."""
        entry = self._entries.get(mm_hash)
        return entry.num_embeds if entry is not None else self.host.num_embeds(mm_hash)

    @property
    def num_hits(self) -> int:
        return sum(self.hits.values())

    @property
    def has_moves(self) -> bool:
        """The runner has something to be told."""
        return bool(self._store or self._freed or self._lost or self._drop_host or self._fresh)

    def is_idle(self, mm_hash: MMHash) -> bool:
        return mm_hash in self._idle

    def fits(self, new_embeds: int, keep_embeds: int = 0) -> bool:
        """Whether new outputs of that size fit when idle ones of `keep_embeds` must stay."""
        return new_embeds <= self.num_free_embeds + self.num_idle_embeds - keep_embeds

    def get_cached_input_ids(self, request: EncoderUser) -> set[int]:
        """Input ids for which the request holds a reference."""
        return set(self._held.get(request.request_id, ()))

    def holds(self, request_id: str, input_id: int) -> bool:
        return input_id in self._held.get(request_id, ())

    def users(self, mm_hash: MMHash) -> Sequence[str]:
        entry = self._entries.get(mm_hash)
        return () if entry is None else tuple(entry.users)

    def by_heat(self) -> list[Kept]:
        """Every output, those that eviction would take last first: held ones, idle ones, then
        what only the host tier has."""
        entries = self._entries
        idle = list(reversed(self._idle))
        if self._by_cost:
            idle.sort(key=lambda mm_hash: -entries[mm_hash].priority)
        hot = [key for key, entry in entries.items() if entry.users] + idle
        kept = [Kept(key, entries[key].num_embeds, entries[key].cost_seconds) for key in hot]
        for mm_hash in reversed(list(self.host)):
            num_embeds = self.host.num_embeds(mm_hash)
            if mm_hash not in entries and num_embeds:
                kept.append(Kept(mm_hash, num_embeds, 0.0))
        return kept

    # ---- changes --------------------------------------------------------------------------------

    def adopt(self, kept: Kept, tier: Literal["device", "host"]) -> None:
        """An output that the runner has from elsewhere becomes the most recently released one.
        The caller has checked that it fits and is not here."""
        mm_hash, num_embeds, cost_seconds = kept
        assert self.lookup(mm_hash) == "absent"
        if tier == "host":
            added, dropped = self.host.store(mm_hash, num_embeds, set())
            assert added
            assert not dropped
            return
        assert num_embeds <= self.num_free_embeds
        entry = self._entries[mm_hash] = _Entry(num_embeds)
        entry.cost_seconds = cost_seconds
        self.num_free_embeds -= num_embeds
        self.num_idle_embeds += num_embeds
        self._make_idle(mm_hash)

    def reserve(self, num_embeds: int, keep_host: Iterable[MMHash] = ()) -> list[MMHash]:
        """Evicts idle outputs until `num_embeds` are free; returns what it evicted.

        Args:
            keep_host: keys whose host copies must survive (they are about to be loaded).
        """
        assert self.fits(num_embeds)
        evicted = []
        keep = set(keep_host)
        while self.num_free_embeds < num_embeds:
            victim = self._next_victim()
            self._evict(victim, keep)
            evicted.append(victim)
        return evicted

    def allocate(
        self, request: EncoderUser, input_id: int, keep_host: Iterable[MMHash] = ()
    ) -> tuple[Where, list[MMHash]]:
        """The request holds the item from now on; room is made when the output is not there.

        Args:
            keep_host: keys whose host copies must survive (others of the same window).

        Returns:
            where the output was before ("absent": it must be encoded in this step), and what was
            evicted for it.
        """
        held = self._held.setdefault(request.request_id, set())
        assert input_id not in held
        mm_hash, num_embeds = request.mm_inputs[input_id].mm_hash, request.mm_embeds[input_id]
        where, evicted = self.lookup(mm_hash), []
        if where == "device":
            entry = self._entries[mm_hash]
            assert entry.num_embeds == num_embeds, "one key, two sizes: check known_embeds first"
            if not entry.users:
                self._unidle(mm_hash)
        else:
            if where == "host":
                self.host.touch(mm_hash)
            evicted = self.reserve(num_embeds, {*keep_host, mm_hash})
            entry = self._entries[mm_hash] = _Entry(num_embeds)
            self.num_free_embeds -= num_embeds
            self._fresh[mm_hash] = where
            self._freed.pop(mm_hash, None)
        held.add(input_id)
        entry.users[request.request_id] = entry.users.get(request.request_id, 0) + 1
        self._count(request.mm_inputs[input_id].modality, num_embeds, where)
        self.num_encoded_again += where == "absent" and self.ages.take_lately(mm_hash)
        self.ghosts.query(mm_hash, num_embeds)
        return where, evicted

    def _count(self, modality: int, num_embeds: int, where: Where) -> None:
        self.queries[modality] += 1
        if where != "absent":
            self.hits[modality, "host" if where == "host" else "device"] += 1
            self.hit_embeds[modality] += num_embeds

    def free_encoder_input(self, request: EncoderUser, input_id: int) -> None:
        """The request is done with that occurrence; its reference ends with its last one."""
        held = self._held.get(request.request_id)
        if held is None or input_id not in held:
            return
        held.remove(input_id)
        if not held:
            del self._held[request.request_id]
        mm_hash = request.mm_inputs[input_id].mm_hash
        entry = self._entries[mm_hash]
        entry.users[request.request_id] -= 1
        if entry.users[request.request_id] == 0:
            del entry.users[request.request_id]
            if not entry.users:
                self.num_idle_embeds += entry.num_embeds
                self._make_idle(mm_hash)
                if entry.doomed:
                    self._evict_unstored(mm_hash)

    def discard(self, mm_hash: MMHash) -> None:
        """Between passes: nobody finds the output again; a held one goes with its last user."""
        entry = self._entries.get(mm_hash)
        if entry is not None:
            entry.doomed = True
            if not entry.users:
                self._evict_unstored(mm_hash)
        if mm_hash in self.host and self._fresh.get(mm_hash) != "host":
            self._drop_from_host(mm_hash)

    def free(self, request: EncoderUser) -> None:
        """Drops all references of a request (finished, aborted, preempted)."""
        for input_id in sorted(self._held.get(request.request_id, ())):
            self.free_encoder_input(request, input_id)

    def note_cost(self, mm_hash: MMHash, seconds: float) -> None:
        """What encoding the item took, for the "cost" policy. A short prompt is consumed in the
        very step that encodes its items, so the output may be idle already."""
        entry = self._entries.get(mm_hash)
        if entry is not None and entry.num_embeds:
            entry.cost_seconds = seconds / entry.num_embeds
            if self._by_cost and mm_hash in self._idle:
                self._rank(mm_hash)

    def forget(self, mm_hash: MMHash) -> None:
        """An output nobody holds turned out not to exist: takes it off the books."""
        entry = self._entries[mm_hash]
        assert not entry.users
        self._unidle(mm_hash)
        del self._entries[mm_hash]
        self.num_free_embeds += entry.num_embeds
        self._lost[mm_hash] = None
        self.ages.leave(mm_hash)

    def reset(self) -> int:
        """Frees every output nobody holds, here and in the host tier; returns how many here."""
        self.ghosts.reset()
        idle = list(self._idle)
        self._lost.update(self._freed)
        self._freed.clear()
        for mm_hash in idle:
            self._evict_unstored(mm_hash)
        for mm_hash in list(self.host):
            if self._fresh.get(mm_hash) != "host":
                self._drop_from_host(mm_hash)
        return len(idle)

    def get_freed_ids(self) -> list[MMHash]:
        """Keys whose outputs are to be dropped, minus those allocated again since; clears it."""
        freed = [*self._lost, *self._freed]
        self._lost.clear()
        self._freed.clear()
        return freed

    def take_moves(self) -> Moves:
        """All that changed since the last call, for the runner."""
        load = [mm_hash for mm_hash, where in self._fresh.items() if where == "host"]
        encode = [mm_hash for mm_hash, where in self._fresh.items() if where == "absent"]
        moves = Moves(list(self._store), self.get_freed_ids(), list(self._drop_host), load, encode)
        self._fresh.clear()
        self._store.clear()
        self._drop_host.clear()
        return moves

    # ---- internals ------------------------------------------------------------------------------

    def _make_idle(self, mm_hash: MMHash) -> None:
        self._idle[mm_hash] = None
        self.ages.rest(mm_hash)
        if self._by_cost:
            self._rank(mm_hash)

    def _rank(self, mm_hash: MMHash) -> None:
        """Gives an idle output its place in the order of the "cost" policy."""
        entry = self._entries[mm_hash]
        self._stamp += 1
        entry.stamp = self._stamp
        entry.priority = self._clock + entry.cost_seconds
        heapq.heappush(self._heap, (entry.priority, entry.stamp, mm_hash))
        if len(self._heap) > 4 * len(self._idle) + 64:
            self._heap = [item for item in self._heap if self._is_current(item)]
            heapq.heapify(self._heap)

    def _unidle(self, mm_hash: MMHash) -> None:
        del self._idle[mm_hash]
        self.num_idle_embeds -= self._entries[mm_hash].num_embeds

    def _is_current(self, item: tuple[float, int, MMHash]) -> bool:
        return item[2] in self._idle and self._entries[item[2]].stamp == item[1]

    def _next_victim(self) -> MMHash:
        """Takes the next victim out of the order (not yet out of the books)."""
        if not self._by_cost:
            return self._idle.popitem(last=False)[0]
        while True:
            item = heapq.heappop(self._heap)
            if self._is_current(item):
                self._clock = max(self._clock, item[0])
                del self._idle[item[2]]
                return item[2]

    def _evict(self, mm_hash: MMHash, keep: set[MMHash]) -> None:
        entry = self._entries.pop(mm_hash)
        self.num_idle_embeds -= entry.num_embeds
        self.num_free_embeds += entry.num_embeds
        self.num_evictions += 1
        self.ages.evict(mm_hash)
        origin = self._fresh.pop(mm_hash, None)
        if origin in ("absent", "host"):
            return  # this pass wanted it and no longer does: the runner never hears of it
        self._freed[mm_hash] = None
        reads = {key for key, where in self._fresh.items() if where == "host"}
        added, dropped = self.host.store(mm_hash, entry.num_embeds, keep | reads)
        self.num_host_evictions += len(dropped)
        for victim in dropped:
            self._note_drop(victim)
        if added:
            if mm_hash in self._drop_host:
                del self._drop_host[mm_hash]  # still there: the runner has not dropped it
            else:
                self._store[mm_hash] = None

    def _evict_unstored(self, mm_hash: MMHash) -> None:
        entry = self._entries.pop(mm_hash)
        self.ages.leave(mm_hash)
        del self._idle[mm_hash]
        self.num_idle_embeds -= entry.num_embeds
        self.num_free_embeds += entry.num_embeds
        self.num_resets += 1
        if self._fresh.pop(mm_hash, None) not in ("absent", "host"):
            self._lost[mm_hash] = None  # not to be reclaimed: somebody wants it gone

    def _drop_from_host(self, mm_hash: MMHash) -> None:
        self.host.remove(mm_hash)
        self._note_drop(mm_hash)

    def _note_drop(self, mm_hash: MMHash) -> None:
        if mm_hash in self._store:
            del self._store[mm_hash]  # never reached the host
        else:
            self._drop_host[mm_hash] = None

    def check_integrity(self, live: Iterable[EncoderUser] | None = None) -> None:
        """Asserts the books agree; with `live`, also that only those requests hold something."""
        total = sum(entry.num_embeds for entry in self._entries.values())
        idle = sum(self._entries[key].num_embeds for key in self._idle)
        assert self.num_free_embeds == self.cache_size - total
        assert self.num_free_embeds >= 0
        assert self.num_idle_embeds == idle
        assert not self._freed.keys() & self._entries.keys()
        assert self._fresh.keys() <= self._entries.keys()
        for mm_hash, entry in self._entries.items():
            assert (mm_hash in self._idle) == (not entry.users)
            assert all(count > 0 for count in entry.users.values())
        if self._by_cost:
            assert {item[2] for item in self._heap if self._is_current(item)} == set(self._idle)
        held: defaultdict[MMHash, Counter[str]] = defaultdict(Counter)
        users = {user.request_id: user for user in live} if live is not None else None
        if users is not None:
            assert self._held.keys() <= users.keys(), "a request that is gone holds outputs"
            for request_id, inputs in self._held.items():
                for input_id in inputs:
                    key = users[request_id].mm_inputs[input_id].mm_hash
                    held[key][request_id] += 1
            assert held == {key: e.users for key, e in self._entries.items() if e.users}
        self.host.check_integrity()
