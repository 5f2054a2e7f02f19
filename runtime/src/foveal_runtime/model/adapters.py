"""Adapters of model families: what Foveal needs beyond transformers' own classes, as a table.

Read by loader (is it supported), encoder (how items become embeddings) and runner (positions,
groups, deepstack). A family that is not here and takes media is refused: the wrong mask or the
wrong positions give fluent nonsense, not an error. `foveal serve` asks this table before anything
is downloaded, so torch is imported only where it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from foveal_runtime.plan.embedder import ENCODERS
from foveal_runtime.plan.media import Modality

if TYPE_CHECKING:
    import torch


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
        grid: field (1, 3) with the item's time, height and width in patches; a square of `merge`
            by `merge` of them makes one embedding.
        merge: attribute of the vision configuration, or field of the item, with that side.
        crops: the grid is (n, 2) instead, of each of the item's crops, and `downsample_mode` of the
            configuration says how many patches make one embedding.
    """

    method: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    batched: bool = True
    grid: str = ""
    merge: str = "spatial_merge_size"
    crops: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """One model family.

    Attributes:
        rope: get_rope_index keyword → (modality, item field); not empty means mrope.
        bidirectional, groups_ignore_window: see ModelTraits and LayerGeometry.
        is_encoder: each token sees all of the prompt and there is no head: it embeds, and generates
            nothing.
        deepstack: the encoder has extra output levels that early decoder layers add.
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
        correct_query: (attention module, query (T, H, Dk), KV positions (T)) → query, where a
            family derives something from a token's place in the call instead of its position.
    """

    encoders: Mapping[Modality, EncoderSpec]
    rope: Mapping[str, tuple[Modality, str]] = field(default_factory=dict)
    bidirectional: Literal["none", "item", "prompt"] = "none"
    groups_ignore_window: bool = False
    deepstack: bool = False
    is_encoder: bool = False
    position_offset: int = 0
    starts_after_padding: bool = False
    has_state: bool = False
    groups_in_windows: bool = False
    groups_if: str = ""
    has_layer_inputs: bool = False
    placeholder_id: Literal["zero", "pad", "own"] = "zero"
    embed_tokens: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    correct_query: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def _qwen2_audio(core: Any, input_features: torch.Tensor, feature_attention_mask: Any) -> Any:
    """Qwen2-Audio has no feature method: masked tower, projector, the valid rows of each clip."""
    import torch
    from transformers.masking_utils import create_bidirectional_mask

    tower = core.audio_tower
    counts, lengths = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    num_frames = (input_features.shape[-1] - 2) // 2 + 1
    frames = torch.arange(num_frames, device=counts.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(len(input_features), num_frames, 1),
        attention_mask=(frames < counts[:, None]).long(),
    )
    hidden = tower(input_features, attention_mask=mask, return_dict=True).last_hidden_state
    projected = core.multi_modal_projector(hidden)
    return [rows[:length] for rows, length in zip(projected, lengths.tolist(), strict=True)]


