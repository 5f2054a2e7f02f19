"""Adapters of model families: what Foveal needs beyond transformers' own classes, as a table.

Read by loader (is it supported), encoder (how items become embeddings) and runner (positions,
groups, deepstack). A family that is not here and takes media is refused: the wrong mask or the
wrong positions give fluent nonsense, not an error. `foveal serve` asks this table before anything
is downloaded, so torch is imported only where it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from foveal_runtime.model.family_code import (
    ernie_experts,
    gemma3n_tokens,
    granite4_layers,
    llama4_temperature,
    omni_positions,
    ovis2_tokens,
    scaled_tokens,
)
from foveal_runtime.plan.embedder import ENCODERS
from foveal_runtime.plan.media import Modality

if TYPE_CHECKING:
    import numpy as np
    import torch

    from foveal_runtime.wire.item import Item


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """How items of one modality go through the model's own feature method.

    Items are batched along dimension 0 of every field.

    Attributes:
        method: name of the method on the model's core, or a key of `family_code.CUSTOM_ENCODERS`.
        fields: item fields it takes as keyword arguments; `optional` ones only when present.
        ragged: fields whose first dimension may differ between items of one batch, because the
            model splits its output by itself; other fields must have equal shapes.
        batched: False runs each item alone (the method's output cannot be split for sure).
        grid: field (1, 3) with the item's time, height and width in patches; a square of `merge`
            by `merge` of them makes one embedding.
        merge: attribute of the vision configuration, or field of the item, with that side.
        layout: of the grid: "crops": (n, 2), of each of the item's crops, and `downsample_mode` or
            `downsample_ratio` of the configuration says how many patches make one embedding;
            "lines": each row of embeddings ends with one more, and two are around all.
        is_wide: computed in float32 whatever the model's type is.
    """

    method: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    batched: bool = True
    grid: str = ""
    merge: str = "spatial_merge_size"
    layout: Literal["grid", "crops", "lines"] = "grid"
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """One model family.

    Attributes:
        rope: get_rope_index keyword → (modality, item field); not empty means mrope.
        positions: (configuration, number of tokens, where the embeddings of each image and video
            begin, and its item, whether positions are fractions) → rope positions (axes, T),
            instead of get_rope_index.
        has_fractions: rope positions are not whole numbers.
        bidirectional, groups_ignore_window: see ModelTraits and LayerGeometry.
        is_encoder: each token sees all of the prompt and there is no head: it embeds, and generates
            nothing.
        deepstack: the encoder has extra output levels that early decoder layers add.
        deepstack_at: (configuration) → layers before which one level each is added, where they are
            not the first ones.
        position_offset: position of the first token; with `starts_after_padding` it is the one
            after the padding's id.
        has_state: some decoder layers keep a recurrent state instead of keys and values.
        groups_in_windows: layers without a sliding window ignore the groups.
        groups_if: the text configuration's `use_bidirectional_attention` with which there are
            groups at all; "": always.
        has_layer_inputs: decoder layers may take embeddings of the token ids themselves (see
            LoadedModel.layer_inputs); `placeholder_id`: of which id they are where encoder outputs
            go: number 0, the padding's, or the placeholder's own.
        embed_tokens: (core, ids (T)) → (T, E), where that is not one table.
        layer_inputs: (configuration, ids (T)) → what decoder layers take of the ids otherwise.
        correct_query: (attention module, query (T, H, Dk), KV positions (T)) → query, where a
            family derives something from a token's place in the call instead of its position.
    """

    encoders: Mapping[Modality, EncoderSpec]
    rope: Mapping[str, tuple[Modality, str]] = field(default_factory=dict)
    positions: Callable[[Any, int, Sequence[tuple[int, Item]], bool], np.ndarray] | None = None
    has_fractions: bool = False
    bidirectional: Literal["none", "item", "prompt"] = "none"
    groups_ignore_window: bool = False
    deepstack: bool = False
    deepstack_at: Callable[[Any], Sequence[int]] | None = None
    is_encoder: bool = False
    position_offset: int = 0
    starts_after_padding: bool = False
    has_state: bool = False
    groups_in_windows: bool = False
    groups_if: str = ""
    has_layer_inputs: bool = False
    placeholder_id: Literal["zero", "pad", "own"] = "zero"
    embed_tokens: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    layer_inputs: Callable[[Any, torch.Tensor], dict[str, torch.Tensor]] | None = None
    correct_query: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


_IMAGE = "get_image_features"
_PIXELS = Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values",))})
_CROPS_SPEC = EncoderSpec(_IMAGE, ("pixel_values",), ragged=("pixel_values",))
_CROPS = Adapter({"image": _CROPS_SPEC})
_GEMMA3 = Adapter(_PIXELS.encoders, bidirectional="item")
_FRAMES = EncoderSpec("get_video_features", ("pixel_values_videos",))
_SIZED = Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values", "image_sizes"))})
_TILED = EncoderSpec(_IMAGE, ("pixel_values",), optional=("pixel_attention_mask",))
_TWO_VIEWS = Adapter(
    {
        "image": EncoderSpec(
            _IMAGE,
            ("pixel_values", "num_local_patches"),
            optional=("pixel_values_local",),
            ragged=("pixel_values_local",),
        )
    }
)
_GRID_IMAGE = EncoderSpec(
    _IMAGE,
    ("pixel_values", "image_grid_thw"),
    ragged=("pixel_values",),
    grid="image_grid_thw",
)
_GRID_VIDEO = EncoderSpec(
    "get_video_features",
    ("pixel_values_videos", "video_grid_thw"),
    ragged=("pixel_values_videos",),
    grid="video_grid_thw",
)
_GRID_ROPE: dict[str, tuple[Modality, str]] = {
    "image_grid_thw": ("image", "image_grid_thw"),
    "video_grid_thw": ("video", "video_grid_thw"),
}
_GRIDS: dict[Modality, EncoderSpec] = {"image": _GRID_IMAGE, "video": _GRID_VIDEO}
_PLAIN_GRIDS = Adapter(_GRIDS)
_SLICES: dict[Modality, tuple[str, str]] = {
    "image": ("pixel_values", "target_sizes"),
    "video": ("pixel_values_videos", "target_sizes_videos"),
}


_GEMMA4 = Adapter(
    {
        "image": EncoderSpec(_IMAGE, ("pixel_values", "image_position_ids")),
        "video": EncoderSpec(
            "get_video_features",
            ("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
            ragged=("pixel_values_videos", "video_position_ids"),
        ),
        "audio": EncoderSpec("gemma4_audio", ("input_features", "input_features_mask")),
    },
    bidirectional="item",
    groups_if="vision",
)


def _merged_by(merge: str, *extra: str) -> Adapter:
    """Images on grids without mrope, where another name says how many patches merge."""
    fields = (*_GRID_IMAGE.fields, *extra)
    return Adapter({"image": replace(_GRID_IMAGE, fields=fields, merge=merge)})


_GLM_GRIDS = Adapter({"image": _GRID_IMAGE}, rope={"image_grid_thw": ("image", "image_grid_thw")})

_MINICPM = Adapter(
    {
        modality: EncoderSpec(
            f"get_{modality}_features", fields, batched=False, grid=fields[1], layout="crops"
        )
        for modality, fields in _SLICES.items()
    },
    has_state=True,
)

_MASKED_SOUND = Adapter(
    {
        "audio": EncoderSpec(
            "get_audio_features", ("input_features", "input_features_mask"), batched=False
        )
    }
)

_SPOKEN = EncoderSpec("get_audio_features", ("input_features", "feature_attention_mask"))
_OMNI = Adapter(
    {**_GRIDS, "audio": _SPOKEN},
    rope=_GRID_ROPE,
    positions=omni_positions,
)
_OMNI_3 = replace(_OMNI, has_fractions=True, deepstack=True)

ADAPTERS: dict[str, Adapter] = {
    "llava": Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values",), optional=("image_sizes",))}),
    "llava_next": _SIZED,
    "llava_onevision": Adapter(
        {
            "image": EncoderSpec(_IMAGE, ("pixel_values", "image_sizes")),
            "video": _FRAMES,
        }
    ),
    "llava_next_video": Adapter({"image": _SIZED.encoders["image"], "video": _FRAMES}),
    "video_llava": Adapter(
        {
            "image": EncoderSpec("video_llava_image", ("pixel_values_images",)),
            "video": _FRAMES,
        }
    ),
    "perception_lm": Adapter(
        {
            "image": _PIXELS.encoders["image"],
            "video": EncoderSpec("perception_lm_video", ("pixel_values_videos",)),
        }
    ),
    "fast_vlm": _PIXELS,
    "vipllava": _PIXELS,
    "deepseek_vl": _PIXELS,
    "deepseek_vl_hybrid": Adapter(
        {"image": EncoderSpec(_IMAGE, ("pixel_values", "high_res_pixel_values"))}
    ),
    "janus": _PIXELS,
    "aria": Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values",), optional=("pixel_mask",))}),
    "qianfan_ocr": _CROPS,
    "pp_chart2table": _CROPS,
    "aya_vision": _CROPS,
    "cohere2_vision": _CROPS,
    "got_ocr2": _CROPS,
    "mistral3": _SIZED,
    "lighton_ocr": _SIZED,
    "idefics3": Adapter({"image": _TILED}),
    "smolvlm": Adapter({"image": _TILED, "video": _TILED}),
    "deepseek_ocr2": _TWO_VIEWS,
    "step3p7": _TWO_VIEWS,
    "granite_docling": Adapter(
        {
            "image": EncoderSpec(
                _IMAGE, ("pixel_values", "pixel_attention_mask"), optional=("tile_fine_mask",)
            )
        },
        deepstack=True,
    ),
    "granite4_vision": Adapter(
        {"image": EncoderSpec("granite4_image", ("pixel_values", "image_sizes"))},
        deepstack=True,
        deepstack_at=granite4_layers,
    ),
    "ovis2": replace(_CROPS, embed_tokens=ovis2_tokens),
    "internvl": Adapter({"image": _CROPS_SPEC, "video": _CROPS_SPEC}),
    "llama4": Adapter(
        {"image": EncoderSpec("llama4_image", ("pixel_values",), ragged=("pixel_values",))},
        correct_query=llama4_temperature,
    ),
    "qwen2_vl": Adapter(_GRIDS, rope=_GRID_ROPE),
    "qwen2_5_vl": Adapter(
        _GRIDS, rope={**_GRID_ROPE, "second_per_grid_ts": ("video", "second_per_grid_ts")}
    ),
    "lfm2_vl": Adapter(
        {"image": EncoderSpec(_IMAGE, ("pixel_values", "spatial_shapes", "pixel_attention_mask"))},
        has_state=True,
    ),
    "lfm3_vl": Adapter(_GRIDS, has_state=True),
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": replace(_MINICPM, rope={one[1]: (m, one[1]) for m, one in _SLICES.items()}),
    "nemo_speechlm": Adapter(
        {"audio": replace(_MASKED_SOUND.encoders["audio"], is_wide=True)}, has_state=True
    ),
    "nemotron_h_omni": Adapter(
        {
            "image": EncoderSpec(
                _IMAGE,
                ("pixel_values", "image_grid_hw"),
                ragged=("pixel_values",),
                grid="image_grid_hw",
                layout="crops",
            ),
            "audio": _MASKED_SOUND.encoders["audio"],
        },
        has_state=True,
    ),
    "qwen3_5": Adapter(_GRIDS, rope=_GRID_ROPE, has_state=True),
    "qwen3_5_moe": Adapter(_GRIDS, rope=_GRID_ROPE, has_state=True),
    "qwen3_vl": Adapter(_GRIDS, rope=_GRID_ROPE, deepstack=True),
    "qwen3_vl_moe": Adapter(_GRIDS, rope=_GRID_ROPE, deepstack=True),
    "cohere_compass": Adapter(_GRIDS, rope=_GRID_ROPE, deepstack=True),
    "cosmos3_edge": Adapter(_GRIDS, rope=_GRID_ROPE),
    "cosmos3_omni": Adapter(_GRIDS, rope=_GRID_ROPE, deepstack=True),
    "exaone4_5": _PLAIN_GRIDS,
    "hyperclovax_vision_v2": _PLAIN_GRIDS,
    "kimi_k25": _merged_by("merge_kernel_size"),
    "muse_glimmer": _merged_by("merge_size"),
    "video_llama_3": _merged_by("image_merge_sizes", "image_merge_sizes"),
    "paddleocr_vl": _GLM_GRIDS,
    "glm4v": _GLM_GRIDS,
    "glm4v_moe": _GLM_GRIDS,
    "glm46v": _GLM_GRIDS,
    "glmga": _GLM_GRIDS,
    "glm_ocr": _GLM_GRIDS,
    "ernie4_5_vl_moe": replace(_GLM_GRIDS, placeholder_id="own", layer_inputs=ernie_experts),
    "hunyuan_vl": replace(_GLM_GRIDS, encoders={"image": replace(_GRID_IMAGE, layout="lines")}),
    "gemma3": _GEMMA3,
    "gemma3n": Adapter(
        {
            "image": _PIXELS.encoders["image"],
            "audio": EncoderSpec("gemma3n_audio", ("input_features", "input_features_mask")),
        },
        has_layer_inputs=True,
        placeholder_id="own",
        embed_tokens=gemma3n_tokens,
    ),
    "gemma4": replace(_GEMMA4, groups_in_windows=True, has_layer_inputs=True, placeholder_id="pad"),
    "gemma4_unified": _GEMMA4,
    "paligemma": Adapter(
        _PIXELS.encoders, bidirectional="prompt", groups_ignore_window=True, position_offset=1
    ),
    "voxtral": Adapter(
        {"audio": EncoderSpec("get_audio_features", ("input_features",), batched=False)}
    ),
    "moss_transcribe_diarize": Adapter(
        {"audio": replace(_MASKED_SOUND.encoders["audio"], method="moss_audio")}
    ),
    "audioflamingo3": _MASKED_SOUND,
    "fun_asr_nano": _MASKED_SOUND,
    "glmasr": _MASKED_SOUND,
    "qwen3_asr": _MASKED_SOUND,
    "qwen2_audio": Adapter({"audio": replace(_SPOKEN, method="qwen2_audio")}),
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), _OMNI),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), _OMNI_3),
}

_ENCODER = Adapter({}, bidirectional="prompt", is_encoder=True)
_ROBERTA = replace(_ENCODER, starts_after_padding=True)

PLAIN_TEXT = Adapter({})
"""Other causal text models need nothing."""
TEXT_ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys(ENCODERS, _ENCODER),
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta"), _ROBERTA),
    "llama4_text": Adapter({}, correct_query=llama4_temperature),
    **{kind: Adapter({}, has_layer_inputs=True) for kind in ("gemma3n_text", "gemma4_text")},
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "lfm2", "lfm3", "nemotron_h", "qwen3_5_text", "qwen3_next"),
        Adapter({}, has_state=True),
    ),
    "falcon_h1": Adapter({}, has_state=True, embed_tokens=scaled_tokens),
    "mistral4": PLAIN_TEXT,  # transformers lists it among the multimodal types
}
