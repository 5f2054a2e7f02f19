"""A reader of vLLM's KV events, written from the published schema: what a router would know.

A message is three frames: topic, an 8-byte big-endian number, msgpack. The batch is an array of
time, events and rank; each event is an array that begins with its kind, whose positions are those
of the publisher's fields (arrays) or a map with the fields' names and `type` (newer publishers).
Fields at the end may be missing. Knows nothing of Foveal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
                    "medium", "lora_name", "extra_keys"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


class Block(NamedTuple):
    parent: int | None
    tokens: tuple[int, ...]
    extra: tuple[Any, ...]


class VllmEventReader:
    """`blocks`: by hash; `num_cleared`: how often everything was void."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.num_cleared = 0
        self.last_time = 0.0

    def read(self, payload: bytes) -> None:
        moment, events, *rank = msgspec.msgpack.decode(payload)
        assert isinstance(moment, float)
        assert moment >= self.last_time
        assert rank in ([], [None], [0])
        self.last_time = moment
        for event in events:
            self._apply(event)

    def _apply(self, event: Any) -> None:
        if isinstance(event, dict):
            kind, fields = event.pop("type"), event
        else:
            kind, *values = event
            fields = dict(zip(FIELDS[kind], values, strict=False))
        if kind == "AllBlocksCleared":
            self.blocks.clear()
            self.num_cleared += 1
        elif kind == "BlockRemoved":
            for block_hash in fields["block_hashes"]:
                del self.blocks[block_hash]
        else:
            self._store(fields)

    def _store(self, fields: dict[str, Any]) -> None:
        hashes, size = fields["block_hashes"], fields["block_size"]
        tokens, extra = fields["token_ids"], fields["extra_keys"] or [None] * len(hashes)
        assert len(tokens) == size * len(hashes)
        assert len(extra) == len(hashes), "one entry a block"
        assert fields["medium"] == "GPU"
        parent = fields["parent_block_hash"]
        assert parent is None or parent in self.blocks, "a chain that can be followed"
        for index, block_hash in enumerate(hashes):
            assert 0 <= block_hash < 1 << 64
            part = tuple(tokens[index * size : (index + 1) * size])
            keys = tuple(tuple(k) if isinstance(k, list) else k for k in extra[index] or ())
            self.blocks[block_hash] = Block(parent, part, keys)
            parent = block_hash
