"""Cache events in vLLM's KVEvents schema, for routers that read that.

KV blocks only, as vLLM publishes them: a batch is `[ts, events, data_parallel_rank]`, an event an
array that begins with its kind, in the order of the fields below. Routers that read the newer
named maps read these arrays, too. Hashes are the last 8 bytes of ours, as vLLM shortens its own.
The format is documented in docs/reference/events.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from foveal_runtime.engine.caches.block_pool import BlockHash
from foveal_runtime.engine.caches.prefix_cache import BlockHasher, extra_keys
from foveal_runtime.engine.events.log import EventLog
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import StepPlan, StepResult
from foveal_runtime.mirror.store import Store
from foveal_runtime.plan.media import MMHash

MEDIUM = "GPU"
"""vLLM's word for the memory that blocks are computed in, on whatever device that is."""

Keys = list[tuple[str, int] | str]


class VllmBlockStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """Blocks that follow each other. `extra_keys` has an entry a block: (content key in hex, item
    offset - block start) for each media item, then, in the first block, the digest of a LoRA
    adapter's files and a tenant's salt; or None."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[Keys | None] | None = None


class VllmBlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = MEDIUM


class VllmAllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    """Everything known of this engine before is void: the first event after its start."""


VllmEvent = VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared


class VllmEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmEvent]
    data_parallel_rank: int | None = 0


def short(block_hash: BlockHash) -> int:
    """64 bits of a hash."""
    return int.from_bytes(block_hash[-8:], "big")


class VllmEventLog(EventLog):
    """Takes the place of an `EventLog`. Media values and encoder outputs have no event here."""

    def __init__(
        self,
        engine_id: str,
        publish: Callable[[VllmEventBatch], None],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(engine_id, publish, wall_clock=wall_clock)
        self._vllm_events: list[VllmEvent] = [VllmAllBlocksCleared()]

    def block_stored(self, request: Request, index: int, hasher: BlockHasher) -> None:
        self._note_removed_blocks()
        size = hasher.block_size
        start = index * size
        hashes = request.block_hashes
        parent = short(hashes[index - 1]) if index else None
        items, _ = extra_keys(request.mm_inputs, start, start + size)
        keys: Keys = [(mm_hash.hex(), offset) for mm_hash, offset in items]
        name = None if request.lora is None else request.lora.name
        if not index and request.lora is not None:
            keys.append(request.lora.digest.hex())
        if not index and request.cache_salt:
            keys.append(request.cache_salt.hex())
        tokens = request.token_ids[start : start + size]
        last = self._vllm_events[-1] if self._vllm_events else None
        if isinstance(last, VllmBlockStored) and parent == last.block_hashes[-1]:
            assert last.extra_keys is not None
            last.block_hashes.append(short(hashes[index]))
            last.token_ids += tokens
            last.extra_keys.append(keys or None)
            return
        self._vllm_events.append(
            VllmBlockStored(
                [short(hashes[index])],
                parent,
                list(tokens),
                size,
                lora_name=name,
                extra_keys=[keys or None],
            )
        )

    def blocks_cleared(self) -> None:
        """Each block is named as removed, so those in use stay known."""
        self._note_removed_blocks()

    def _note_removed_blocks(self) -> None:
        if self._removed_blocks:
            self._vllm_events.append(VllmBlockRemoved([short(one) for one in self._removed_blocks]))
            self._removed_blocks = []

    def state_stored(self, block_hash: BlockHash) -> None:
        """No event of theirs."""

    def state_removed(self, block_hash: BlockHash) -> None:
        """No event of theirs."""

    def note_plan(self, plan: StepPlan, result: StepResult) -> None:
        """No event of theirs."""

    def note_adopted(self, device: list[MMHash], host: list[MMHash]) -> None:
        """No event of theirs."""

    def note_values(self, store: Store, changed: dict[MMHash, None]) -> None:
        """No event of theirs."""

    def flush(self) -> None:
        self._note_removed_blocks()
        if self._vllm_events:
            events, self._vllm_events = self._vllm_events, []
            self._publish(VllmEventBatch(self._wall_clock(), events))
