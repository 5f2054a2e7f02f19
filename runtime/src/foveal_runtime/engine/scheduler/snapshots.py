"""Snapshots of recurrent state: where they are taken, and who may start from one.

Used by the scheduler's parts, for models with layers that keep a state per sequence. A state exists
only where a computation ends, so a chunk is cut where a snapshot is wanted. A snapshot has the name
of the KV block that ends there, so it depends on the same tokens, items and salt. A prefix of n
tokens can be continued when all its KV blocks and a snapshot at n are there; keeping one for every
block would take many times the memory of KV.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.caches.prefix_cache import CacheObserver, cut_to_groups, meetings
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.telemetry.ages import EvictionAges


class Snapshots:
    """Slots 1 ... num_snapshots of the runner, kept like KV blocks: least recently used goes first.

    A snapshot is taken at the last block's end before a prompt's end, at the end of its last item,
    at ends of other items and chunks that are `snapshot_tokens` apart, where a prompt leaves one
    that was computed before, and, while outputs are made, at each block's end: there a request has
    one slot that is published when it ends.

    Args:
        is_indivisible: a chunk must not end inside an item.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        is_indivisible: bool,
        clock: Callable[[], float],
        observer: CacheObserver | None,
    ) -> None:
        removed = observer.state_removed if observer is not None else None
        self.pool = BlockPool(limits.num_snapshots, on_removed=removed, ages=EvictionAges(clock))
        self._observer = observer
        self._size = limits.block_size
        self._distance = max(limits.snapshot_tokens, limits.block_size)
        self._is_indivisible = is_indivisible

    # ---- before a request is computed -----------------------------------------------------------

    def find(self, request: Request, num_blocks: int) -> tuple[int, int]:
        """Blocks of the deepest snapshot within the first `num_blocks`, and its slot; 0, 0: none"""
        get = self.pool.get
        for count in range(num_blocks, 0, -1):
            slot = get(request.block_hashes[count - 1])
            if slot is not None:
                return count, slot
        return 0, 0

    def use(self, slot: int) -> None:
        """A request starts from it: it is the last to be evicted now."""
        self.pool.share([slot])
        self.pool.release([slot])

    def meet(self, request: Request, others: Iterable[Request]) -> None:
        """A new request beside those that are there: one that computes what both begin with ends a
        chunk where they part."""
        for other, count in meetings(request, others, self._size):
            position = count * self._size
            if self._may_cut(other, position):
                self._add_cut(other, position)

    def _add_cut(self, request: Request, position: int) -> None:
        if position not in request.cuts:
            bisect.insort(request.cuts, position)

    def plan_cuts(self, request: Request, start: int, num_known: int) -> None:
        """Sets where the request, computed from `start`, ends its chunks. The KV of `num_known`
        tokens was there although no snapshot was: two prompts share those tokens, so others will.
        """
        ends = [entry.placeholder.end // self._size * self._size for entry in request.mm_inputs]
        last = (request.num_prompt_tokens - 1) // self._size * self._size
        wanted, at = {num_known, last, *ends[-1:], *request.cuts}, start
        for end in ends:
            if end - at >= self._distance:
                wanted.add(end)
                at = end
        stop = request.num_tokens
        request.cuts = sorted(p for p in wanted if start < p < stop and self._may_cut(request, p))
        request.state_end = start

    def clip(self, request: Request, start: int, num_tokens: int) -> int:
        """Shortens a chunk to the next cut, or to a block's end where a snapshot is due."""
        end = start + num_tokens
        for cut in request.cuts:
            if start < cut:
                if cut < end:
                    return cut - start
                break
        aligned = end // self._size * self._size
        if (
            start < aligned < end < request.num_tokens
            and aligned - request.state_end >= self._distance
            and self._may_cut(request, aligned)
        ):
            return aligned - start
        return num_tokens

    def promise(self, entry: Request, reach: int, position: int) -> bool:
        """Whether a running request will make a snapshot at `position`. It ends a chunk there from
        now on, unless what is scheduled already goes beyond.

        Args:
            reach: where the request will have come with what is scheduled.
        """
        if reach >= position:
            return reach == position and bool(entry.pending)
        if position > entry.num_prompt_tokens or not self._may_cut(entry, position):
            return False
        self._add_cut(entry, position)
        return True

    def _may_cut(self, request: Request, position: int) -> bool:
        if not self._is_indivisible:
            return True
        blocks = position // self._size
        return cut_to_groups(request.mm_inputs, blocks, self._size) == blocks

    # ---- steps ----------------------------------------------------------------------------------

    def take(self, request: Request, end: int) -> int:
        """The slot that keeps the request's state when a chunk ends at `end`; 0: none is wanted, or
        none is free. It is the request's until `keep` or `close`."""
        cuts, is_cut = request.cuts, False
        while cuts and cuts[0] <= end:
            is_cut = cuts.pop(0) == end
        if end % self._size:
            return 0
        is_output = end >= request.num_prompt_tokens
        due = is_cut or is_output or end - request.state_end >= self._distance
        if request.is_withdrawn or not due:
            return 0
        pool = self.pool
        if not pool.num_free_blocks:
            return 0
        if is_output and not request.rolling and 2 * pool.num_used_blocks >= pool.num_blocks:
            return 0  # half of the slots stay for prompts
        slot = pool.allocate(1)[0]
        request.pending.append(slot)
        return slot

    def keep(self, request: Request, slot: int) -> None:
        """The step that filled the slot is over. Of prompts it can be shared at once; of outputs
        only the last one before the request's end is kept."""
        request.pending.remove(slot)
        request.state_end = request.num_computed
        if request.state_end <= request.num_prompt_tokens:
            self._publish(request, slot)
            return
        if request.rolling:
            self.pool.release([request.rolling])
        request.rolling = slot

    def close(self, request: Request, *, is_valid: bool = True) -> None:
        """The request gives up its state. `is_valid`: the last of its outputs' is shared."""
        if request.pending:
            self.pool.release(request.pending)
            request.pending = []
        if request.rolling:
            slot, request.rolling = request.rolling, 0
            if is_valid:
                self._publish(request, slot)
            else:
                self.pool.release([slot])
        request.cuts = []

    def _publish(self, request: Request, slot: int) -> None:
        if request.is_withdrawn:  # its last blocks have no hashes either
            self.pool.release([slot])
            return
        block_hash = request.block_hashes[request.state_end // self._size - 1]
        if self.pool.publish(slot, block_hash) and self._observer is not None:
            self._observer.state_stored(block_hash)
        self.pool.release([slot])

    def check_integrity(self, running: Sequence[Request]) -> None:
        self.pool.check_integrity([[*r.pending, *filter(None, [r.rolling])] for r in running])
        for request in running:
            assert request.cuts == sorted(request.cuts)
            assert request.state_end <= request.num_computed
