"""The largest item of each modality that a processor can make under the set limits.

Called once per profile (and by an engine that starts without one), never per request. Sizes are
searched with the processor's own arithmetic where it has some; the winner then goes through the
real path, so counts and bytes are those of a request. Items longer than the model's context do
not count: no request can hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from foveal_runtime.frontend.media.processors import ItemProcessor
from foveal_runtime.frontend.media.timed import Frames
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.plan.profile import (
    MAX_PROBE_PIXELS,
    SMALLER_FRAMES,
    SMALLER_PIXELS,
    VIDEO_PROBE_FRAMES,
    ItemProfile,
    SmallerItem,
)
from foveal_runtime.wire.item import meta_of, read_header

AUDIO_STRIDE = 2
"""Spectrum frames for each position of an audio encoder, which halves them at its start."""
_CONVOLVED = 16
"""Side of a square of pixels: its activations in the first stages, half the side with 64 channels
three times over, are less than half of what the formula takes for a patch."""
_FACTORS = (14, 16, 28, 32)
_RATIOS = (1, 4 / 3, 3 / 2, 16 / 9, 2, 3, 4, 6)
_MAX_RATIO = 200  # what the widest-minded processors take
_MAX_TRIES = 6
_PROBE_COLOR = (120, 60, 200)  # nothing a processor takes for padding


class Largest(NamedTuple):
    """An item's figures, its serialised value (of a shorter probe for video and audio), and the
    sizes that the processor itself keeps to."""

    profile: ItemProfile
    value: bytes
    options: Mapping[str, int] = MappingProxyType({})


def largest_items(
    model_path: str, limits: ModalitiesConfig, max_tokens: int, *, with_smaller: bool = True
) -> dict[str, Largest]:
    """Modality → its largest item, for every modality the processor takes and limits leave on.

    `max_tokens`: the model's context, which an answer shares. `with_smaller`: and those under
    smaller limits. Raises StartupError when the processor cannot be loaded.
    """
    processor = ItemProcessor(model_path, limits)
    processor.examine(b"")
    # Options of a request can take an image out of its short form: budgets count the long one.
    processor.codebooks = None
    finders: dict[int, Callable[..., Largest | None]] = {0: _image, 1: _video, 2: _audio}
    patch = _patch_pixels(model_path)
    found: dict[str, Largest] = {}
    for modality, info in sorted(processor.placeholders.items()):
        if info.method:
            name = MODALITIES[modality]

            def find(
                one: ModalityLimits, finder: Callable[..., Largest | None] = finders[modality]
            ) -> Largest | None:
                made = finder(processor, one, max_tokens - 1)
                return made and made._replace(profile=_with_patches(made, patch))

            largest = find(getattr(limits, name))
            if largest is not None:
                steps: tuple[SmallerItem, ...] = ()
                if with_smaller:
                    steps = _smaller(name, getattr(limits, name), largest.profile, find)
                found[name] = largest._replace(
                    profile=msgspec.structs.replace(largest.profile, smaller=steps),
                    options=_options(processor.processor, name),
                )
    return found


def _smaller(
    name: str,
    limits: ModalityLimits,
    largest: ItemProfile,
    find: Callable[[ModalityLimits], Largest | None],
) -> tuple[SmallerItem, ...]:
    """The largest items under smaller limits, until limits no longer matter."""
    if name == "audio":
        return ()
    replace = msgspec.structs.replace
    if name == "image":
        tried = [(pixels, replace(limits, max_pixels=pixels, resize_pixels=0))
                 for pixels in SMALLER_PIXELS if pixels < limits.processed_pixels]  # fmt: skip
    else:
        tried = [(frames, replace(limits, max_frames=frames))
                 for frames in SMALLER_FRAMES if frames < limits.max_frames]  # fmt: skip
    steps: list[SmallerItem] = []
    least = largest.num_embeds
    for limit, smaller in tried:
        made = find(smaller)
        if made is None:
            break
        if made.profile.num_embeds < least:
            one, least = made.profile, made.profile.num_embeds
            figures = (one.num_tokens, one.num_embeds, one.processed_bytes, one.num_patches)
            steps.append(SmallerItem(limit, *figures))
    return tuple(steps)


def _patch_pixels(model_path: str) -> int:
    """Pixels of a patch of the vision encoder, its family's default where config.json names none; 0
    when it has no patches. Of a tower of timm's, which is made of convolutions: pixels of as much
    memory as a patch would take."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            model_path, trust_remote_code=False, local_files_only=True
        )
    except Exception:  # of whatever type: each family reads its fields in its own way
        return 0  # what loads the model says what is wrong with it
    vision = getattr(getattr(config, "thinker_config", config), "vision_config", None)
    otherwise = _CONVOLVED if hasattr(vision, "architecture") else None
    size = getattr(vision, "patch_size", None) or otherwise or 0
    sides = size if isinstance(size, list | tuple) else [size, size]
    return math.prod(int(side) for side in sides)


