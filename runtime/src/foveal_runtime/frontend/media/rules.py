"""Rules of model families on the prompt side: placeholders, embed ids, unusual processors.

Read by `processors` in media workers, and by placement for newlines. A family without an entry
takes the default rule, which `processors.examine` then proves or refuses, so a new model needs an
entry only when it is odd.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from foveal_runtime.plan.errors import MediaInvalid

Method = Literal["offsets", "diff", "rule", ""]
Run = Callable[[Any, int, list[Any], str, dict[str, Any]], dict[str, Any]]
Count = Callable[[Any, Sequence[tuple[int, int]]], list[int]]

_NAMES = ("image", "video", "audio")
_COUNTED_BY = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")


class Placeholder(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    embed_token_id: int
    text: str


class FamilyRule(msgspec.Struct, frozen=True):
    """One family's differences.

    Attributes:
        embed_from: modality → whose token takes the encoder outputs ("image" for GLM-4V's videos),
            or "tokenizer" (Gemma 3 writes <start_of_image> and expands to <image_soft_token>), or
            the token itself.
        modalities: what the engine can serve of this family.
        methods: ways to find replacement ids, tried in order; () = the default order.
        several: False when a prompt with two items is not made of two items alone (LLaVA-OneVision
            drops the tiles of each image as soon as there are two).
        newlines: the replacement begins and ends with this many newlines, which belong to the
            prompt (see `surround`).
        wraps: modality → (before, after) that chat templates write around the placeholder, or names
            that the tokenizer has for them.
        numbered: modalities whose processor writes an item's number before it (see `numbers`).
        run: calls a processor that is not called like the others.
        is_told_rate: the processor takes `fps`, of the frames as they are sampled, for the times of
            a video, and a guess without it.
        trims_sounds: see `without_padding`.
        count: tokens of images (height, width), for processors that cannot say without making them.
    """

    embed_from: tuple[tuple[str, str], ...] = ()
    modalities: tuple[str, ...] = _NAMES
    methods: tuple[Method, ...] = ()
    prompt_rule: Literal["inline", "prefix"] = "inline"
    several: bool = True
    newlines: int = 0
    wraps: tuple[tuple[str, str, str], ...] = ()
    numbered: tuple[str, ...] = ()
    run: Run | None = None
    is_told_rate: bool = False
    trims_sounds: bool = False
    count: Count | None = None


def _run_voxtral(
    processor: Any, modality: int, media: list[Any], text: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Voxtral's processor takes whole conversations only; its features are made here directly.

    Samples are padded to whole 30 s windows; a window of 3,000 mel frames becomes 1,500 encoder
    positions, of which four make one embedding.
    """
    extractor = processor.feature_extractor
    settings = {**processor.audio_kwargs, **options}
    positions = int(settings.pop("max_source_positions", 3000))
    features = extractor(media[0], **settings)["input_features"]
    chunks = features.reshape(extractor.feature_size, -1, positions).transpose(0, 1)
    num_tokens = math.ceil(positions / 2 / 4) * int(chunks.shape[0])
    return {"input_ids": [[processor.audio_token_id] * num_tokens], "input_features": chunks}


def _count_lfm2(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """LFM2-VL rounds sides to the nearest whole token, and cuts large images into tiles, each with
    a marker, beside a small copy of the whole."""
    part = processor.image_processor
    grid = {
        name: getattr(part, name)
        for name in ("max_image_tokens", "encoder_patch_size", "downsample_factor")
    }
    tiling = {name: getattr(part, name) for name in ("min_tiles", "max_tiles", "tile_size")}
    is_tiled = part.do_image_splitting and not part.min_tiles == part.max_tiles == 1
    counts = []
    for height, width in sizes:
        wide, high = part.smart_resize(
            height, width, min_image_tokens=part.min_image_tokens, **grid
        )
        per_tile, whole = processor._get_image_num_tokens([high, wide])
        is_large = part._is_image_too_large(
            height, width, max_pixels_tolerance=part.max_pixels_tolerance, **grid
        )
        tiles = part._get_grid_layout(height, width, **tiling)[-1] if is_tiled and is_large else 1
        if tiles > 1:
            copy = whole + 1 if part.use_thumbnail else 0
            counts.append(tiles * (per_tile + 1) + copy + 2)
        else:
            counts.append(whole + 2)
    return counts


def _count_minicpm(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """MiniCPM-V makes a small copy of the whole, and slices of large images; each is between two
    marks, and a newline between two rows of slices."""
    part = processor.image_processor
    common = (part.scale_resolution, part.patch_size, part.downsample_mode)
    per_token = part.patch_size**2 * int(part.downsample_mode.removesuffix("x"))
    counts = []
    for size in sizes:
        grid = None
        if part.slice_mode:
            grid = part.get_sliced_grid(size, part.max_slice_nums, part.scale_resolution)
        count = math.prod(part.find_best_resize(size, *common, grid is None)) // per_token + 2
        if grid is not None:
            num_slices = math.prod(grid)
            inside = math.prod(part.get_refine_size(size, grid, *common, True)) // per_token
            count += inside + 2 * num_slices + grid[0] - 1
        counts.append(count)
    return counts


_MINICPM = FamilyRule(numbered=("image", "video"), count=_count_minicpm)
_QWEN = tuple((name, "<|vision_start|>", "<|vision_end|>") for name in ("image", "video"))
_OMNI = FamilyRule(
    wraps=(
        ("image", "vision_bos_token", "vision_eos_token"),
        ("video", "vision_bos_token", "vision_eos_token"),
        ("audio", "audio_bos_token", "audio_eos_token"),
    ),
    is_told_rate=True,
    trims_sounds=True,
)
_GLM = (
    ("image", "<|begin_of_image|>", "<|end_of_image|>"),
    ("video", "<|begin_of_video|>", "<|end_of_video|>"),
)

_RULES: dict[str, FamilyRule] = {
    "gemma3": FamilyRule(embed_from=(("image", "tokenizer"),), modalities=("image",), newlines=2),
    "gemma3n": FamilyRule(modalities=("image", "audio"), newlines=2),
    "ovis2": FamilyRule(embed_from=(("image", "<IMG_ATOM>"),)),
    "paligemma": FamilyRule(modalities=("image",), prompt_rule="prefix"),
    "glm4v": FamilyRule(embed_from=(("video", "image"),), wraps=_GLM),
    "glm4v_moe": FamilyRule(embed_from=(("video", "image"),), wraps=_GLM),
    "glm46v": FamilyRule(embed_from=(("video", "image"),), wraps=_GLM),
    "glmga": FamilyRule(embed_from=(("video", "image"),), wraps=_GLM),
    "glm_ocr": FamilyRule(embed_from=(("video", "image"),), wraps=_GLM),
    "qwen2_vl": FamilyRule(wraps=_QWEN),
    "qwen2_5_vl": FamilyRule(wraps=_QWEN),
    "qwen3_vl": FamilyRule(wraps=_QWEN),
    "qwen3_vl_moe": FamilyRule(wraps=_QWEN),
    "qwen2_5_omni": _OMNI,
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": msgspec.structs.replace(_MINICPM, numbered=("image",)),
    "qwen2_audio": FamilyRule(wraps=(("audio", "<|audio_bos|>", "<|audio_eos|>"),)),
    "hunyuan_vl": FamilyRule(wraps=(("image", "image_start_token", "image_end_token"),)),
    "internvl": FamilyRule(embed_from=(("video", "image"),), modalities=("image",)),
    "lfm2_vl": FamilyRule(modalities=("image",), count=_count_lfm2),
    "llava_onevision": FamilyRule(several=False, modalities=("image",)),
    "smolvlm": FamilyRule(modalities=("image",)),
    "voxtral": FamilyRule(modalities=("audio",), methods=("rule",), run=_run_voxtral),
}


def rule_for(model_type: str) -> FamilyRule:
    return _RULES.get(model_type, FamilyRule())


def methods_of(processor: Any) -> tuple[Method, ...]:
    """Ways this processor offers, best first. Older releases cannot name replacements."""
    from transformers.processing_utils import ProcessorMixin

    overrides = any(
        getattr(type(processor), f"replace_{name}_token", None)
        is not getattr(ProcessorMixin, f"replace_{name}_token", None)
        for name in _NAMES
    )
    return ("offsets", "diff") if overrides else ("diff",)


def placeholder(rule: FamilyRule, processor: Any, modality: int) -> Placeholder | None:
    """The placeholder of a modality, or None when processor or rule has none."""
    name = _NAMES[modality]
    parts = {
        "image": ("image_processor",),
        "video": ("video_processor",),
        "audio": ("feature_extractor", "audio_processor"),
    }[name]
    if name not in rule.modalities or not any(getattr(processor, p, None) for p in parts):
        return None
    token = _text(getattr(processor, f"{name}_token", None))
    if not token:
        return None
    tokenizer = processor.tokenizer
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == getattr(tokenizer, "unk_token_id", None):
        return None
    source = dict(rule.embed_from).get(name, name)
    if source == "tokenizer":
        embed_id = tokenizer.image_token_id
    elif source == name:
        embed_id = token_id
    elif source in _NAMES:
        embed_id = getattr(processor, f"{source}_token_id", None)
    else:
        embed_id = tokenizer.convert_tokens_to_ids(source)
    around = next(((b, a) for n, b, a in rule.wraps if n == name), ("", ""))
    before, after = (getattr(tokenizer, one, one) for one in around)
    return Placeholder(
        token, int(token_id), int(token_id if embed_id is None else embed_id),
        f"{before}{token}{after}",
    )  # fmt: skip


def _text(token: Any) -> str:
    return str(getattr(token, "content", token) or "")


def probe_text(item: str, count: int) -> str:
    """A prompt with `count` items, as a chat template writes them, amid ordinary text."""
    return "What\n" + "".join(f"{item}\nitem {i} is here. " for i in range(count)) + "What is it?"


def final_text(rule: FamilyRule, processor: Any, text: str) -> str:
    """The unexpanded prompt as the processor would complete it (PaliGemma: BOS and newline)."""
    if rule.newlines:
        around = "\n" * rule.newlines
        for name in rule.modalities:
            token = _text(getattr(processor, f"{name}_token", None))
            text = text.replace(token, f"{around}{token}{around}")
        return text
    if rule.prompt_rule != "prefix":
        return text
    token = processor.image_token
    end = text.rfind(token) + len(token)
    bos = getattr(processor.tokenizer, "bos_token", "") or ""
    return f"{text[:end]}{bos}{text[end:]}\n"


def strip_newlines(text: str, count: int) -> str:
    """The replacement without the newlines that belong to the prompt."""
    around = "\n" * count
    if count == 0:
        return text
    if not (text.startswith(around) and text.endswith(around)):
        # Gemma 3's pan-and-scan puts a sentence first.
        raise MediaInvalid("do_pan_and_scan is not supported")
    return text[count:-count]


def without_padding(output: dict[str, Any]) -> dict[str, Any]:
    """The output with no more of a sound than is heard: Qwen2.5-Omni fills each one up to five
    minutes, 15 MB, which its encoder leaves out by the mask."""
    mask = output.get("feature_attention_mask")
    if mask is None:
        return output
    count = int(mask.sum(-1).max())
    cut = {"feature_attention_mask": mask[:, :count]}
    return output | cut | {"input_features": output["input_features"][..., :count]}


def complete(processor: Any, folder: Path) -> None:
    """What LLaVA's processors count tokens by, where releases of transformers that left it to
    config.json wrote the checkpoint. Raises whatever a damaged checkpoint makes transformers raise.
    """
    if not hasattr(processor, "num_additional_image_tokens"):
        return
    path = folder / "processor_config.json"
    saved = json.loads(path.read_bytes()) if path.is_file() else {}
    if all(saved.get(name) is not None for name in _COUNTED_BY):
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    has_class_token = config.vision_config.model_type == "clip_vision_model"
    chosen = getattr(config, "vision_feature_select_strategy", None) or "default"
    values = (config.vision_config.patch_size, chosen, int(has_class_token))
    for name, value in zip(_COUNTED_BY, values, strict=True):
        if saved.get(name) is None:
            setattr(processor, name, value)


@lru_cache(maxsize=16)
def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokens of a text alone. Images of one size expand to the same text."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])


def newline_ids(tokenizer: Any) -> tuple[int, ...]:
    """The token of n newlines for n = 1, 2, ... as long as there is one."""
    found: list[int] = []
    for count in range(1, 64):
        ids = plain_ids(tokenizer, "\n" * count)
        if len(ids) != 1 or ids[0] in found:
            break
        found.append(ids[0])
    return tuple(found)


def audio_lengths(extractor: Any) -> list[int]:
    """Samples at which a feature extractor may cut off audio, as it is made or called by itself."""
    called = inspect.signature(type(extractor).__call__).parameters.get("max_length")
    found = (getattr(extractor, "n_samples", None), called.default if called else None)
    return sorted({count for count in found if isinstance(count, int) and count > 0})


def numbers(
    rule: FamilyRule, processor: Any, modality: int, count: int
) -> tuple[tuple[int, ...], ...]:
    """What `number` writes before the first `count` items of a modality; () = nothing."""
    if _NAMES[modality] not in rule.numbered or not processor.default_use_image_id:
        return ()
    before, after = processor.image_id_start_token, processor.image_id_end_token
    return tuple(plain_ids(processor.tokenizer, f"{before}{k}{after}") for k in range(count))


def number(token_ids: Sequence[int], table: Mapping[int, Sequence[Sequence[int]]]) -> list[int]:
    """Adds its ids of the table before the k-th of each placeholder.

    MiniCPM-V writes <image_id>0</image_id> before the first image of a prompt. An item's
    replacement must not depend on its place, so those tokens belong to the prompt, not to the item.
    """
    left = {token: iter(rows) for token, rows in table.items()}
    out: list[int] = []
    for token in token_ids:
        if token in left:
            out.extend(next(left[token], ()))
        out.append(token)
    return out


def surround(
    token_ids: Sequence[int], placeholders: Collection[int], run_ids: Sequence[int], count: int
) -> list[int]:
    """Adds `count` newlines on both sides of each placeholder, merged with their neighbours as the
    tokenizer would merge them.

    Gemma 3 and 3n write every item between blank lines, and its tokenizer has one token per run of
    newlines: "user\\n" before an image becomes one token of three newlines. An item's replacement
    must not depend on its neighbours, so those newlines belong to the prompt, not to the item.
    `run_ids[n - 1]` is the token of n newlines; runs longer than the table take several tokens.
    """
    lengths = {token: n for n, token in enumerate(run_ids, start=1)}
    out: list[int] = []
    run: list[int] = []
    extra = 0
    for token in token_ids:
        if token in lengths:
            run.append(token)
            continue
        is_item = token in placeholders
        _write_newlines(out, run, extra + (count if is_item else 0), lengths, run_ids)
        out.append(token)
        run, extra = [], count if is_item else 0
    _write_newlines(out, run, extra, lengths, run_ids)
    return out


def _write_newlines(
    out: list[int], run: list[int], extra: int, lengths: dict[int, int], run_ids: Sequence[int]
) -> None:
    """A run of newlines, as it was unless some are added."""
    if not extra:
        out.extend(run)
        return
    left = extra + sum(lengths[token] for token in run)
    while left:
        length = min(left, len(run_ids))
        out.append(run_ids[length - 1])
        left -= length
