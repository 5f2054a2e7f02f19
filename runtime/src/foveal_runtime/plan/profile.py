"""Profile of a model: the costs that every budget is made of.

Written by `foveal-runtime profile` (predicted from the checkpoint's configuration, or measured on
the device), cached by the operator per model revision, read by the planner. Never computes anything
that needs the model itself.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from foveal_runtime.plan.errors import StartupError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
ValueSource = Literal["config", "headers", "formula", "processor", "measured"]


class ItemProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The largest item of one modality that the processor can produce under the set limits.

    Attributes:
        num_tokens: prompt tokens its placeholder expands to.
        num_embeds: encoder outputs among them.
        processed_bytes: the processed item as it crosses the wire and lies in a cache.
        example: media that gives this item, e.g. "3584x3584 pixels".
    """

    num_tokens: int
    num_embeds: int
    processed_bytes: int
    example: str = ""


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What processes take before they serve, with this image and this model: anonymous memory and
    page tables, not the pages of files. 0 = not measured; budgets then take documented constants.

    Attributes:
        http_bytes: an HTTP process with its tokenizer. worker_bytes: a media worker with the
            processor. worker_bytes_per_pixel: what it takes beyond that at most for the largest
            picture that the limits admit, its file included, for each of its pixels.
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
        activation_bytes: peak of a forward pass that does not grow with the batch.
        activation_bytes_per_token: growth of that peak per scheduled token.
        max_model_len: the model's own limit, prompt + output tokens.
        state_bytes: recurrent state of one running request, for models with such layers.
        items: modality to its largest item; empty for a text-only model.
        source: "predicted" from files, or "measured" on the device.
        kv_bytes_per_layer: kv_bytes_per_token, layer by layer.
        sources: field name (items.image for a modality) to where its value comes from: the
            configuration, the headers of the weight files, a formula over configuration values,
            the processor at work, or a measurement.
        processes: what the processes that serve it take, as measured where the profile was made.
    """

    model: str = ""
    revision: str = ""
    dtype: str = "bfloat16"
    is_multimodal: bool = True
    state_bytes: int = 0
    max_model_len: int
    weight_bytes: int
    kv_bytes_per_token: int
    embed_width: int = 0
    embed_bytes: int = 2
    embed_levels: int = 1
    activation_bytes: int = 0
    activation_bytes_per_token: int = 0
    items: dict[str, ItemProfile] = {}
    source: Literal["predicted", "measured"] = "predicted"
    kv_bytes_per_layer: tuple[int, ...] = ()
    sources: dict[str, ValueSource] = {}
    processes: ProcessMemory = ProcessMemory()

    def kv_token_bytes(self, kv_dtype: str) -> int:
        """Keys and values of one token when they are kept as `kv_dtype`, see EngineCaches."""
        as_computed, as_kept = _ITEM_BYTES.get(self.dtype), _ITEM_BYTES.get(kv_dtype)
        if as_computed is None or as_kept is None:  # auto, or a dtype of a later release
            return self.kv_bytes_per_token
        return self.kv_bytes_per_token * as_kept // as_computed

    @property
    def bytes_per_embed(self) -> int:
        return self.embed_width * self.embed_bytes * self.embed_levels


def decode(data: bytes) -> ModelProfile:
    """Reads a profile document. Raises StartupError naming the field."""
    try:
        return msgspec.json.decode(data, type=ModelProfile)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise StartupError(f"model profile: {error}") from error
