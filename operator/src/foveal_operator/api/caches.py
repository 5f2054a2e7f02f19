"""Limits on media and the sizes of the four caches, as the resource words them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from foveal_operator.api.rules import AutoSize, ObjectName, Part, Quantity, Rule
from foveal_runtime.plan.config import (
    DEFAULT_DOCUMENT_PAGES,
    DEFAULT_VIDEO_FRAMES,
    DEFAULT_VIDEO_PIXELS,
)

MaxPerPrompt = Annotated[int, Meta(ge=0, le=128)]
MaxPixels = Annotated[int, Meta(ge=1024, le=1_000_000_000)]
MaxSeconds = Annotated[int, Meta(ge=1, le=86_400)]
_PER_PROMPT = "Items of this modality per request; 0 switches the modality off."
_SIZE = "Encoded bytes of one item at most."


class Image(Part, frozen=True, kw_only=True):
    """Limits on images."""

    max_per_prompt: Annotated[MaxPerPrompt, Meta(description=_PER_PROMPT + " Default: 16.")] = 16
    max_pixels: Annotated[
        MaxPixels, Meta(description="Width x height at most. Default: 64000000.")
    ] = 64_000_000
    resize_to_pixels: Annotated[
        MaxPixels | None,
        Meta(description="Larger images are shrunk to so many. Default: off."),
    ] = None
    max_pages: Annotated[
        Annotated[int, Meta(ge=1, le=1024)],
        Meta(
            description="Pages of a PDF at most, each of which is an image and counts towards "
            "maxPerPrompt. Default: 16."
        ),
    ] = DEFAULT_DOCUMENT_PAGES
    max_size: Annotated[Quantity, Meta(description=_SIZE + " Default: 64Mi.")] = "64Mi"


class Video(Part, frozen=True, kw_only=True):
    """Limits on videos."""

    max_per_prompt: Annotated[MaxPerPrompt, Meta(description=_PER_PROMPT + " Default: 2.")] = 2
    max_pixels: Annotated[
        MaxPixels, Meta(description="Width x height of a frame at most. Default: 64000000.")
    ] = 64_000_000
    resize_to_pixels: Annotated[
        MaxPixels,
        Meta(description="Larger frames are shrunk to so many. Default: 602112."),
    ] = DEFAULT_VIDEO_PIXELS
    max_seconds: Annotated[MaxSeconds, Meta(description="Duration at most. Default: 600.")] = 600
    max_frames: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)],
        Meta(description="Frames kept of one video, evenly spread. Default: 32."),
    ] = DEFAULT_VIDEO_FRAMES
    max_size: Annotated[Quantity, Meta(description=_SIZE + " Default: 256Mi.")] = "256Mi"


class Audio(Part, frozen=True, kw_only=True):
    """Limits on audio clips."""

    max_per_prompt: Annotated[MaxPerPrompt, Meta(description=_PER_PROMPT + " Default: 4.")] = 4
    max_seconds: Annotated[MaxSeconds, Meta(description="Duration at most. Default: 600.")] = 600
    max_size: Annotated[Quantity, Meta(description=_SIZE + " Default: 64Mi.")] = "64Mi"


class Modalities(Part, frozen=True, kw_only=True):
    """Limits on media, enforced before anything is decoded; every budget follows from them."""

    image: Annotated[Image, Meta(description="Limits on images.")] = Image()
    video: Annotated[Video, Meta(description="Limits on videos.")] = Video()
    audio: Annotated[Audio, Meta(description="Limits on audio clips.")] = Audio()


class ProcessorCache(Part, frozen=True, kw_only=True):
    """Processed media, so that a repeated item is never decoded or processed again."""

    size: Annotated[
        AutoSize,
        Meta(
            description="Of each frontend process. Auto (default): what frontend.hostMemory "
            "leaves, or 4Gi when that is not set. 0 = off."
        ),
    ] = "Auto"


class IpcCache(Part, frozen=True, kw_only=True):
    """Processed media kept by an engine, so that a repeated item is never sent again."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(has(self.type) && self.type == 'SharedMemory') == has(self.claimName)",
            "type SharedMemory needs claimName, a tmpfs claim that frontends and engines of a node "
            "share; Inline takes none",
            lambda s: (s.type == "SharedMemory") == (s.claim_name is not None),
            "claimName",
        ),
    )
    size: Annotated[
        AutoSize,
        Meta(
            description="Of each engine: one pool, whatever the number of frontends. Auto "
            "(default): a share of engine.hostMemory, or 4Gi when that is not set. 0 = off. With "
            "SharedMemory, each frontend has as much on the claim, with Auto 1Gi."
        ),
    ] = "Auto"
    type: Annotated[
        Literal["Inline", "SharedMemory"],
        Meta(description="How values travel. Inline (default): in the message."),
    ] = "Inline"
    claim_name: Annotated[
        ObjectName | None,
        Meta(description="A memory-backed claim mounted by all pods, for type SharedMemory."),
    ] = None
    min_shared_value: Annotated[
        Quantity,
        Meta(description="SharedMemory: a smaller value is in the message. Default: 16Ki."),
    ] = "16Ki"


