"""KV blocks: who uses them, which are free, which free ones still hold reusable content.

Used by `scheduler` only. A free block keeps its hash until it is taken for something else, so the
free list is also the prefix cache's LRU. Never touches tensors: block ids are plain numbers.

Memory that was never written has to come from the kernel, which costs more than all other work of
the prefix cache. A pool may therefore hold blocks in reserve: they join the others when none is
free, or when content is asked for that they would have kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from foveal_runtime.telemetry.ages import EvictionAges

BlockHash = bytes
"""32 bytes: names everything that determines a full block's KV (see `prefix_cache`)."""


class BlockPool:
    """All blocks of one KV cache that may be given to requests: ids 1 ... num_blocks.

    Block 0 is the runner's (`step.TRASH_BLOCK`).

    Args:
        num_blocks: how many there are, without block 0.
        num_reserved: how many of them are not used before they are of use.
        on_removed: called with the hash of each block whose content is given up.
        ages: hears how long evicted content had lain unused.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_reserved: int = 0,
        on_removed: Callable[[BlockHash], None] | None = None,
        ages: EvictionAges | None = None,
    ) -> None:
        assert 0 <= num_reserved < num_blocks
        self.num_blocks = num_blocks
        self._refs = [0] * (num_blocks + 1)
        self._hash: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[BlockHash, int] = {}
        # Blocks nobody uses, next to be taken first; those in reserve are not among them.
        self._reserve = range(num_blocks - num_reserved + 1, num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self._reserve.start))
        # What was given up last, as much as the reserve would have kept.
        self._given_up: OrderedDict[BlockHash, None] = OrderedDict()
        self._on_removed = on_removed
        self.ages = EvictionAges(lambda: 0.0) if ages is None else ages
        self._rested = [0.0] * (num_blocks + 1)
        self.num_evictions = 0
        self.num_cached_blocks = 0  # free ones that still hold content

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._reserve)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def lookup(self, hashes: Sequence[BlockHash], limit: int) -> list[int]:
        """Block ids of the longest known prefix of `hashes`, at most `limit` of them. If those in
        reserve would have kept more of it, they are used from now on."""
        found: list[int] = []
        get = self._by_hash.get
        for block_hash in hashes[:limit]:
            block = get(block_hash)
            if block is None:
                if block_hash in self._given_up:
                    self._use_reserve()
                break
            found.append(block)
        return found

    def get(self, block_hash: BlockHash) -> int | None:
        """The block with this content."""
        return self._by_hash.get(block_hash)

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free now (and would leave the free list when shared)."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each block found by `lookup` (so each has a hash)."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
                self.num_cached_blocks -= 1
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, least recently used first; their old content is given up."""
        assert count <= self.num_free_blocks
        taken = []
        now = self.ages.clock()
        for _ in range(count):
            if not self._free:
                self._free[self._reserve.start] = None
                self._reserve = self._reserve[1:]
            block, _ = self._free.popitem(last=False)
            block_hash = self._hash[block]
            if block_hash is not None:
                self._forget(block)
                self._note_given_up(block_hash)
                self.num_evictions += 1
                self.ages.seen.observe(now - self._rested[block])
            self._refs[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, block_hash: BlockHash) -> bool:
        """The block's content is complete and may be shared. False when another block had this hash
        already. One in use keeps it, and this block stays private; a free one gives it up: what was
        computed again is of use again, and lives as long as if it had been found."""
        assert self._refs[block] > 0
        assert self._hash[block] is None
        other = self._by_hash.get(block_hash)
        if other is not None:
            if self._refs[other]:
                return False
            self._hash[other] = None
            self.num_cached_blocks -= 1
            self._free.move_to_end(other, last=False)
        self._hash[block] = block_hash
        self._by_hash[block_hash] = block
        return other is None

    def release(self, blocks: Sequence[int], *, is_cold: bool = False) -> None:
        """One user less for each block, the tail first: prefixes live longest. A block without a
        hash holds nothing of use and is the next to be taken; so is one that `is_cold`, of use to
        few, once all free blocks hold something."""
        refs, free, hashes = self._refs, self._free, self._hash
        now = self.ages.clock()
        is_next = is_cold and (not free or hashes[next(iter(free))] is not None)
        for block in reversed(blocks):
            refs[block] -= 1
            assert refs[block] >= 0
            if refs[block] == 0:
                free[block] = None
                if hashes[block] is None or is_next:
                    free.move_to_end(block, last=False)
                if hashes[block] is not None:
                    self.num_cached_blocks += 1
                    self._rested[block] = now

    def reset(self) -> int:
        """Forgets the content of every block nobody uses; returns how many were forgotten. Blocks
        in use keep theirs: their requests were computed with it."""
        stale = [block for block in self._free if self._hash[block] is not None]
        for block in stale:
            self._forget(block)
        self._given_up.clear()
        return len(stale)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Blocks in use that nobody else may find any more; their requests keep them."""
        for block in blocks:
            if self._hash[block] is not None:
                assert self._refs[block] > 0
                self._unlist(block)

    def _note_given_up(self, block_hash: BlockHash) -> None:
        if self._reserve:
            self._given_up[block_hash] = None
        while len(self._given_up) > len(self._reserve):
            self._given_up.popitem(last=False)

    def _use_reserve(self) -> None:
        """Its blocks are the next to be taken, before anything more is given up."""
        self._free = OrderedDict.fromkeys(self._reserve) | self._free
        self._reserve = range(0)
        self._given_up.clear()

    def _forget(self, block: int) -> None:
        self._unlist(block)
        self.num_cached_blocks -= 1

    def _unlist(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None
        self._hash[block] = None
        del self._by_hash[block_hash]
        if self._on_removed is not None:
            self._on_removed(block_hash)

    def check_integrity(self, used_by: Iterable[Sequence[int]] | None = None) -> None:
        """Asserts the books agree, with the block lists of all users when given."""
        for block in range(1, self.num_blocks + 1):
            is_free = block in self._free or block in self._reserve
            assert (self._refs[block] == 0) == is_free, block
            block_hash = self._hash[block]
            assert block_hash is None or self._by_hash[block_hash] == block, block
        cached = sum(self._hash[block] is not None for block in self._free)
        assert cached == self.num_cached_blocks
        assert len(self._by_hash) == sum(entry is not None for entry in self._hash)
        if used_by is not None:
            counted = [0] * (self.num_blocks + 1)
            for blocks in used_by:
                for block in blocks:
                    counted[block] += 1
            assert counted == self._refs, "references differ from the requests' blocks"
