"""Routing: a request goes to the engine that holds most of it, unless that engine is overloaded.

Called by `client` with facts; pure but for a small memory of where prompts went. Bounded load:
an engine far above its share of all requests (`load_bound`) is passed over, however much it holds.
docs/decisions/routing.md has the measurements.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blake3 import blake3

from foveal_runtime.wire.codec import pack_tokens

LOAD_FACTOR = 1.25
PREFIX_TOKENS = (32, 256, 1024)


class Candidate(NamedTuple):
    """One engine that could take the request.

    Attributes:
        load: requests it runs or queues, of all frontends, as far as known (`estimate_load`).
        held_bytes: bytes of this request's items that its mirror says it holds.
        has_all_sources: False when an item exists only elsewhere (uuid-only media).
    """

    name: str
    load: int
    held_bytes: int = 0
    has_all_sources: bool = True


def estimate_load(own: int, reported: int, own_at_report: int) -> int:
    """Requests at an engine: our own now, plus what others had there at the last report. However
    old that is: an engine whose load has changed says so, an idle one for the last time."""
    return own + max(0, reported - own_at_report)


def load_bound(loads: Sequence[int]) -> int:
    """An engine with this many requests or more gets no other while one has fewer.

    A quarter above the share of each, and what chance alone makes of that share (its square
    root): without the latter a handful of requests counts as too much, the items of the next are
    copied to a second engine, and the copies push out what only that one held.
    """
    share = (sum(loads) + 1) / len(loads)
    return math.ceil(LOAD_FACTOR * share + math.sqrt(share))


class Pick(NamedTuple):
    """A decision. `why`: only (there was no other), held (it holds most bytes of the request's
    items), remembered (it had this prompt's beginning or items before) or load."""

    name: str
    why: str


class Router:
    """Remembers, for at most `max_entries` prompt beginnings and items, which engine took them."""

    def __init__(self, max_entries: int = 16384) -> None:
        self._max_entries = max_entries
        self._memory: OrderedDict[bytes, str] = OrderedDict()

    def choose(
        self, candidates: Sequence[Candidate], affinity: Sequence[bytes], home: bytes = b""
    ) -> Pick | None:
        """The engine to send to, and why; None without candidates. Changes nothing.

        Args:
            affinity: the request's memory keys (`affinity_keys`), most specific last.
            home: hash of its largest item that no engine holds, if any. Every frontend has the
                same order of engines for it, so two that meet it at once do not store it twice.
        """
        able = [c for c in candidates if c.has_all_sources]
        if not able:
            return None
        bound = load_bound([c.load for c in able])
        free = [c for c in able if c.load < bound]  # never none: the bound is above the mean
        remembered: dict[str, int] = {}
        for rank, key in enumerate(affinity, start=1):
            name = self._memory.get(key)
            if name is not None:
                remembered[name] = rank
        best = max(
            free,
            key=lambda c: (
                c.held_bytes,
                remembered.get(c.name, 0),
                -c.load,
                _tie(c.name, home or (affinity[-1] if affinity else b"")),
            ),
        )
        if len(able) == 1:
            return Pick(best.name, "only")
        why = "held" if best.held_bytes else "remembered" if best.name in remembered else "load"
        return Pick(best.name, why)

    def commit(self, name: str, affinity: Iterable[bytes]) -> None:
        """The request went to `name`."""
        for key in affinity:
            self._memory[key] = name
            self._memory.move_to_end(key)
        while len(self._memory) > self._max_entries:
            self._memory.popitem(last=False)

    def forget(self, name: str) -> None:
        """An engine restarted or left: its caches are empty."""
        for key in [key for key, value in self._memory.items() if value == name]:
            del self._memory[key]

    def __len__(self) -> int:
        return len(self._memory)


def affinity_keys(
    token_ids: Sequence[int], hashes: Sequence[bytes], salt: bytes = b"", lora: bytes = b""
) -> list[bytes]:
    """Memory keys of a request: its items (their encoder outputs) first, then growing prompt
    beginnings (their KV blocks, which depend on the adapter), so that the longest known beginning
    decides."""
    keys = [blake3(b"item" + salt + h).digest(length=16) for h in hashes[:4]]
    for length in PREFIX_TOKENS:
        if len(token_ids) >= length:
            packed = pack_tokens(token_ids[:length], wide=True)[0]
            # Placeholders look alike: the items of the prompt belong to its identity.
            keys.append(blake3(b"text" + salt + lora + b"".join(hashes) + packed).digest(length=16))
    return keys


def _tie(name: str, key: bytes) -> bytes:
    """Rendezvous: every frontend breaks the same tie the same way."""
    return blake3(name.encode() + key).digest(length=8)
