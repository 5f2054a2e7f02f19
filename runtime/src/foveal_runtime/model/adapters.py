"""What Foveal must know of a model family beyond transformers' own classes: a table of few lines.

Read by loader (is it supported), encoder (how items become embeddings) and runner (positions,
groups, deepstack). A family that is not here and takes media is refused: the wrong mask or the
wrong positions give fluent nonsense, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from foveal_runtime.plan.media import Modality


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """How items of one modality go through the model's own feature method.

    Items are batched along dimension 0 of every field.

    Attributes:
        method: name of the method on the model's core, or a key of CUSTOM_ENCODERS.
        fields: item fields it takes as keyword arguments; `optional` ones only when present.
        ragged: fields whose first dimension may differ between items of one batch, because the
            model splits its output by itself; other fields must have equal shapes.
        batched: False runs each item alone (the method's output cannot be split for sure).
    """

    method: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    batched: bool = True


@dataclass(frozen=True, slots=True)
class Adapter:
    """One model family.

    Attributes:
        rope: get_rope_index keyword → (modality, item field); not empty means mrope.
        bidirectional, groups_ignore_window: see ModelTraits and LayerGeometry.
        deepstack: the encoder has extra output levels that early decoder layers add.
        position_offset: rope position of the first token.
    """

    encoders: Mapping[Modality, EncoderSpec]
    rope: Mapping[str, tuple[Modality, str]] = field(default_factory=dict)
    bidirectional: Literal["none", "item", "prompt"] = "none"
    groups_ignore_window: bool = False
    deepstack: bool = False
    position_offset: int = 0


def _qwen2_audio(core: Any, input_features: torch.Tensor, feature_attention_mask: Any) -> Any:
    """Qwen2-Audio has no feature method: tower, projector, then the valid rows of each clip."""
    hidden = core.audio_tower(input_features, return_dict=True).last_hidden_state
    projected = core.multi_modal_projector(hidden)
    _, lengths = core.audio_tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    return [rows[:length] for rows, length in zip(projected, lengths.tolist(), strict=True)]


CUSTOM_ENCODERS = {"qwen2_audio": _qwen2_audio}

_IMAGE = "get_image_features"
_PIXELS = Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values",))})
_SIZED = Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values", "image_sizes"))})
_TILED = Adapter(
    {"image": EncoderSpec(_IMAGE, ("pixel_values",), optional=("pixel_attention_mask",))}
)
_GRID_IMAGE = EncoderSpec(_IMAGE, ("pixel_values", "image_grid_thw"), ragged=("pixel_values",))
_GRID_VIDEO = EncoderSpec(
    "get_video_features",
    ("pixel_values_videos", "video_grid_thw"),
    ragged=("pixel_values_videos",),
)
_GRID_ROPE: dict[str, tuple[Modality, str]] = {
    "image_grid_thw": ("image", "image_grid_thw"),
    "video_grid_thw": ("video", "video_grid_thw"),
}
_GRIDS: dict[Modality, EncoderSpec] = {"image": _GRID_IMAGE, "video": _GRID_VIDEO}

ADAPTERS: dict[str, Adapter] = {
    "llava": Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values",), optional=("image_sizes",))}),
    "llava_next": _SIZED,
    "llava_onevision": _SIZED,
    "mistral3": _SIZED,
    "idefics3": _TILED,
    "smolvlm": _TILED,
    "internvl": Adapter(
        {"image": EncoderSpec(_IMAGE, ("pixel_values",), ragged=("pixel_values",))}
    ),
    "qwen2_vl": Adapter(_GRIDS, rope=_GRID_ROPE),
    "qwen2_5_vl": Adapter(
        _GRIDS, rope={**_GRID_ROPE, "second_per_grid_ts": ("video", "second_per_grid_ts")}
    ),
    "qwen3_vl": Adapter(_GRIDS, rope=_GRID_ROPE, deepstack=True),
    "qwen3_vl_moe": Adapter(_GRIDS, rope=_GRID_ROPE, deepstack=True),
    "glm4v": Adapter({"image": _GRID_IMAGE}, rope={"image_grid_thw": ("image", "image_grid_thw")}),
    "gemma3": Adapter(_PIXELS.encoders, bidirectional="item"),
    "paligemma": Adapter(
        _PIXELS.encoders, bidirectional="prompt", groups_ignore_window=True, position_offset=1
    ),
    "voxtral": Adapter(
        {"audio": EncoderSpec("get_audio_features", ("input_features",), batched=False)}
    ),
    "audioflamingo3": Adapter(
        {
            "audio": EncoderSpec(
                "get_audio_features", ("input_features", "input_features_mask"), batched=False
            )
        }
    ),
    "qwen2_audio": Adapter(
        {"audio": EncoderSpec("qwen2_audio", ("input_features", "feature_attention_mask"))}
    ),
}

TEXT_ADAPTER = Adapter({})
"""Plain causal text models need nothing."""
