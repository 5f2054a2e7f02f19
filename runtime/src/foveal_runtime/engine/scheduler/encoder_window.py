"""Encoder rules of a step: how many tokens of a request can be computed, given its media items.

Used by `scheduler`. A question without effects: it looks at the encoder cache and at what is left
of the step's budget, and says how many tokens can be computed and which items must be held for
that; the scheduler takes KV blocks first and only then commits, so a refusal leaves nothing
behind.
"""

from __future__ import annotations

from typing import NamedTuple

from foveal_runtime.engine.caches.encoder_cache import EncoderCacheManager
from foveal_runtime.engine.types.request import Request
from foveal_runtime.plan.media import MMHash


class Window(NamedTuple):
    """The outcome.

    Attributes:
        num_tokens: tokens that can be computed; 0 = not now.
        take: input ids to hold, those that are on the device first.
        keep_host: their keys that will be loaded from the host tier.
        compute_embeds: embeddings to encode for it.
        bad_item: input id whose embeddings contradict what its key already stands for: the
            request cannot run at all.
    """

    num_tokens: int
    take: tuple[int, ...] = ()
    keep_host: tuple[MMHash, ...] = ()
    compute_embeds: int = 0
    bad_item: int | None = None


def next_item(request: Request, start: int) -> int:
    """Input id of the item that a window from `start` meets first, else of the last one. A cached
    prefix may end behind `next_mm`."""
    inputs = request.mm_inputs
    for index in range(request.next_mm, len(inputs)):
        if inputs[index].placeholder.end > start:
            return index
    return len(inputs) - 1


class _Tally:
    """What the window would use so far."""

    def __init__(self) -> None:
        self.device: list[int] = []
        self.other: list[int] = []
        self.host: list[MMHash] = []
        self.seen: set[MMHash] = set()
        self.new_embeds = 0
        self.keep_embeds = 0
        self.compute_embeds = 0

    def window(self, num_tokens: int) -> Window:
        take = tuple(self.device + self.other)
        return Window(num_tokens, take, tuple(self.host), self.compute_embeds)


def plan_window(
    request: Request,
    start: int,
    num_tokens: int,
    cache: EncoderCacheManager,
    compute_left_embeds: int,
    *,
    indivisible: bool,
) -> Window:
    """Clips [start, start + num_tokens) to what the encoder cache and budget allow.

    Args:
        start: first position to compute (the request may not be admitted yet).
        indivisible: an item's tokens must be computed in one step (chunked multimodal input is
            off, or the tokens of an item see each other).
    """
    inputs = request.mm_inputs
    tally = _Tally()
    for index in range(request.next_mm, len(inputs)):
        place = inputs[index].placeholder
        if place.end <= start:
            continue
        if place.offset >= start + num_tokens:
            break
        if indivisible and place.end > start + num_tokens:
            num_tokens = max(place.offset - start, 0)
            break
        if cache.holds(request.request_id, index):
            continue
        if place.embeds_before(start + num_tokens) == place.embeds_before(start):
            continue  # only marker tokens of the item are in the window
        mm_hash, num_embeds = inputs[index].mm_hash, request.mm_embeds[index]
        if cache.known_embeds(mm_hash) not in (None, num_embeds):
            return Window(0, bad_item=index)
        if not _take(tally, cache, index, mm_hash, num_embeds, compute_left_embeds):
            num_tokens = max(place.offset - start, 0)
            break
    return tally.window(num_tokens) if num_tokens > 0 else Window(0)


def _take(
    tally: _Tally,
    cache: EncoderCacheManager,
    index: int,
    mm_hash: MMHash,
    num_embeds: int,
    compute_left_embeds: int,
) -> bool:
    """Adds one item to the tally; False, unchanged, when there is no budget or room for it."""
    if mm_hash in tally.seen:
        tally.other.append(index)  # a second occurrence: only a reference
        return True
    where = cache.lookup(mm_hash)
    if where == "device":
        if cache.is_idle(mm_hash):
            if not cache.fits(tally.new_embeds, tally.keep_embeds + num_embeds):
                return False
            tally.keep_embeds += num_embeds
        tally.device.append(index)
    else:
        compute = tally.compute_embeds + (num_embeds if where == "absent" else 0)
        if compute > compute_left_embeds:
            return False
        if not cache.fits(tally.new_embeds + num_embeds, tally.keep_embeds):
            return False
        tally.compute_embeds = compute
        tally.new_embeds += num_embeds
        tally.other.append(index)
        if where == "host":
            tally.host.append(mm_hash)
    tally.seen.add(mm_hash)
    return True
