"""The host tier of the encoder cache: the records of outputs that are also in host memory.

Used by `encoder_cache` only. Holds keys and sizes; the runner copies the tensors when a plan's
store_encoder, load_encoder and drop_host_encoder say so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from foveal_runtime.plan.media import MMHash


class HostTier:
    """Byte-bounded LRU of encoder outputs.

    Args:
        capacity_bytes: 0 = no tier.
        embed_bytes: bytes of one encoder output.
    """

    def __init__(self, capacity_bytes: int, embed_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes if embed_bytes > 0 else 0
        self.embed_bytes = embed_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[MMHash, int] = OrderedDict()

    def __contains__(self, mm_hash: MMHash) -> bool:
        return mm_hash in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[MMHash]:
        return iter(self._entries)

    def num_embeds(self, mm_hash: MMHash) -> int | None:
        return self._entries.get(mm_hash)

    def touch(self, mm_hash: MMHash) -> None:
        self._entries.move_to_end(mm_hash)

    def store(
        self, mm_hash: MMHash, num_embeds: int, keep: set[MMHash]
    ) -> tuple[bool, list[MMHash]]:
        """Makes room and adds; returns (added, dropped). Entries in `keep` are not dropped: a
        plan in the making reads them. What does not fit is not added and drops nothing."""
        size = num_embeds * self.embed_bytes
        if not size or size > self.capacity_bytes or mm_hash in self._entries:
            return False, []
        victims, room = [], self.capacity_bytes - self.used_bytes
        for candidate, embeds in self._entries.items():
            if room >= size:
                break
            if candidate not in keep:
                victims.append(candidate)
                room += embeds * self.embed_bytes
        if room < size:
            return False, []
        for victim in victims:
            self.remove(victim)
        self._entries[mm_hash] = num_embeds
        self.used_bytes += size
        return True, victims

    def remove(self, mm_hash: MMHash) -> None:
        self.used_bytes -= self._entries.pop(mm_hash) * self.embed_bytes

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(self._entries.values()) * self.embed_bytes
        assert self.used_bytes <= self.capacity_bytes
