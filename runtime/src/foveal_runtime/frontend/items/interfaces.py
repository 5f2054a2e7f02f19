"""Interfaces of the HTTP app to input processing and to the engine client.

The app (app.py and the handlers) codes against these Protocols; `input_processor` and
`engines.client` implement them, `testing/fake.py` ships implementations for tests. main/ wires
them. Holds next to no behaviour; never imports torch, sockets or the web framework.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from foveal_runtime.frontend.items.prepared import MediaPart, PreparedRequest, PrepareOptions
from foveal_runtime.frontend.items.source import Page
from foveal_runtime.mirror.sender import SendItem, SendValue
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import ItemMeta, MMHash, Modality
from foveal_runtime.wire.messages import EngineOutput


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
    """What the engine sessions know; `engines.client.EngineClient` implements it."""

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
