"""A request on its way from HTTP to the engine client: plain data, no sockets, no decoding.

`input_processor` builds a PreparedRequest; `routing` scores it; `client` sends it. Values
are made lazily: a hit never wakes a media worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import ItemMeta, MMHash
from foveal_runtime.plan.sampling import SamplingParams


class ValueSource(Protocol):
    """A way to make an item's serialised value until its request ends (the answer duty)."""

    async def value(self) -> bytes | memoryview:
        """Serialised item (`wire.item`), from the processor cache, a retained reference or the
        processor run again on the retained raw media. Joined when several ask at once.
        Raises MediaInvalid/MediaTooLarge when the media cannot be processed."""
        ...

    def release(self) -> None:
        """The request is over: drop retained media."""
        ...


@dataclass(slots=True)
class ItemCost:
    """What an item has cost, once for all sequences of its HTTP request.

    Attributes:
        was_processed: the processor ran for this request's sake (not: it waited for one that ran
            for another); was_sent: value bytes left for an engine. An item with neither is a hit.
    """

    was_processed: bool = False
    was_sent: bool = False


@dataclass(slots=True)
class CountedOnce:
    """Whether a request's items are in the counters: `n` sequences are one request."""

    is_counted: bool = False


@dataclass(slots=True)
class PreparedItem:
    """One distinct item of a request.

    `size_bytes` and `meta` are 0/None until somebody has processed the item (this frontend, or
    another one whose announcement told us).

    Attributes:
        is_held_only: nothing here can make the value (uuid-only media): only an engine that holds
            it can run the request.
        cost: shared by all sequences of the HTTP request.
    """

    mm_hash: MMHash
    modality: int
    source: ValueSource
    size_bytes: int = 0
    meta: ItemMeta | None = None
    injector: str | None = None
    is_held_only: bool = False
    cost: ItemCost = field(default_factory=ItemCost)


@dataclass(slots=True)
class PreparedRequest:
    """One sequence, ready to be routed.

    Attributes:
        token_ids: unexpanded prompt, one placeholder token per item occurrence.
        placements: (index into token_ids, index into items), in prompt order.
        binds: (alias, mm_hash) pairs that this request's uuids establish.
        tally: shared by all sequences of the HTTP request.
    """

    request_id: str
    token_ids: list[int]
    items: list[PreparedItem]
    placements: list[tuple[int, int]]
    sampling: SamplingParams
    binds: list[tuple[bytes, MMHash]] = field(default_factory=list)
    priority: int = 0
    cache_salt: bytes = b""
    read_prefix_cache: bool = True
    echo_prompt: bool = False
    lora: LoraRef | None = None
    tally: CountedOnce = field(default_factory=CountedOnce)
