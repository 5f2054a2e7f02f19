"""The log of cache events: changes of what the engine's caches hold.

Filled by `core` inside the step (through the scheduler's observer seam and the plans), sent by
`stream`. Three kinds of entries: `mm` (media values), `encoder` (encoder outputs), `kv` (KV
blocks). The format is documented in docs/reference/events.md. Takes notes only: no sockets here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from foveal_runtime.engine.caches.block_pool import BlockHash
from foveal_runtime.engine.caches.prefix_cache import BlockHasher, extra_keys
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import StepPlan, StepResult
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.store import Store
from foveal_runtime.plan.media import MMHash


class ValueStored(msgspec.Struct, frozen=True, tag="mm_stored", omit_defaults=True):
    """A media value can be used by its key alone."""

    mm_hash: bytes
    size_bytes: int
    modality: int = -1
    num_tokens: int = 0
    num_embeds: int = 0


class ValueRemoved(msgspec.Struct, frozen=True, tag="mm_removed"):
    mm_hashes: list[bytes]


class EncoderStored(msgspec.Struct, frozen=True, tag="encoder_stored"):
    """Encoder outputs exist; tier is "device" or "host"."""

    mm_hashes: list[bytes]
    tier: str


class EncoderRemoved(msgspec.Struct, frozen=True, tag="encoder_removed"):
    mm_hashes: list[bytes]
    tier: str


class BlockStored(msgspec.Struct, frozen=True, tag="kv_stored", omit_defaults=True):
    """A KV block can be shared. `parent` is the hash before it (of the first block: the root,
    which depends on block size, model, salt and LoRA adapter); `extra` lists (mm_hash, item offset
    - block start); `lora` is the adapter's (name, digest)."""

    block_hash: bytes
    parent: bytes
    token_ids: list[int]
    block_size: int
    extra: tuple[tuple[bytes, int], ...] = ()
    lora: tuple[str, bytes] | None = None


class BlocksRemoved(msgspec.Struct, frozen=True, tag="kv_removed"):
    block_hashes: list[bytes]


class StateStored(msgspec.Struct, frozen=True, tag="state_stored"):
    """Of models with recurrent state: a prefix that ends with this block can be continued. Without
    it, a prefix whose blocks are all stored is computed again from the last state before."""

    block_hash: bytes


class StatesRemoved(msgspec.Struct, frozen=True, tag="state_removed"):
    block_hashes: list[bytes]


class BlocksCleared(msgspec.Struct, frozen=True, tag="kv_cleared"):
    """All blocks nobody uses were forgotten (each is also named in kv_removed)."""


Event = (
    ValueStored
    | ValueRemoved
    | EncoderStored
    | EncoderRemoved
    | BlockStored
    | BlocksRemoved
    | StateStored
    | StatesRemoved
    | BlocksCleared
)


class EventBatch(msgspec.Struct, frozen=True):
    """One message of the stream: the events of one step, in order.

    `boot` changes with every start of the engine: everything known before is void then.
    """

    engine_id: str
    boot: int
    seconds: float
    events: list[Event]


class EventLog:
    """Collects events and hands them on as batches (an `observer.CacheObserver`).

    Args:
        publish: takes an EventBatch; must not block.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        engine_id: str,
        publish: Callable[[Any], None],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine_id = engine_id
        self._boot = time.time_ns()
        self._publish = publish
        self._wall_clock = wall_clock
        self._events: list[Event] = []
        self._removed_blocks: list[bytes] = []
        self._removed_states: list[bytes] = []

    # ---- KV blocks (CacheObserver) --------------------------------------------------------------

    def block_stored(self, request: Request, index: int, hasher: BlockHasher) -> None:
        self._note_removed_blocks()
        size = hasher.block_size
        start = index * size
        hashes = request.block_hashes
        parent = hashes[index - 1] if index else hasher.root(request)
        keys, _ = extra_keys(request.mm_inputs, start, start + size)
        tokens = request.token_ids[start : start + size]
        lora = None if request.lora is None else (request.lora.name, request.lora.digest)
        self._events.append(BlockStored(hashes[index], parent, tokens, size, keys, lora))

    def block_removed(self, block_hash: BlockHash) -> None:
        self._removed_blocks.append(block_hash)

    def blocks_cleared(self) -> None:
        self._note_removed_blocks()
        self._events.append(BlocksCleared())

    def _note_removed_blocks(self) -> None:
        if self._removed_blocks:
            self._events.append(BlocksRemoved(self._removed_blocks))
            self._removed_blocks = []
        if self._removed_states:
            self._events.append(StatesRemoved(self._removed_states))
            self._removed_states = []

    # ---- recurrent states -----------------------------------------------------------------------

    def state_stored(self, block_hash: BlockHash) -> None:
        self._note_removed_blocks()
        self._events.append(StateStored(block_hash))

    def state_removed(self, block_hash: BlockHash) -> None:
        self._removed_states.append(block_hash)

    # ---- encoder outputs ------------------------------------------------------------------------

    def note_plan(self, plan: StepPlan, result: StepResult) -> None:
        """The encoder's moves of a step that was done."""
        if plan.store_encoder:
            self._events.append(EncoderStored(list(plan.store_encoder), "host"))
        if plan.free_encoder:
            self._events.append(EncoderRemoved(list(plan.free_encoder), "device"))
        if plan.drop_host_encoder:
            self._events.append(EncoderRemoved(list(plan.drop_host_encoder), "host"))
        made = [e.mm_hash for e in plan.encode if e.mm_hash not in result.failed_encodes]
        made += plan.load_encoder
        if made:
            self._events.append(EncoderStored(made, "device"))

    def note_adopted(self, device: list[MMHash], host: list[MMHash]) -> None:
        """Outputs that survived a restart."""
        if device:
            self._events.append(EncoderStored(device, "device"))
        if host:
            self._events.append(EncoderStored(host, "host"))

    # ---- media values ---------------------------------------------------------------------------

    def note_values(self, store: Store, changed: dict[MMHash, None]) -> None:
        """Values whose presence changed, as all mirrors are told."""
        gone = []
        for mm_hash in changed:
            entry = store.lookup(mm_hash) if store.is_announced(mm_hash) else None
            if entry is None:
                gone.append(mm_hash)
                continue
            meta = entry.value.meta if entry.value is not None else None
            if meta is None:
                self._events.append(ValueStored(mm_hash, entry.size_bytes))
            else:
                self._events.append(
                    ValueStored(
                        mm_hash, entry.size_bytes, meta.modality, meta.num_tokens, meta.num_embeds
                    )
                )
        if gone:
            self._events.append(ValueRemoved(gone))

    def flush(self) -> None:
        """Publishes what was noted since the last call."""
        self._note_removed_blocks()
        if self._events:
            events, self._events = self._events, []
            self._publish(EventBatch(self._engine_id, self._boot, self._wall_clock(), events))


class ObservedStore(Store):
    """A value store that tells an event log what it tells the mirrors."""

    log: EventLog | None = None

    def drain_changed(self) -> dict[MMHash, None]:
        changed = super().drain_changed()
        if self.log is not None and changed:
            self.log.note_values(self, changed)
        return changed


class ObservedReceiver(Receiver):
    """A receiver whose store can be observed: set `observe(log)` once."""

    store_type = ObservedStore

    def observe(self, log: EventLog) -> None:
        assert isinstance(self.store, ObservedStore)
        self.store.log = log