def _with_patches(made: Largest, patch_pixels: int) -> ItemProfile:
    """The profile with the encoder's positions, counted in the tensors that reach it."""
    header = read_header(made.value)
    shapes = {field.name: field.shape for field in header.fields}
    patches = 0
    for name, shape in shapes.items():
        if name.startswith("pixel_values") and len(shape) in (2, 3):
            patches += math.prod(shape[:-1])  # cut into patches by the processor
        elif name.startswith("pixel_values") and len(shape) >= 4 and patch_pixels:
            patches += math.prod(shape) // shape[-3] // patch_pixels
        elif name == "input_features" and len(shape) >= 2:
            patches += math.prod(shape) // min(shape[-2:]) // AUDIO_STRIDE
    probe = max(1, meta_of(header).num_embeds)
    grown = -(-patches * made.profile.num_embeds // probe)
    return msgspec.structs.replace(made.profile, num_patches=grown)


def _options(processor: Any, name: str) -> dict[str, int]:
    """Sizes that the processor itself keeps to, e.g. {"image.longest_edge": 12845056}."""
    part = getattr(processor, f"{name}_processor", None)
    size = getattr(part, "size", None) or {}
    names = ("longest_edge", "shortest_edge", "height", "width", "max_pixels", "min_pixels")
    found = {}
    for option in names:
        value = size.get(option) if hasattr(size, "get") else getattr(size, option, None)
        if isinstance(value, int):
            found[f"{name}.{option}"] = value
    return found


def _image(processor: ItemProcessor, limits: ModalityLimits, max_tokens: int) -> Largest | None:
    sizes = list(_image_sizes(processor, limits.processed_pixels))
    counts = _predicted(processor, "image", sizes)
    if counts is None:
        sizes = sorted({_scaled(size) for size in _ratio_sizes(
            min(limits.processed_pixels, MAX_PROBE_PIXELS))})  # fmt: skip
        counts = [_tokens(_make_image(processor, size)) for size in sizes]
    best: Largest | None = None
    for size in _best_first(sizes, counts, max_tokens):
        value = _make_image(processor, size)
        if value is not None and _tokens(value) <= max_tokens:
            best = Largest(_profile(value, f"{size[1]}x{size[0]} pixels"), value)
            break
    return best


def _best_first(
    sizes: list[tuple[int, int]], counts: list[int], max_tokens: int
) -> Iterable[tuple[int, int]]:
    """(height, width) by descending tokens, the smallest image first; at most three tries."""
    order = sorted(zip(counts, sizes, strict=True), key=lambda p: (-p[0], p[1][0] * p[1][1]))
    tried = 0
    last = 0
    for count, size in order:
        if count <= max_tokens and count != last and tried < 3:
            tried, last = tried + 1, count
            yield size


def _image_sizes(processor: ItemProcessor, max_pixels: int) -> Iterator[tuple[int, int]]:
    """Candidates (height, width): whole grids of common patch sizes, common shapes, and where the
    family's rule counts tokens, the smallest sides that are rounded up to a whole grid."""
    part = processor.processor.image_processor
    for pixels in sorted({max_pixels, *_own_limits(part, max_pixels)}):
        for factor in _FACTORS:
            for rows in range(1, math.isqrt(pixels) // factor + 1):
                columns = pixels // (factor * factor * rows)
                if columns <= _MAX_RATIO * rows:
                    yield rows * factor, columns * factor
                    yield columns * factor, rows * factor
                short = rows * factor - factor // 2 + 1
                if processor.rule.count and pixels // short <= _MAX_RATIO * short:
                    yield short, pixels // short
                    yield pixels // short, short
        yield from _ratio_sizes(pixels)


def _own_limits(part: Any, max_pixels: int) -> set[int]:
    """Pixel counts at which the processor itself starts to shrink images."""
    size = getattr(part, "size", None) or {}
    found = {getattr(part, "max_pixels", None)}
    for name in ("longest_edge", "max_pixels", "shortest_edge", "height", "width"):
        side = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
        if isinstance(side, int):
            found |= {side, side * side}
    return {p for p in found if isinstance(p, int) and 784 <= p <= max_pixels}


def _ratio_sizes(pixels: int) -> Iterator[tuple[int, int]]:
    for scale in (1, 4, 16, 64):
        for ratio in _RATIOS:
            side = math.isqrt(int(pixels / scale / ratio))
            if side >= 32:
                long = min(int(side * ratio), pixels // scale // side)
                yield side, long
                yield long, side


def _scaled(size: tuple[int, int]) -> tuple[int, int]:
    shrink = min(1.0, math.sqrt(MAX_PROBE_PIXELS / (size[0] * size[1])))
    return max(1, int(size[0] * shrink)), max(1, int(size[1] * shrink))


def _predicted(processor: ItemProcessor, name: str, sizes: list[Any]) -> list[int] | None:
    """The processor's own count for each size, or None when it has no such arithmetic."""
    count = getattr(processor.processor, "_get_num_multimodal_tokens", None)
    own = processor.rule.count if name == "image" else None
    found: Any
    try:
        if own is not None:
            found = own(processor.processor, sizes)
        elif count is not None:
            data = count(**{f"{name}_sizes": [list(size) for size in sizes]})
            found = getattr(data, f"num_{name}_tokens", None)
        else:
            return None
    except Exception:  # private and uneven over families: without it, sizes are tried for real
        return None
    if not isinstance(found, list) or len(found) != len(sizes):
        return None
    return [int(n) for n in found]


def _make_image(processor: ItemProcessor, size: tuple[int, int]) -> bytes | None:
    try:
        return processor.process(0, Image.new("RGB", (size[1], size[0]), _PROBE_COLOR), {})
    except FovealError:
        return None  # e.g. too narrow for this processor: then no request can send it either


def _video(processor: ItemProcessor, limits: ModalityLimits, max_tokens: int) -> Largest | None:
    """The frames and frame size with most embeddings that fit the context.

    Counted by the processor's arithmetic when it has some, else in proportion to the frames of a
    probe. Marker tokens and bytes always grow from a probe of a few frames of the winning size.
    """
    own = _own_limits(processor.processor.video_processor, limits.processed_pixels)
    pixels = {min(limits.processed_pixels, MAX_PROBE_PIXELS), *own}
    sizes = sorted({_scaled(s) for p in pixels for s in _ratio_sizes(p)})
    sizes += _enlarged(processor.processor, limits.processed_pixels)
    shapes = [(n, *size) for n in _frame_counts(limits.max_frames) for size in sizes]
    counts = _predicted(processor, "video", shapes)
    if counts is None:
        frame = sizes[-1]
        if processor.rule.count:  # frames are cut as images are
            tried = list(_image_sizes(processor, max(pixels)))
            counted = processor.rule.count(processor.processor, tried)
            _, frame = max(zip(counted, tried, strict=True))
        shapes = [(n, *frame) for n in _frame_counts(limits.max_frames)]
        counts = _proportional(processor, shapes)
    ceiling = max_tokens
    for _ in range(_MAX_TRIES):
        fitting = [(c, s) for c, s in zip(counts, shapes, strict=True) if 0 < c <= ceiling]
        if not fitting:
            return None
        embeds, shape = max(fitting, key=lambda one: (one[0], -math.prod(one[1])))
        value = _make_video(processor, (min(VIDEO_PROBE_FRAMES, shape[0]), *shape[1:]))
        if value is not None:
            grown = _grown(value, embeds, f"{shape[0]} frames of {shape[2]}x{shape[1]} pixels")
            if grown.num_tokens <= max_tokens:
                return Largest(grown, value)
            ceiling = max_tokens * embeds // grown.num_tokens
        ceiling = min(ceiling, embeds - 1)
    return None


def _enlarged(processor: Any, pixels: int) -> list[tuple[int, int]]:
    """Frames of every height and of so many pixels, where those are fewer than the processor takes:
    it enlarges them, and sides are rounded up to a whole grid."""
    size = (getattr(processor, "videos_kwargs", None) or {}).get("size")
    size = size or getattr(processor.video_processor, "size", None) or {}
    if pixels >= (size.get("shortest_edge") or 0):
        return []
    heights = [n for n in range(1, math.isqrt(pixels) + 1) if pixels // n <= _MAX_RATIO * n]
    return [one for n in heights for one in ((n, pixels // n), (pixels // n, n))]


def _frame_counts(most: int) -> list[int]:
    """Every count to 64, then steps of 5 %, and the limit itself."""
    counts = list(range(1, min(64, most) + 1))
    while counts[-1] < most:
        counts.append(min(most, math.ceil(counts[-1] * 1.05)))
    return counts


def _proportional(processor: ItemProcessor, shapes: list[tuple[int, int, int]]) -> list[int]:
    frames = min(VIDEO_PROBE_FRAMES, shapes[-1][0])
    value = _make_video(processor, (frames, *shapes[-1][1:]))
    if value is None:
        return [0] * len(shapes)
    embeds = meta_of(read_header(value)).num_embeds
    return [-(-embeds * shape[0] // frames) for shape in shapes]


def _grown(value: bytes, embeds: int, example: str) -> ItemProfile:
    """The figures of a probe, grown to `embeds`."""
    probe = _profile(value, example)
    return ItemProfile(
        num_tokens=-(-probe.num_tokens * embeds // probe.num_embeds),
        num_embeds=embeds,
        processed_bytes=-(-probe.processed_bytes * embeds // probe.num_embeds),
        example=example,
    )


def _make_video(processor: ItemProcessor, shape: tuple[int, ...]) -> bytes | None:
    try:
        return processor.process(1, _frames(shape[0], (shape[1], shape[2])), {})
    except FovealError:
        return None


def _frames(count: int, size: tuple[int, int]) -> Frames:
    pixels = np.full((count, *size, 3), 120, np.uint8)
    return Frames(pixels, list(range(count)), count, 2.0)


def _audio(processor: ItemProcessor, limits: ModalityLimits, max_tokens: int) -> Largest | None:
    """The longest sound that fits limit and context; processors refuse what they cannot take."""
    extractor = getattr(processor.processor, "feature_extractor", None)
    rate = int(getattr(extractor, "sampling_rate", 0) or 16000)

    def make(seconds: float) -> bytes | None:
        sound = np.sin(np.arange(int(seconds * rate), dtype=np.float32) * 0.1) * 0.5
        try:
            return processor.process(2, sound.astype(np.float32), {})
        except FovealError:
            return None

    seconds = limits.max_seconds
    value = make(seconds)
    while (value is None or _tokens(value) > max_tokens) and seconds > 0.5:
        seconds /= 2
        value = make(seconds)
    if value is None:
        return None
    return Largest(_profile(value, f"{seconds:g} seconds"), value)


def _tokens(value: bytes | None) -> int:
    return 0 if value is None else len(read_header(value).replacement)


def _profile(value: bytes, example: str) -> ItemProfile:
    meta = meta_of(read_header(value))
    return ItemProfile(
        num_tokens=meta.num_tokens,
        num_embeds=meta.num_embeds,
        processed_bytes=len(value),
        example=example,
    )
