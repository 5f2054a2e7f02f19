"""Shared types of media items: modality, placeholder, metadata.

Used by frontend/ (identity, length checks), mirror/ (announcements), engine/ (scheduling, block
hashes) and model/ (merging). Holds no pixels.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")

MMHash = bytes
"""32 bytes of BLAKE3 over content, processor identity, options and tenant salt."""


class ItemMeta(msgspec.Struct, frozen=True, array_like=True):
    """What any frontend must know of a processed item to build a request without decoding it.

    Travels in cache announcements (at most 64 bytes on the wire).

    Attributes:
        modality: index into MODALITIES.
        num_tokens: prompt tokens that the item's placeholder expands to.
        num_embeds: encoder outputs among them (idefics3: 2,227 tokens, 2,197 embeds).
    """

    modality: int
    num_tokens: int
    num_embeds: int


class PlaceholderRange(msgspec.Struct, frozen=True, array_like=True):
    """Where one item stands in the *expanded* prompt.

    Attributes:
        offset: first prompt position of the item.
        length: number of prompt tokens.
        embed_runs: (start, length) runs, relative to `offset` and ascending, of the positions
            that take encoder outputs; the others are ordinary marker tokens.
    """

    offset: int
    length: int
    embed_runs: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        return sum(length for _, length in self.embed_runs)

    def embeds_before(self, position: int) -> int:
        """Number of embed positions at prompt positions < `position` (clamped to the item)."""
        rel = position - self.offset
        return sum(max(0, min(length, rel - start)) for start, length in self.embed_runs)
