"""KV memory in blocks: of one pool, or of two where some layers look back a window only.

Called by the budget planner and by an engine as it makes its pools, so both come to the same
blocks. Layers with a sliding window or chunks never read what lies before it; their keys and values
are in a pool of their own, from which a request gives back the blocks that it has left behind.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

TYPICAL_WINDOWS = 4
"""Beyond one longest request, memory is divided for requests of so many windows each: of those,
both pools hold equally many. Shorter ones use up the windows' pool first, longer ones the other."""


class KVBlocks(NamedTuple):
    """Blocks of both pools. `window`: 0 where there is one pool."""

    whole: int
    window: int


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What KV blocks of a model cost under an engine's limits, over all its devices.

    Attributes:
        block_bytes: of one block of `block_size` tokens in all layers.
        window_block_bytes: the part of it that layers with a window take; 0: all are kept alike.
        window: tokens that such layers see at most, the newest one included.
        step_tokens: tokens that one step computes of a prompt at most.
    """

    block_size: int
    block_bytes: int
    window_block_bytes: int
    window: int
    step_tokens: int
    max_model_len: int

    @property
    def has_windows(self) -> bool:
        """Whether there are two pools: a request can be longer than the window."""
        return bool(self.window_block_bytes) and self.window < self.max_model_len

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def request_blocks(self) -> KVBlocks:
        """What the longest request takes while its prompt is computed."""
        whole = self.num_blocks(self.max_model_len)
        if not self.has_windows:
            return KVBlocks(whole, 0)
        return KVBlocks(whole, min(whole, window_blocks(self.window, self.step_tokens,
                                                        self.block_size)))  # fmt: skip

    @property
    def floor_bytes(self) -> int:
        """The least that serves the longest request, each pool's block for padding included. Of two
        pools whole sets of blocks, so that it can be divided as it is."""
        whole, window = (count + 1 for count in self.request_blocks)
        if not self.has_windows:
            return whole * self.block_bytes
        return -(-self._bytes_of(whole, window) // self.block_bytes) * self.block_bytes

    def _bytes_of(self, whole: int, window: int) -> int:
        each = self.block_bytes - self.window_block_bytes
        return whole * each + window * self.window_block_bytes

    def divide(self, num_bytes: int) -> KVBlocks:
        """Blocks that so many bytes hold. More bytes never mean fewer of either."""
        alike = num_bytes // self.block_bytes
        if not self.has_windows:
            return KVBlocks(alike, 0)
        whole, window = (count + 1 for count in self.request_blocks)
        if alike <= window:  # a request ends before its window moves
            return KVBlocks(alike, alike)
        each = self.block_bytes - self.window_block_bytes
        spare = num_bytes - self._bytes_of(whole, window)
        if spare < 0:
            return KVBlocks((num_bytes - window * self.window_block_bytes) // each, window)
        typical = min(self.max_model_len, TYPICAL_WINDOWS * self.window)
        long = self.num_blocks(typical)
        short = min(long, window_blocks(self.window, 1, self.block_size))
        both = self._bytes_of(long, short)
        return KVBlocks(whole + spare * long // both, window + spare * short // both)

    def num_tokens(self, num_bytes: int) -> int:
        """Tokens of requests that so many bytes hold."""
        return max(self.divide(num_bytes).whole - 1, 0) * self.block_size


def window_blocks(window: int, num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` new tokens and what they see before them lie in, at most."""
    return -(-(window - 1 + num_tokens) // block_size) + 1
