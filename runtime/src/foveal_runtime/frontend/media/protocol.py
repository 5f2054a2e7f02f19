"""Messages between the HTTP process and a media worker: one message file per boundary.

`workers` (HTTP process) sends, `worker_main` answers, over a socket pair. A frame is
`header length u32 | body length u64 | msgpack header | body`; the body is the media file on the way
in and the serialised item (`wire.item`) on the way out. No pickle, both lengths bounded.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.media import MODALITIES, Modality

MAX_HEADER_BYTES = 16 * 1024 * 1024
PREFIX_BYTES = 12
GRID = "image_grid_thw"
"""The field with an image's time, height and width in patches, where a family has one."""


class PlaceholderInfo(msgspec.Struct, frozen=True):
    """How one modality stands in an *unexpanded* prompt of this model.

    Attributes:
        token, token_id: the one placeholder per item, as chat templates write it.
        embed_token_id: the id inside the replacement that takes encoder outputs.
        text: what a chat template writes for one item: the token with its fixed neighbours.
        method: how replacement ids are found: "offsets" (the processor names the replacement
            text), "diff" (expanded prompt minus unexpanded prompt) or "" (neither reproduces the
            full processor's prompt: the modality is refused).
        numbers: token ids before the k-th item of the modality in a prompt; () = there are none.
    """

    modality: int
    token: str
    token_id: int
    embed_token_id: int
    text: str = ""
    method: Literal["offsets", "diff", "rule", ""] = ""
    reason: str = ""
    numbers: tuple[tuple[int, ...], ...] = ()


class EmbedsLayout(msgspec.Struct, frozen=True):
    """How an image that comes as encoder outputs stands in this model's prompt.

    Attributes:
        width: numbers of one encoder output, all its levels together.
        head, tail: token ids before and after the outputs of an image.
        merge: so many patches a side make one output, and the image's grid must come along; 0: no
            grid.
        reason: why such images cannot be served; "" = they can.
    """

    width: int = 0
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    merge: int = 0
    reason: str = ""


class ProcessorInfo(msgspec.Struct, frozen=True):
    """What the HTTP process must know of the model's processor, without importing it.

    Attributes:
        identity: 16 bytes over processor class, configuration and the library versions that change
            pixels; part of every MMHash.
        prompt_rule: "inline" (placeholders stand where the chat template puts them) or "prefix"
            (PaliGemma: all placeholders first, then `prefix_ids` (BOS), the text, `suffix_ids`).
        newlines, newline_ids: how many newlines stand on both sides of each placeholder, and
            the token of n newlines at n - 1 (see `rules.surround`).
        sampling_rate: of audio, 0 when the model takes none.
        embeds: of images as encoder outputs; None when the model takes no images.
        seconds: what loading and the first item took.
        options: names of processor options that a request may set, by modality; () = not known.
    """

    identity: bytes
    placeholders: tuple[PlaceholderInfo, ...]
    prompt_rule: Literal["inline", "prefix"] = "inline"
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    newlines: int = 0
    newline_ids: tuple[int, ...] = ()
    sampling_rate: int = 0
    embeds: EmbedsLayout | None = None
    seconds: float = 0.0
    options: tuple[frozenset[str], ...] = ()

    def placeholder_token_id(self, modality: Modality) -> int | None:
        """The one token of an item in an unexpanded prompt; None = the modality is not served."""
        info = self.placeholder(MODALITIES.index(modality))
        return None if info is None else info.token_id

    def placeholder_text(self, modality: Modality) -> str | None:
        """Text of one item for chat templates that take string content only."""
        info = self.placeholder(MODALITIES.index(modality))
        return None if info is None else info.text

    def placeholder(self, modality: int) -> PlaceholderInfo | None:
        """The placeholder of a modality that can be served, else None."""
        for info in self.placeholders:
            if info.modality == modality and info.method:
                return info
        return None


class Load(msgspec.Struct, frozen=True, tag="load"):
    """First message: which model, within which limits."""

    model_path: str
    namespace: bytes
    limits: ModalitiesConfig
    num_threads: int = 1
    max_memory_bytes: int = 0


class Process(msgspec.Struct, frozen=True, tag="process"):
    """Decode the body and run the processor on this one item. `options` is JSON; `page` counts from
    0, and -1 says that the body is no document but the item's own file."""

    job: int
    modality: int
    options: bytes = b"{}"
    page: int = -1


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Draw every page of the document in the body. The answer's body has 32 bytes for each."""

    job: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ProcessorInfo


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The body is the serialised item, or the digests of a document's pages."""

    job: int
    decode_seconds: float
    process_seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`code` is one of plan.errors; job 0 = the worker could not load the model."""

    job: int
    code: str
    message: str
    param: str = ""


ToWorker = Load | Process | Pages
FromWorker = Ready | Done | Failed

_ENCODER = msgspec.msgpack.Encoder()
TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker, body_bytes: int = 0) -> bytes:
    """Prefix and header; the caller writes the body after it."""
    header = _ENCODER.encode(message)
    return len(header).to_bytes(4, "little") + body_bytes.to_bytes(8, "little") + header


def decode_prefix(prefix: bytes) -> tuple[int, int]:
    """(header bytes, body bytes). Raises ValueError when the header length is absurd."""
    header, body = int.from_bytes(prefix[:4], "little"), int.from_bytes(prefix[4:12], "little")
    if header > MAX_HEADER_BYTES:
        raise ValueError(f"header of {header} bytes")
    return header, body
