"""The engine's value store: a bytes-bounded LRU with pins, reservations and limbo.

Values are used by `admission` alone. An entry is in exactly one of four places: *reserved* (space
taken, data on the way), *pinned* (a request uses it), *idle* (LRU) or *limbo* (announced as
evicted, bytes not yet freed). `idle + limbo + pinned + reserved <= capacity` always, except that a
shrink below the pinned bytes lets them end first. Entries of requests that go past the cache
(*bypass*) are counted in a second pool and are never announced; what exceeds that pool is borrowed
from the capacity. Never blocks, never asks a peer, never copies a value.

Bindings, which `receiver` owns, say for which value a user's uuid stands: a bounded LRU of alias to
MMHash in which the first binding wins, announced to every session as values are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from foveal_runtime.mirror.messages import Alias
from foveal_runtime.plan.media import ItemMeta, MMHash

Buffer = bytes | bytearray | memoryview


class Value(NamedTuple):
    """A serialised item as it came: opaque bytes, the metadata to announce, 8-byte digest."""

    data: Buffer
    meta: ItemMeta | None = None
    digest: bytes = b""


class Watch(Protocol):
    """Hears when values rest unused and when they go; takes notes and decides nothing."""

    def rest(self, key: bytes) -> None: ...

    def evict(self, key: bytes) -> None:
        """To make room."""
        ...

    def leave(self, key: bytes) -> None:
        """For another reason."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """One value, or the space for it.

    `silent` entries are never announced and go at their last unpin; `doomed` ones (admin reset)
    were announced and go at their last unpin, too; `wrong` ones are doomed because of what they
    hold, and are not pinned again. `bypass` entries count in the second pool.
    """

    size_bytes: int
    silent: bool
    bypass: bool
    doomed: bool = False
    wrong: bool = False
    pins: int = 0
    value: Value | None = None


class Store:
    """The values of one engine.

    `changed` collects hashes whose announced state changed; `drain_changed` hands them over.
    `wrong` collects those whose wrong value has lost its last pin. `watch` hears of what rests
    and what goes.
    """

    def __init__(self, capacity_bytes: int, bypass_capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.bypass_capacity_bytes = bypass_capacity_bytes
        self.idle: OrderedDict[MMHash, Entry] = OrderedDict()
        self.limbo: OrderedDict[MMHash, Entry] = OrderedDict()
        self.pinned: dict[MMHash, Entry] = {}
        self.reserved: dict[MMHash, Entry] = {}
        self.idle_bytes = self.limbo_bytes = 0
        self.pinned_bytes = self.reserved_bytes = self.bypass_bytes = 0
        self.changed: dict[MMHash, None] = {}
        self.wrong: dict[MMHash, None] = {}
        self.num_borrowed = 0
        self.watch: Watch | None = None
        self.num_rescued = self.num_evicted_limbo = self.num_evicted_forced = 0

    # ---- questions -----------------------------------------------------------------------------
    @property
    def used_bytes(self) -> int:
        held = self.pinned_bytes + self.reserved_bytes + self.borrowed_bytes
        return self.idle_bytes + self.limbo_bytes + held

    @property
    def held_bytes(self) -> int:
        """Bytes that eviction cannot free."""
        return self.pinned_bytes + self.reserved_bytes + self.borrowed_bytes

    @property
    def borrowed_bytes(self) -> int:
        """Bypass bytes beyond their own pool."""
        return max(0, self.bypass_bytes - self.bypass_capacity_bytes)

    def would_borrow(self, size_bytes: int) -> int:
        """What `size_bytes` more of bypass entries would take from the capacity."""
        after = max(0, self.bypass_bytes + size_bytes - self.bypass_capacity_bytes)
        return after - self.borrowed_bytes

    def lookup(self, mm_hash: MMHash) -> Entry | None:
        """The entry with data, wherever it is; None when absent or only reserved."""
        return self.pinned.get(mm_hash) or self.idle.get(mm_hash) or self.limbo.get(mm_hash)

    def lookup_any(self, mm_hash: MMHash) -> Entry | None:
        return self.lookup(mm_hash) or self.reserved.get(mm_hash)

    def is_held(self, mm_hash: MMHash) -> bool:
        """Pinned or reserved: using it once more costs no room."""
        return mm_hash in self.pinned or mm_hash in self.reserved

    def is_announced(self, mm_hash: MMHash) -> bool:
        entry = self.pinned.get(mm_hash)
        return mm_hash in self.idle if entry is None else not entry.silent

    def announced(self) -> dict[MMHash, Entry]:
        """Everything mirrors may believe in: idle, and pinned unless silent."""
        found = dict(self.idle)
        found.update((h, e) for h, e in self.pinned.items() if not e.silent)
        return found

    @property
    def num_entries(self) -> int:
        return len(self.idle) + len(self.limbo) + len(self.pinned)

    # ---- changes -------------------------------------------------------------------------------
    def drain_changed(self) -> dict[MMHash, None]:
        changed, self.changed = self.changed, {}
        return changed

    def reserve(self, mm_hash: MMHash, size_bytes: int, *, silent: bool, bypass: bool) -> None:
        """Takes space for data on the way. The caller has made room."""
        assert self.lookup_any(mm_hash) is None, "reserve of a known hash"
        self.reserved[mm_hash] = Entry(size_bytes, silent or bypass, bypass)
        if bypass:
            self.bypass_bytes += size_bytes
            self.num_borrowed += self.borrowed_bytes > 0
        else:
            self.reserved_bytes += size_bytes

    def cancel(self, mm_hash: MMHash) -> None:
        """Gives a reservation back."""
        entry = self.reserved.pop(mm_hash)
        if entry.bypass:
            self.bypass_bytes -= entry.size_bytes
        else:
            self.reserved_bytes -= entry.size_bytes

    def fill(self, mm_hash: MMHash, value: Value, pins: int) -> None:
        """Puts data into its reservation; without pins it becomes an idle entry (or goes)."""
        entry = self.reserved.pop(mm_hash)
        entry.value = value
        entry.pins = pins
        if entry.bypass:
            if pins:
                self.pinned[mm_hash] = entry
            else:
                self.bypass_bytes -= entry.size_bytes
            return
        self.reserved_bytes -= entry.size_bytes
        if pins:
            self.pinned[mm_hash] = entry
            self.pinned_bytes += entry.size_bytes
        elif not entry.silent:
            self._rest(mm_hash, entry)
        if not entry.silent:
            self.changed[mm_hash] = None
        self._shed()  # a shrink may have waited for this reservation to end

    def insert_idle(self, mm_hash: MMHash, size_bytes: int, value: Value) -> None:
        """Keeps a value that nobody waits for. The caller has made room."""
        assert self.lookup_any(mm_hash) is None
        entry = Entry(size_bytes, silent=False, bypass=False)
        entry.value = value
        self._rest(mm_hash, entry)
        self.changed[mm_hash] = None

    def pin(self, mm_hash: MMHash) -> None:
        """One user more of an entry with data; one in limbo is announced again."""
        entry = self.pinned.get(mm_hash)
        if entry is not None:
            entry.pins += 1
            return
        entry = self.idle.pop(mm_hash, None)
        if entry is not None:
            self.idle_bytes -= entry.size_bytes
        else:
            entry = self.limbo.pop(mm_hash)
            self.limbo_bytes -= entry.size_bytes
            self.num_rescued += 1
            self.changed[mm_hash] = None
        entry.pins = 1
        self.pinned[mm_hash] = entry
        self.pinned_bytes += entry.size_bytes

    def unpin(self, mm_hash: MMHash) -> None:
        """One user less; the last one leaves the entry as the most recently used idle one."""
        entry = self.pinned[mm_hash]
        entry.pins -= 1
        if entry.pins:
            return
        del self.pinned[mm_hash]
        if entry.wrong:
            self.wrong[mm_hash] = None
        if entry.bypass:
            self.bypass_bytes -= entry.size_bytes
            return
        self.pinned_bytes -= entry.size_bytes
        if entry.silent:
            return
        if entry.doomed:
            self.changed[mm_hash] = None
            self._left(mm_hash)
            return
        self._rest(mm_hash, entry)
        self._shed()

    def discard(self, mm_hash: MMHash) -> None:
        """Takes a wrong value out, at once or at its last unpin; nothing for an unknown hash."""
        entry = self.pinned.get(mm_hash)
        if entry is not None:
            entry.doomed = entry.wrong = True
            return
        for place in (self.idle, self.limbo):
            found = place.pop(mm_hash, None)
            if found is not None:
                if place is self.idle:
                    self.idle_bytes -= found.size_bytes
                else:
                    self.limbo_bytes -= found.size_bytes
                self.changed[mm_hash] = None
                self._left(mm_hash)

    def make_room(self, size_bytes: int, keep: Container[MMHash] = ()) -> None:
        """Evicts limbo (oldest first), then idle (least recently used), outside `keep`, until
        `size_bytes` more fit. The caller has checked that they can."""
        while self.used_bytes + size_bytes > self.capacity_bytes:
            freed = self._free_one(keep)
            assert freed, "admission promised room"

    def doom(self, grace_bytes: int) -> None:
        """Announces evictions ahead of need: keeps `grace_bytes` free or in limbo."""
        limit = self.capacity_bytes - grace_bytes
        while self.idle and self.used_bytes - self.limbo_bytes > limit:
            mm_hash, entry = self.idle.popitem(last=False)
            self.idle_bytes -= entry.size_bytes
            self.limbo[mm_hash] = entry
            self.limbo_bytes += entry.size_bytes
            self.changed[mm_hash] = None

    def reset(self) -> None:
        """Frees all that is unpinned; what is pinned goes at its last unpin."""
        for mm_hash in self.idle:
            self.changed[mm_hash] = None
        for mm_hash in (*self.idle, *self.limbo):
            self._left(mm_hash)
        self.idle.clear()
        self.limbo.clear()
        self.idle_bytes = self.limbo_bytes = 0
        for entry in self.pinned.values():
            entry.doomed = True

    def resize(self, capacity_bytes: int) -> None:
        """Grows at once; a shrink evicts what is unpinned and lets pins end."""
        self.capacity_bytes = capacity_bytes
        self._shed()

    # ---- internals -----------------------------------------------------------------------------
    def _rest(self, mm_hash: MMHash, entry: Entry) -> None:
        self.idle[mm_hash] = entry
        self.idle_bytes += entry.size_bytes
        if self.watch is not None:
            self.watch.rest(mm_hash)

    def _left(self, mm_hash: MMHash) -> None:
        if self.watch is not None:
            self.watch.leave(mm_hash)

    def _shed(self) -> None:
        while self.used_bytes > self.capacity_bytes and self._free_one(()):
            pass

    def _free_one(self, keep: Container[MMHash]) -> bool:
        for mm_hash in self.limbo:
            if mm_hash not in keep:
                self.limbo_bytes -= self.limbo.pop(mm_hash).size_bytes
                self.num_evicted_limbo += 1
                self._evicted(mm_hash)
                return True
        for mm_hash in self.idle:
            if mm_hash not in keep:
                self.idle_bytes -= self.idle.pop(mm_hash).size_bytes
                self.changed[mm_hash] = None
                self.num_evicted_forced += 1
                self._evicted(mm_hash)
                return True
        return False

    def _evicted(self, mm_hash: MMHash) -> None:
        if self.watch is not None:
            self.watch.evict(mm_hash)

    def check_integrity(self) -> None:
        """Recomputes every counter; asserts that each hash is in one place."""
        places = (self.idle, self.limbo, self.pinned, self.reserved)
        hashes = [h for place in places for h in place]
        assert len(hashes) == len(set(hashes)), "a hash is in two places"

        def total(entries: dict[MMHash, Entry]) -> int:
            return sum(e.size_bytes for e in entries.values() if not e.bypass)

        assert self.idle_bytes == total(self.idle)
        assert self.limbo_bytes == total(self.limbo)
        assert self.pinned_bytes == total(self.pinned)
        assert self.reserved_bytes == total(self.reserved)
        held = [*self.pinned.values(), *self.reserved.values()]
        assert self.bypass_bytes == sum(e.size_bytes for e in held if e.bypass)
        assert all(e.pins > 0 and e.value is not None for e in self.pinned.values())
        assert all(e.value is None for e in self.reserved.values())
        resting = [*self.idle.values(), *self.limbo.values()]
        assert all(e.value is not None and not (e.silent or e.bypass) for e in resting)
        assert self.used_bytes <= max(self.capacity_bytes, self.held_bytes), "I2: over capacity"


class Bindings:
    """`changed` collects aliases whose binding came or went; `drain_changed` hands them over."""

    def __init__(self, max_bindings: int) -> None:
        self.max_bindings = max_bindings
        self.table: OrderedDict[Alias, MMHash] = OrderedDict()
        self.changed: dict[Alias, None] = {}

    def lookup(self, alias: Alias) -> MMHash | None:
        return self.table.get(alias)

    def conflicts(self, binds: Iterable[tuple[Alias, MMHash]]) -> list[Alias]:
        """The aliases among `binds` that stand for something else already."""
        seen: dict[Alias, MMHash] = {}
        found = []
        for alias, mm_hash in binds:
            if self.table.get(alias, seen.setdefault(alias, mm_hash)) != mm_hash:
                found.append(alias)
        return found

    def bind(self, alias: Alias, mm_hash: MMHash) -> None:
        """Binds or refreshes; the least recently used binding goes when the table is full."""
        known = self.table.get(alias)
        assert known is None or known == mm_hash, "a conflict must be answered before"
        if self.max_bindings == 0:
            return
        if known is None:
            self.changed[alias] = None
        self.table[alias] = mm_hash
        self.table.move_to_end(alias)
        while len(self.table) > self.max_bindings:
            gone, _ = self.table.popitem(last=False)
            self.changed[gone] = None

    def drain_changed(self) -> dict[Alias, None]:
        changed, self.changed = self.changed, {}
        return changed
