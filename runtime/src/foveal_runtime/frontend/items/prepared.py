"""A request on its way from HTTP to an engine: its media parts and options as they came, and the
items and token ids once they are prepared.

Values of a PreparedRequest are made lazily: a hit never wakes a media worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from foveal_runtime.frontend.items.source import Page
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.protocol.body_text import MediaText
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import ItemMeta, MMHash, Modality
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """One media part of a request, as the user wrote it: nothing fetched, nothing decoded.

    Attributes:
        modality: what the part claims to be.
        url: http:, https:, file: or data: URL; None when the part is uuid-only or `data` is set.
            OpenAI's input_audio becomes a data: URL.
        data: raw encoded bytes, for callers that have them; None otherwise.
        uuid: the user's name for the content; with neither url nor data the part is uuid-only.
        path: where it stands in the request, e.g. "messages[1].content[2]": for error messages.
        page: the image is this page of a document; None for all other parts.
        is_embeds: the content is a file of encoder outputs (see `items.embeds`).
    """

    modality: Modality
    url: MediaText | None = None
    data: bytes | None = None
    uuid: str | None = None
    path: str = ""
    page: Page | None = None
    is_embeds: bool = False

    @property
    def is_uuid_only(self) -> bool:
        return self.url is None and self.data is None and self.page is None


def _charge_nothing(num_bytes: int) -> None:
    """The default of PrepareOptions.charge_media_bytes: nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Everything about a request but its prompt and media.

    Attributes:
        request_id: of the first sequence; others of the same HTTP request get suffixed ids.
        sampling: of the first sequence; max_tokens is at most max_model_len - len(token_ids).
        mm_processor_kwargs: the user's processor options; those of an item are part of its key.
        cache_salt: the request's own; "" = shared caches.
        tenant: the tenant's, from the deployment's header; b"" = one tenant.
        charge_media_bytes: called with the encoded size of media that did not arrive in the HTTP
            body, before it is read (Content-Length) or as it grows; raises RateLimited when the
            process holds too much. What was charged is given back when the request ends.
        client: whose request it is, for turns: the tenant, else the client's address.
        lora: the adapter that the request names as its model. No key of an item depends on it.
    """

    request_id: str
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    cache_salt: str = ""
    tenant: bytes = b""
    priority: int = 0
    read_prefix_cache: bool = True
    echo_prompt: bool = False
    charge_media_bytes: Callable[[int], None] = _charge_nothing
    client: str = ""
    lora: LoraRef | None = None

    @property
    def salt(self) -> bytes:
        """Part of every key of every cache and of every flight that requests join: who has
        another salt sees no hit, no value and no timing of ours. b"" = shared."""
        if not self.cache_salt and not self.tenant:
            return b""
        return hashing.short_digest(self.tenant, self.cache_salt.encode())
