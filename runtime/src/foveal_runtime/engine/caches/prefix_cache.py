"""Names for KV blocks: what a full block's content depends on, hashed; and how long a hit may be.

Placeholder ids are the same for every image, so a block's name holds, besides its tokens, the
content key of each item that overlaps it and where the item starts relative to the block: a
correctness rule, not an optimisation. Called by `scheduler`; needs no cache to be configured, for
content keys exist even when processor and IPC caches are off.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from blake3 import blake3

from foveal_runtime.engine.caches.block_pool import BlockHash
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.plan.media import MMHash

ExtraKey = tuple[MMHash, int]
"""(content key, item offset - block start): negative when the item began in an earlier block."""

_OFFSET = struct.Struct("<q")
_DOMAIN = b"foveal kv block 1"
assert array("I").itemsize == 4
_MAX_MEETINGS = 64
"""Requests that a new one is compared with."""


def extra_keys(
    inputs: Sequence[MMInput], start: int, end: int, first: int = 0
) -> tuple[tuple[ExtraKey, ...], int]:
    """Keys of the items that overlap positions [start, end), and the index to go on from.

    Args:
        inputs: items in prompt order.
        first: an index before which no item reaches `start` (what an earlier call returned).
    """
    keys = []
    while first < len(inputs) and inputs[first].placeholder.end <= start:
        first += 1
    index = first
    while index < len(inputs) and inputs[index].placeholder.offset < end:
        keys.append((inputs[index].mm_hash, inputs[index].placeholder.offset - start))
        index += 1
    return tuple(keys), first


class BlockHasher:
    """Names the full blocks of requests.

    Args:
        block_size: tokens in a block.
        namespace: identifies weights and processor, so that names compare across engines.
    """

    def __init__(self, block_size: int, namespace: bytes = b"") -> None:
        self.block_size = block_size
        self._root = blake3(_DOMAIN + block_size.to_bytes(4, "little") + namespace).digest()

    def root(self, request: Request) -> BlockHash:
        """Parent of a first block; a tenant's salt and the content of a LoRA adapter enter here
        and so reach every block."""
        root, lora = self._root, request.lora
        if lora is not None:
            root = blake3(b"lora" + root + lora.digest).digest()
        if request.cache_salt:
            root = blake3(b"salt" + root + request.cache_salt).digest()
        return root

    def extend(self, request: Request, num_tokens: int) -> None:
        """Hashes the full blocks within the first `num_tokens` tokens that have no hash yet."""
        size = self.block_size
        hashes = request.block_hashes
        start = len(hashes) * size
        stop = num_tokens // size * size
        if start >= stop:
            return
        packed = memoryview(array("I", request.token_ids[start:stop])).cast("B")
        parent = hashes[-1] if hashes else self.root(request)
        inputs, item = request.mm_inputs, request.hash_mm
        step = 4 * size
        for at in range(0, len(packed), step):
            text = parent + packed[at : at + step]
            if item < len(inputs):
                keys, item = extra_keys(inputs, start, start + size, item)
                for mm_hash, offset in keys:
                    # Fixed widths: tokens, then 32 + 8 bytes a key, so no two inputs read alike.
                    text += mm_hash + _OFFSET.pack(offset)
            parent = blake3(text).digest()
            hashes.append(parent)
            start += size
        request.hash_mm = item


def max_hit_blocks(request: Request, block_size: int) -> int:
    """How many leading blocks a hit may cover at most: never the last known token, for its
    logits are wanted."""
    return (request.num_tokens - 1) // block_size if request.read_prefix_cache else 0


def meetings(
    request: Request, others: Iterable[Request], block_size: int
) -> Iterator[tuple[Request, int]]:
    """Those of `others` that have yet to compute blocks of their prompt which a new request begins
    with, too, and how many blocks both begin with."""
    mine = request.block_hashes
    computing = (other for other in others if other.num_computed < other.num_prompt_tokens)
    for other in itertools.islice(computing, _MAX_MEETINGS):
        theirs = other.block_hashes
        most = min(len(mine), len(theirs), other.num_prompt_tokens // block_size)
        # A hash names all blocks before it, too, so what is equal comes first.
        count = bisect.bisect_left(range(most), True, key=lambda i: mine[i] != theirs[i])
        if other.num_computed < count * block_size:
            yield other, count


def cut_to_groups(inputs: Sequence[MMInput], num_blocks: int, block_size: int) -> int:
    """Shortens a hit so that it does not end inside an item whose tokens see each other."""
    for entry in reversed(inputs):
        end = num_blocks * block_size
        if entry.placeholder.offset < end < entry.placeholder.end:
            num_blocks = entry.placeholder.offset // block_size
    return num_blocks


class CacheObserver(Protocol):
    """Of cached KV blocks; the event stream. Called inside a step, so it only takes notes."""

    def block_stored(self, request: Request, index: int, hasher: BlockHasher) -> None:
        """The request's full block `index` can be shared from now on."""
        ...

    def block_removed(self, block_hash: BlockHash) -> None: ...

    def blocks_cleared(self) -> None: ...

    def state_stored(self, block_hash: BlockHash) -> None:
        """The recurrent state at that block's end can be continued from now on."""
        ...

    def state_removed(self, block_hash: BlockHash) -> None: ...
