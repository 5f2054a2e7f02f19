"""Bindings of a user's uuids: a bounded LRU of Alias -> MMHash, first binding wins.

Owned by `receiver`, announced to every session like values are. Never interprets a uuid by itself:
aliases already contain the tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from foveal_runtime.mirror.messages import Alias
from foveal_runtime.plan.media import MMHash


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