class WarmSet(Part, frozen=True, kw_only=True):
    """Where hot encoder outputs survive a planned restart."""

    claim_name: Annotated[
        ObjectName,
        Meta(
            description="An existing PersistentVolumeClaim, which all engines mount; each has a "
            "folder of its pod's name there. Folders of engines that were scaled away stay."
        ),
    ]
    size: Annotated[
        Quantity, Meta(description="What one engine may keep there at most. Default: 1Gi.")
    ] = "1Gi"


class EncoderCache(Part, frozen=True, kw_only=True):
    """Encoder outputs, shared between requests."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.size) && self.size != 'Auto' && has(self.tokens))",
            "set size or tokens, not both",
            lambda s: s.size == "Auto" or s.tokens is None,
            "tokens",
        ),
    )
    size: Annotated[
        AutoSize,
        Meta(
            description="Bytes on the device. Auto (default): the largest item or "
            "maxNumBatchedTokens embeddings, whichever is more."
        ),
    ] = "Auto"
    tokens: Annotated[
        Annotated[int, Meta(ge=1, le=16_777_216)] | None,
        Meta(description="The same size in embeddings, instead of bytes."),
    ] = None
    host_size: Annotated[
        AutoSize, Meta(description="Host memory tier behind it. Default: 0, which is off.")
    ] = "0"
    eviction: Annotated[
        Literal["LRU", "Cost"],
        Meta(
            description="Which idle output goes first: the one released first (LRU, default), or "
            "the one that is cheapest to encode again per embedding (Cost)."
        ),
    ] = "LRU"
    warm_set: Annotated[
        WarmSet | None, Meta(description="Keep hot encoder outputs over planned restarts.")
    ] = None


class KVCache(Part, frozen=True, kw_only=True):
    """Keys and values of tokens, with automatic prefix caching over text and media."""

    size: Annotated[
        AutoSize,
        Meta(
            description="Of one engine over all its devices. Auto (default): what weights, "
            "activations and the encoder cache leave of the devices."
        ),
    ] = "Auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "fp8"],
        Meta(
            description="What keys and values are kept as. auto (default): as the model computes; "
            "bfloat16: half of a float32 model's; fp8 (e4m3, no scales): half of bfloat16, on GPUs "
            "of compute capability 8.9 or higher."
        ),
    ] = "auto"


class CacheSettings(Part, frozen=True, kw_only=True):
    """Cache sizes: Auto or a quantity each. status.budgets shows what they became."""

    processor: Annotated[
        ProcessorCache, Meta(description="Processed media in every frontend process.")
    ] = ProcessorCache()
    ipc: Annotated[IpcCache, Meta(description="Processed media in every engine.")] = IpcCache()
    encoder: Annotated[EncoderCache, Meta(description="Encoder outputs in every engine.")] = (
        EncoderCache()
    )
    kv: Annotated[KVCache, Meta(description="KV cache of every engine.")] = KVCache()
    headroom_percent: Annotated[
        Annotated[int, Meta(ge=5, le=50)],
        Meta(description="Share of each memory limit that stays free. Default: 10."),
    ] = 10
    on_misfit: Annotated[
        Literal["Block", "Shrink"],
        Meta(
            description="Block (default): no pods until the budgets fit. Shrink: reduce pinned "
            "caches (host tier, IPC pool, encoder, KV), and say so in status."
        ),
    ] = "Block"
