"""Blocks of layers with a sliding window: a request holds those that its next token still sees.

Used by the scheduler's parts where such layers have a pool of their own. A request's list there
begins at the block `window_first` and ends where its other list does; what lies before can never be
read again and is given back after each step. The names are those of the other
pool's blocks. So a prefix of n blocks can be continued where all n are in the one pool and, in this
one, those that the next token sees: each pool evicts by itself, and a prefix that lost either part
is no hit. Of a prompt only its end, the end of its last item and the places where others were seen
to part from it are likely to be continued; what lies between is evicted before all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.caches.prefix_cache import cut_to_groups, meetings
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.plan.budget.kv import window_blocks
from foveal_runtime.telemetry.ages import EvictionAges


class WindowBlocks:
    """See the module. `sees_items`: tokens of an item see each other, and none is cut."""

    def __init__(
        self, limits: SchedulerLimits, *, sees_items: bool, clock: Callable[[], float]
    ) -> None:
        self.pool = BlockPool(limits.num_window_blocks - 1, ages=EvictionAges(clock))
        self._size = limits.block_size
        self._window = limits.window
        self._sees_items = sees_items
        # What a request holds at most, while its prompt is computed.
        self._most = window_blocks(limits.window, limits.max_num_batched_tokens, limits.block_size)

    def first_of(self, position: int) -> int:
        """The first block that the token at `position` sees anything of."""
        return max(position - self._window + 1, 0) // self._size

    def _before(self, num_blocks: int) -> tuple[int, int]:
        """The blocks that the token after so many blocks sees, from and to."""
        return self.first_of(num_blocks * self._size), num_blocks

    def meet(self, request: Request, others: Iterable[Request]) -> None:
        """A new request beside those that are there: one that computes what both begin with keeps
        the window from which the new one goes on."""
        for other, count in meetings(request, others, self._size):
            count = min(count, (request.num_tokens - 1) // self._size)
            if self._sees_items:
                count = cut_to_groups(request.mm_inputs, count, self._size)
            other.window_kept.add(self._before(count))

    def lookup(self, request: Request, num_blocks: int) -> tuple[int, list[int]]:
        """The longest prefix of at most so many blocks that can be continued, and its blocks here
        that the next token sees."""
        hashes, get, at = request.block_hashes, self.pool.get, num_blocks
        while at > self.first_of(num_blocks * self._size):
            at -= 1
            if get(hashes[at]) is not None:
                continue
            num_blocks = at  # whatever is longer, and sees any block from here on, sees this one
            if self._sees_items:
                num_blocks = at = cut_to_groups(request.mm_inputs, num_blocks, self._size)
        seen = hashes[at:num_blocks]
        found = self.pool.lookup(seen, len(seen))
        assert len(found) == len(seen)
        return num_blocks, found

    def fits(self, num_blocks: int, hit: Sequence[int]) -> bool:
        """Whether a request that takes so many blocks more behind `hit` has room to its end."""
        need = min(num_blocks, self._most - len(hit)) + self.pool.num_unused(hit)
        return need <= self.pool.num_free_blocks

    def start(self, request: Request, num_blocks: int, hit: list[int], num_known: int) -> None:
        """The request is admitted behind a prefix of so many blocks. The other pool knew
        `num_known`: two prompts share those, so others will."""
        self.pool.share(hit)
        request.window_ids = hit
        request.window_first = num_blocks - len(hit)
        ends = {num_blocks, num_known, (request.num_prompt_tokens - 1) // self._size}
        ends.update(entry.placeholder.end // self._size for entry in request.mm_inputs[-1:])
        request.window_kept.update(map(self._before, ends))

    def extend(self, request: Request, count: int) -> None:
        request.window_ids.extend(self.pool.allocate(count))

    def publish(self, request: Request, index: int) -> None:
        """The request's block number `index` is complete."""
        block = request.window_ids[index - request.window_first]
        self.pool.publish(block, request.block_hashes[index])

    def leave_behind(self, request: Request) -> None:
        """Gives back what the next token to be computed does not see."""
        count = self.first_of(request.num_computed) - request.window_first
        if count > 0:
            for number, block in enumerate(request.window_ids[:count], request.window_first):
                is_kept = any(first <= number < end for first, end in request.window_kept)
                self.pool.release([block], is_cold=not is_kept)
            request.window_ids = request.window_ids[count:]  # a submitted step has the old list
            request.window_first += count

    def close(self, request: Request) -> None:
        self.pool.release(request.window_ids)
        request.window_ids = []
        request.window_first = 0

    def check_integrity(self, running: Sequence[Request]) -> None:
        self.pool.check_integrity([request.window_ids for request in running])
        for request in running:
            assert request.window_first + len(request.window_ids) == len(request.block_ids)
            assert request.window_first <= self.first_of(request.num_computed)
