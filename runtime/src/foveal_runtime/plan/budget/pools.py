"""Sharing one limit among caches: pinned sizes first, floors, wishes, then shares of the rest.

Called by planner.py, once for each limit. Pure integers; larger limits never make a pool smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WISH_SHARE = 8
"""A pool takes one in so many of the bytes left to share towards its wish."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One cache of `count` equal parts that competes for a limit. Sizes are of one part.

    Attributes:
        pinned: the user's size, or None for Auto.
        floor: the least that makes sense; Auto never goes below it.
        default: what Auto takes when no limit is given.
        wish: what Auto takes beyond that, of an eighth of the memory that is left to share.
        share: weight in the division of what is left; 0 = Auto stops at `default`.
        granule: sizes are multiples of this.
    """

    name: str
    pinned: int | None
    floor: int
    default: int
    wish: int = 0
    share: int = 0
    count: int = 1
    granule: int = 1


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """`sizes` by pool, of one part each. `short_bytes` > 0: even the least does not fit."""

    sizes: dict[str, int]
    shrunk: frozenset[str] = frozenset()
    short_bytes: int = 0


def least(pools: Sequence[Pool]) -> dict[str, int]:
    """Pinned sizes as they are, Auto at its floor."""
    return {p.name: p.floor if p.pinned is None else p.pinned for p in pools}


def preferred(pools: Sequence[Pool]) -> dict[str, int]:
    """What the pools take when nothing limits them."""
    sizes = {p.name: max(p.floor, p.default) if p.pinned is None else p.pinned for p in pools}
    elastic = sum(sizes[p.name] * p.count for p in pools if p.pinned is None and p.share)
    for pool in pools:
        sizes[pool.name] += _more(pool, sizes[pool.name], elastic)
    return sizes


def _more(pool: Pool, size: int, left: int) -> int:
    """What a pool of that size takes towards its wish when `left` bytes are to be shared."""
    if pool.pinned is not None or pool.wish <= size:
        return 0
    more = min(pool.wish - size, left // WISH_SHARE // pool.count)
    return more - more % pool.granule


def total(pools: Sequence[Pool], sizes: dict[str, int]) -> int:
    return sum(sizes[p.name] * p.count for p in pools)


def divide(
    pools: Sequence[Pool], available: int, *, stop_at_default: bool = False, shrink: bool = False
) -> Shares:
    """Divides `available` bytes.

    Args:
        pools: in the order in which wishes are met and, with `shrink`, sizes are cut.
        stop_at_default: Auto pools never exceed their default (the limit is not the user's).
        shrink: cut pinned sizes towards their floors when they do not fit.
    """
    sizes = least(pools)
    short = total(pools, sizes) - available
    shrunk: set[str] = set()
    if short > 0 and shrink:
        for pool in pools:
            excess = sizes[pool.name] - pool.floor
            if pool.pinned is None or excess <= 0 or short <= 0:
                continue
            wanted = -(-short // pool.count)
            cut = min(excess, -(-wanted // pool.granule) * pool.granule)
            sizes[pool.name] -= cut
            shrunk.add(pool.name)
            short -= cut * pool.count
    if short > 0:
        return Shares(sizes=sizes, shrunk=frozenset(shrunk), short_bytes=short)
    if not shrunk:
        _grow(pools, sizes, -short, stop_at_default)
    return Shares(sizes=sizes, shrunk=frozenset(shrunk))


def _grow(pools: Sequence[Pool], sizes: dict[str, int], left: int, stop_at_default: bool) -> None:
    """Gives `left` bytes to the Auto pools: fixed wishes in order, the rest by shares."""
    auto = [p for p in pools if p.pinned is None]
    for pool in auto:
        if pool.share == 0 and pool.default > pool.floor:
            more = min(pool.default - pool.floor, left // pool.count)
            more -= more % pool.granule
            sizes[pool.name] += more
            left -= more * pool.count
    for pool in auto:
        more = _more(pool, sizes[pool.name], left)
        sizes[pool.name] += more
        left -= more * pool.count
    elastic = [p for p in auto if p.share]
    room = {
        p.name: max(0, p.default - p.floor) * p.count if stop_at_default else left for p in elastic
    }
    # Raise one common level; whoever reaches its cap leaves the others more.
    open_pools = elastic
    while open_pools:
        weight = sum(p.share for p in open_pools)
        full = [p for p in open_pools if room[p.name] * weight < left * p.share]
        for pool in full or open_pools:
            part = room[pool.name] if full else left * pool.share // weight
            size = part // pool.count
            sizes[pool.name] += size - size % pool.granule
        if not full:
            return
        left -= sum(room[p.name] for p in full)
        open_pools = [p for p in open_pools if p not in full]