def _llama4_temperature(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Llama 4 scales queries of layers without rope by the token's index in the call."""
    if module.use_rope or not module.attn_temperature_tuning:
        return query
    import torch

    def scale(index: torch.Tensor) -> torch.Tensor:
        steps = torch.floor((index.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    index = torch.arange(len(positions), device=positions.device)
    ratio = scale(positions) / scale(index)
    return (query * ratio[:, None, None]).to(query.dtype)


def _llama4_image(core: Any, pixel_values: torch.Tensor) -> Any:
    """Llama 4 projects outside of its feature method."""
    return core.multi_modal_projector(core.get_image_features(pixel_values).last_hidden_state)


def _video_llava_image(core: Any, pixel_values_images: torch.Tensor) -> Any:
    """Video-LLaVA's processor names the field otherwise than the feature method."""
    return core.get_image_features(pixel_values_images, return_dict=True).pooler_output


def _gemma4_audio(
    core: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor
) -> Any:
    """Gemma 4 leaves padding among its outputs and says which they are."""
    is_sound = input_features_mask.bool()
    found = core.get_audio_features(input_features, is_sound, return_dict=True)
    return [
        rows[mask] for rows, mask in zip(found.pooler_output, found.attention_mask, strict=True)
    ]


def _gemma3n_audio(
    core: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor
) -> Any:
    """Gemma 3n fills every clip up to the same number of rows with one learned row."""
    import torch

    is_padding = ~input_features_mask.bool()
    found = core.get_audio_features(input_features, is_padding, return_dict=True)
    rows, is_padding = found.pooler_output, found.audio_mel_mask
    last = torch.full((1, 1), core.vocab_size - 1, device=rows.device)
    filler = core.embed_audio(input_ids=last)
    rows = torch.where(is_padding[..., None], filler, rows)
    missing = core.config.audio_soft_tokens_per_image - rows.shape[1]
    return torch.cat([rows, filler.expand(len(rows), missing, -1)], dim=1)


def _gemma3n_tokens(core: Any, ids: torch.Tensor) -> torch.Tensor:
    """Gemma 3n embeds the marks beside images and sounds as it embeds those."""
    import torch

    embeds: torch.Tensor = core.get_input_embeddings()(ids.clamp(max=core.vocab_size - 1))
    for tower in (core.embed_vision, core.embed_audio):
        first = tower.vocab_offset
        is_own = (ids >= first) & (ids < first + tower.vocab_size)
        if ids.device.type != "cpu" or is_own.any():  # a device would have to be waited for
            own = tower(input_ids=torch.where(is_own, ids, first))
            embeds = torch.where(is_own[:, None], own.to(embeds.dtype), embeds)
    return embeds


def _ovis2_tokens(core: Any, ids: torch.Tensor) -> torch.Tensor:
    """Ovis 2 takes the marks around and between tiles from its table of visual words."""
    import torch

    embeds: torch.Tensor = core.get_input_embeddings()(ids)
    table = core.visual_embeddings_table.weight[-core.vision_tower.num_visual_indicator_tokens :]
    for mark, row in zip(core.visual_indicator_token_ids, table, strict=True):
        embeds = torch.where((ids == mark)[:, None], row.to(embeds.dtype), embeds)
    return embeds


CUSTOM_ENCODERS: dict[str, Callable[..., Any]] = {
    "gemma3n_audio": _gemma3n_audio,
    "gemma4_audio": _gemma4_audio,
    "llama4_image": _llama4_image,
    "qwen2_audio": _qwen2_audio,
    "video_llava_image": _video_llava_image,
}

_IMAGE = "get_image_features"
_PIXELS = Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values",))})
_CROPS_SPEC = EncoderSpec(_IMAGE, ("pixel_values",), ragged=("pixel_values",))
_CROPS = Adapter({"image": _CROPS_SPEC})
_GEMMA3 = Adapter(_PIXELS.encoders, bidirectional="item")
_FRAMES = EncoderSpec("get_video_features", ("pixel_values_videos",))
_SIZED = Adapter({"image": EncoderSpec(_IMAGE, ("pixel_values", "image_sizes"))})
_TILED = EncoderSpec(_IMAGE, ("pixel_values",), optional=("pixel_attention_mask",))
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
            f"get_{modality}_features", fields, batched=False, grid=fields[1], crops=True
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
    "deepseek_ocr2": Adapter(
        {
            "image": EncoderSpec(
                _IMAGE,
                ("pixel_values", "num_local_patches"),
                optional=("pixel_values_local",),
                ragged=("pixel_values_local",),
            )
        }
    ),
    "granite_docling": Adapter(
        {
            "image": EncoderSpec(
                _IMAGE, ("pixel_values", "pixel_attention_mask"), optional=("tile_fine_mask",)
            )
        },
        deepstack=True,
    ),
    "ovis2": replace(_CROPS, embed_tokens=_ovis2_tokens),
    "internvl": Adapter({"image": _CROPS_SPEC, "video": _CROPS_SPEC}),
    "llama4": Adapter(
        {"image": EncoderSpec("llama4_image", ("pixel_values",), ragged=("pixel_values",))},
        correct_query=_llama4_temperature,
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
    "gemma3": _GEMMA3,
    "gemma3n": Adapter(
        {
            "image": _PIXELS.encoders["image"],
            "audio": EncoderSpec("gemma3n_audio", ("input_features", "input_features_mask")),
        },
        has_layer_inputs=True,
        placeholder_id="own",
        embed_tokens=_gemma3n_tokens,
    ),
    "gemma4": replace(_GEMMA4, groups_in_windows=True, has_layer_inputs=True, placeholder_id="pad"),
    "gemma4_unified": _GEMMA4,
    "paligemma": Adapter(
        _PIXELS.encoders, bidirectional="prompt", groups_ignore_window=True, position_offset=1
    ),
    "voxtral": Adapter(
        {"audio": EncoderSpec("get_audio_features", ("input_features",), batched=False)}
    ),
    "audioflamingo3": _MASKED_SOUND,
    "fun_asr_nano": _MASKED_SOUND,
    "glmasr": _MASKED_SOUND,
    "qwen3_asr": _MASKED_SOUND,
    "qwen2_audio": Adapter(
        {"audio": EncoderSpec("qwen2_audio", ("input_features", "feature_attention_mask"))}
    ),
}

_ENCODER = Adapter({}, bidirectional="prompt", is_encoder=True)
_ROBERTA = replace(_ENCODER, starts_after_padding=True)

PLAIN_TEXT = Adapter({})
"""Other causal text models need nothing."""
TEXT_ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys(ENCODERS, _ENCODER),
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta"), _ROBERTA),
    "llama4_text": Adapter({}, correct_query=_llama4_temperature),
    **{kind: Adapter({}, has_layer_inputs=True) for kind in ("gemma3n_text", "gemma4_text")},
    **{
        kind: Adapter({}, has_state=True) for kind in ("lfm2", "lfm3", "qwen3_5_text", "qwen3_next")
    },
    "mistral4": PLAIN_TEXT,  # transformers lists it among the multimodal types
}
