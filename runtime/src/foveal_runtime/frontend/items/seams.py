"""The seams of the HTTP app: what it asks of input processing and of the engine client, and the
request that passes between them.

The app (app.py and the handlers) codes against these Protocols; `input_processor` and
`engines.client` implement them, `testing/fake.py` ships implementations for tests. main/ wires
them. Values of a PreparedRequest are made lazily: a hit never wakes a media worker. Holds next to
no behaviour; never imports torch, sockets or the web framework.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foveal_runtime.frontend.items.source import Page
from foveal_runtime.frontend.media import hashing
from foveal_runtime.mirror.sender import SendItem, SendValue
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import ItemMeta, MMHash, Modality
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.messages import EngineOutput


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
    url: str | None = None
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
        mm_processor_kwargs: the user's processor options (part of every item's key).
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


class PromptPlaceholders(Protocol):
    """How the model writes media into prompts."""

    def placeholder_token_id(self, modality: Modality) -> int | None:
        """The one token that stands for an item in an *unexpanded* prompt; None = the model does
        not take this modality."""
        ...

    def placeholder_text(self, modality: Modality) -> str | None:
        """Text of one item for chat templates that only take string content ("<image>", or
        "<|vision_start|><|image_pad|><|vision_end|>"); contains the placeholder token once."""
        ...


class InputProcessor(Protocol):
    """Turns tokens and media parts into a request that can be routed."""

    async def prepare(
        self, token_ids: list[int], parts: Sequence[MediaPart], options: PrepareOptions
    ) -> PreparedRequest:
        """Fetches, hashes and looks up; the k-th placeholder token of a modality belongs to the
        k-th part of that modality. Raises FovealError naming the part's path (too many items,
        unknown uuid, forbidden host, too large...)."""
        ...

    async def pages(
        self, documents: Sequence[MediaPart], options: PrepareOptions
    ) -> list[Sequence[Page]]:
        """The pages of each document, which are images of the prompt. Raises FovealError naming
        the document's path (not a PDF, encrypted, too many pages...)."""
        ...

    def is_warm(self) -> bool:
        """True once a first image has been through, so that the user's first is not slow."""
        ...


@dataclass(frozen=True, slots=True)
class EnginesLoad:
    """What the engines last reported, all together; `kv_usage` is the fullest one's."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class Knowledge(Protocol):
    """What the engine sessions know; `engine_client.EngineClient` implements it."""

    def lookup_item(self, mm_hash: MMHash) -> tuple[int, ItemMeta] | None:
        """(size in bytes, meta) of a value that some engine announced."""
        ...

    def lookup_alias(self, alias: bytes) -> bytes | None: ...

    def max_model_len(self) -> int: ...

    def has_cache(self) -> bool:
        """Some engine keeps values."""
        ...

    def put(self, items: Sequence[SendItem], values: dict[MMHash, SendValue]) -> int: ...


class Generator(Protocol):
    """Runs one sequence on some engine; survives the death of that engine."""

    def generate(self, request: PreparedRequest) -> AsyncGenerator[EngineOutput, None]:
        """Outputs in order, the last one with `finish` set. `aclose()` aborts the sequence within
        a step. When it ends in any way every item's `source.release()` has been called.
        Raises FovealError (an engine's error becomes one; NoEngine after the configured wait)."""
        ...

    async def health(self) -> bool:
        """A round trip to an engine, and its step counter moves while it has work."""
        ...

    def num_ready_engines(self) -> int:
        """Engines with a compatible session and a loaded model."""
        ...

    def load(self) -> EnginesLoad: ...

    def loras(self) -> Mapping[str, LoraRef]:
        """By name, the adapters that some engine serves now."""
        ...

    def max_model_len(self) -> int:
        """Prompt + output tokens that every engine accepts; 0 while no engine is known."""
        ...
