"""Profile of a model: the costs that every budget is made of.

Written by `foveal-runtime profile` (predicted from the checkpoint's configuration, or measured on
the device), cached by the operator per model revision, read by the planner. Never computes anything
that needs the model itself.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from foveal_runtime.plan.config import GIB, ModalitiesConfig
from foveal_runtime.plan.errors import StartupError

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
ValueSource = Literal["config", "headers", "formula", "processor", "measured"]


SMALLER_PIXELS = tuple(28 * 28 << k for k in range(14, 7, -1))
"""Limits on images whose figures a profile has besides: 12,845,056 down to 100,352 pixels."""
SMALLER_FRAMES = (256, 128, 64, 32, 16, 8, 4)


class SmallerItem(msgspec.Struct, frozen=True, array_like=True):
    """The largest item under a smaller limit: pixels of an image, frames of a video."""

    limit: int
    num_tokens: int
    num_embeds: int
    processed_bytes: int
    num_patches: int


class ItemProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The largest item of one modality that the processor can produce under the set limits.

    Attributes:
        num_tokens: prompt tokens its placeholder expands to.
        num_embeds: encoder outputs among them.
        processed_bytes: the processed item as it crosses the wire and lies in a cache.
        example: media that gives this item, e.g. "3584x3584 pixels".
        num_patches: positions of the encoder that it takes; 0 = not known.
        smaller: the same figures under smaller limits, larger ones first, as far as they differ;
            SMALLER_PIXELS and SMALLER_FRAMES were tried.
    """

    num_tokens: int
    num_embeds: int
    processed_bytes: int
    example: str = ""
    num_patches: int = 0
    smaller: tuple[SmallerItem, ...] = ()

    def at(self, limit: int) -> ItemProfile:
        """The figures under `limit` or, between two that are recorded, under the larger one."""
        fitting = [one for one in self.smaller if one.limit >= limit]
        if not fitting:
            return self
        least = fitting[-1]
        return ItemProfile(
            num_tokens=least.num_tokens,
            num_embeds=least.num_embeds,
            processed_bytes=least.processed_bytes,
            num_patches=least.num_patches,
            smaller=tuple(one for one in self.smaller if one.limit < least.limit),
        )


class ProfileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that the largest items were made under: pixels as they reach the processor."""

    image_pixels: int
    video_pixels: int
    video_frames: int
    audio_seconds: float

    @classmethod
    def of(cls, modalities: ModalitiesConfig) -> ProfileLimits:
        return cls(
            image_pixels=modalities.image.processed_pixels,
            video_pixels=modalities.video.processed_pixels,
            video_frames=modalities.video.max_frames,
            audio_seconds=modalities.audio.max_seconds,
        )


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What processes take before they serve, with this image and this model: anonymous memory and
    page tables, not the pages of files. 0 = not measured; budgets then take documented constants.

    Attributes:
        http_bytes: an HTTP process with its tokenizer. worker_bytes: a media worker with the
            processor. worker_bytes_per_pixel: what it takes beyond that at most for the largest
            image that the limits admit, its file included, for each of its pixels.
        engine_bytes: an engine on a CPU without weights and caches, its compiled kernels included.
    """

    http_bytes: int = 0
    worker_bytes: int = 0
    worker_bytes_per_pixel: int = 0
    engine_bytes: int = 0


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one model revision on one device, before any parallelism.

    Attributes:
        weight_bytes: all parameters as loaded.
        kv_bytes_per_token: keys and values of all layers, one token, in `dtype`.
        embed_width, embed_bytes: elements of one encoder output, and bytes of one element.
        embed_levels: 1 + deepstack levels.
        activation_bytes: peak of the decoder's forward pass that does not grow with the batch.
        activation_bytes_per_token: growth of that peak per scheduled token.
        activation_bytes_per_token_whole: the part of it that every rank of an engine has in full.
        encoder_bytes_per_patch: modality to the peak of its encoder for each patch of an item.
        encoder_bytes_per_embed: what comes on top for each encoder output.
        replicated_weight_bytes: parameters that every rank holds in full (encoders among them);
            None = not known.
        num_heads, num_kv_heads: greatest common divisor over the layers: tensor parallelism needs
            a divisor of both; 0 = not known.
        window, window_kv_bytes_per_token: the longest sliding window of any layer, and the part of
            kv_bytes_per_token that layers with a window take; 0 = none.
        window_pool: the engine keeps no more than a window of those layers' keys and values.
        max_model_len: the model's own limit, prompt + output tokens.
        state_bytes: recurrent state of one running request, for models with such layers.
        quantization: format in which weights are kept; "" = plain numbers of `dtype`.
        load_bytes: plain weights that are in host memory until they are quantised, as the files
            have them in another type than `dtype`, or experts one by one; all others stay mapped
            from the files.
        is_encoder: it embeds whole prompts, each in one step, and generates nothing.
        items: modality to its largest item; empty for a text-only model.
        source: "predicted" from files, or "measured" on the device.
        kv_bytes_per_layer: kv_bytes_per_token, layer by layer.
        sources: field name (items.image for a modality) to where its value comes from: the
            configuration, the headers of the weight files, a formula over configuration values,
            the processor at work, or a measurement.
        processes: what the processes that serve it take, as measured where the profile was made.
        vocab_size: width of the model's logits; 0 = not recorded.
        limits: the limits on media it was made with; None = not recorded.
        processor: sizes that the processor itself keeps to, by modality and option.
        versions: packages that it was made with, by name.
    """

    model: str = ""
    revision: str = ""
    dtype: str = "bfloat16"
    is_multimodal: bool = True
    is_encoder: bool = False
    state_bytes: int = 0
    quantization: str = ""
    load_bytes: int = 0
    max_model_len: _Positive
    weight_bytes: int
    kv_bytes_per_token: _Positive
    embed_width: int = 0
    embed_bytes: _Positive = 2
    embed_levels: _Positive = 1
    activation_bytes: int = 0
    activation_bytes_per_token: int = 0
    items: dict[str, ItemProfile] = {}
    source: Literal["predicted", "measured"] = "predicted"
    kv_bytes_per_layer: tuple[int, ...] = ()
    sources: dict[str, ValueSource] = {}
    processes: ProcessMemory = ProcessMemory()
    activation_bytes_per_token_whole: int = 0
    encoder_bytes_per_patch: dict[str, int] = {}
    encoder_bytes_per_embed: int = 0
    replicated_weight_bytes: int | None = None
    num_heads: int = 0
    num_kv_heads: int = 0
    window: int = 0
    window_kv_bytes_per_token: int = 0
    window_pool: bool = False
    vocab_size: int = 0
    limits: ProfileLimits | None = None
    processor: dict[str, int] = {}
    versions: dict[str, str] = {}

    def encoder_bytes(self, modality: str, item: ItemProfile) -> int:
        """Peak of encoding this item alone."""
        each = self.encoder_bytes_per_patch.get(modality, 0)
        return each and item.num_patches * each + item.num_embeds * self.encoder_bytes_per_embed

    def possible_ranks(self) -> tuple[int, ...]:
        """Numbers of devices that can share the model's heads; empty = not known. Recurrent states,
        encoders and quantised weights are not shared."""
        if self.state_bytes or self.is_encoder or self.quantization:
            return (1,)
        if not self.num_heads or not self.num_kv_heads:
            return ()
        heads = math.gcd(self.num_heads, self.num_kv_heads)
        return tuple(n for n in range(1, min(64, heads) + 1) if heads % n == 0)

    def kv_token_bytes(self, kv_dtype: str) -> int:
        """Keys and values of one token when they are kept as `kv_dtype`, see EngineCaches."""
        return self._kept_as(kv_dtype, self.kv_bytes_per_token)

    def window_token_bytes(self, kv_dtype: str) -> int:
        """The part of it that lies in the windows' pool; 0: there is none."""
        return self._kept_as(kv_dtype, self.window_kv_bytes_per_token if self.window_pool else 0)

    def _kept_as(self, kv_dtype: str, num_bytes: int) -> int:
        as_computed, as_kept = _ITEM_BYTES.get(self.dtype), _ITEM_BYTES.get(kv_dtype)
        if as_computed is None or as_kept is None:  # auto, or a dtype of a later release
            return num_bytes
        return num_bytes * as_kept // as_computed

    @property
    def bytes_per_embed(self) -> int:
        return self.embed_width * self.embed_bytes * self.embed_levels


def decode(data: bytes) -> ModelProfile:
    """Reads a profile document. Raises StartupError naming the field."""
    try:
        return msgspec.json.decode(data, type=ModelProfile)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StartupError(f"model profile: {error}") from error


MAX_PROBE_PIXELS = 4_000_000
VIDEO_PROBE_FRAMES = 8
"""Videos are tried with so many frames of at most so many pixels, and grown by arithmetic."""
BASE_BYTES = 2 * GIB
"""The interpreter with torch and the processors: 0.9 GiB measured, and more with device builds."""
BYTES_PER_PIXEL = 96
"""Bytes as decoded, as floats, as patches and as the serialised value: 75 measured with a processor
that shrinks nothing (e2e/results/measurements.md)."""
BYTES_PER_AUDIO_SECOND = 1 << 20
"""Samples, spectrum and features: 0.65 MB measured."""


def profile_memory_bytes(modalities: ModalitiesConfig) -> int:
    """The most that the Job may take, in whole GiB. Grows with every limit."""
    image = modalities.image.max_pixels
    video = min(modalities.video.max_frames, VIDEO_PROBE_FRAMES) * min(
        modalities.video.max_pixels, MAX_PROBE_PIXELS
    )
    items = max(
        BYTES_PER_PIXEL * image,
        BYTES_PER_PIXEL * video,
        int(BYTES_PER_AUDIO_SECOND * modalities.audio.max_seconds),
    )
    return -(-(BASE_BYTES + items) // GIB) * GIB
