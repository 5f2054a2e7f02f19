"""The processor options that a request may set, checked before anything is decoded.

Used by `processors` in media workers. A processor takes names it does not know without a word, and
some options decide how much work and memory an item costs: those may only make an item smaller than
the model's own processor would. `by_modality` is used before that, where a request's options become
those of its items.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from foveal_runtime.frontend.media.sampling import SAMPLING, sampling_options
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import InvalidRequest

FIELD = "mm_processor_kwargs"
MAX_FPS = 240
_SIZING = re.compile(
    r"size|edge|pixel|resize|crop|pad|patch|tile|split|slice|frame|scale|downsample|length|token|"
    r"pan_and_scan"
)
_MODEL = re.compile(
    r"patch_size|merge_size|kernel_size|tile_size|max_image_size|downsample|pinpoints|positions"
    r"|sampling_rate|data_format|fine_route"
)
"""What the model's weights, and its code, take for granted: with another patch or grid an encoder
sees a jumbled image, and says nothing."""
_INTERLEAVING = ("use_audio_in_video", "load_audio_from_video", "seconds_per_chunk",
                 "position_id_per_seconds")  # fmt: skip
"""Of videos with their sound, whose embeddings stand among those of the frames."""
_GROUPS = ("images_kwargs", "videos_kwargs", "audio_kwargs")
_PARTS = ("image_processor", "video_processor", "feature_extractor")


def known_options(processor: Any, modality: int) -> frozenset[str]:
    """Every name that this processor takes for the modality."""
    names = {"do_sample_frames"} if modality == 1 else set()
    part = getattr(processor, _PARTS[modality], None)
    kinds = [getattr(part, "valid_kwargs", None)]
    declared = getattr(processor, "valid_processor_kwargs", None)
    kinds.append(_hints(declared).get(_GROUPS[modality]))
    for kind in kinds:
        names |= set(_hints(kind))
    for called in ("preprocess", "__call__"):
        names |= _parameters(getattr(type(part), called, None))
    if modality == 1 and part is not None:
        names = names.difference(SAMPLING) | sampling_options(part)
    return frozenset(names)


def by_modality(
    options: Mapping[str, Any], modalities: Collection[int], known: Sequence[Collection[str]]
) -> dict[int, dict[str, Any]]:
    """What of a request's options the items of each of its modalities get: those that its processor
    knows, also from a group such as `videos_kwargs`, and those that no modality of the request
    knows, for `check` to refuse. `known`: `known_options` of each modality, or nothing."""
    taken = {name for modality in modalities for name in (known[modality] if known else ())}
    groups = {
        name: value
        for modality in modalities
        if isinstance(value := options.get(name := _GROUPS[modality]), Mapping)
    }
    found: dict[int, dict[str, Any]] = {}
    for modality in modalities:
        own = known[modality] if known else ()
        found[modality] = {
            name: value
            for name, value in options.items()
            if name not in groups and (name in own or name not in taken)
        } | dict(groups.get(_GROUPS[modality], {}))
    return found


def check(
    processor: Any,
    modality: int,
    options: Mapping[str, Any],
    limits: ModalityLimits,
    reserved: frozenset[str],
) -> None:
    """Raises InvalidRequest naming the first option that is unknown, wrong or too much."""
    if not options:
        return
    known = known_options(processor, modality)
    defaults = _defaults(getattr(processor, _PARTS[modality], None))
    defaults |= getattr(processor, _GROUPS[modality], None) or {}  # which it calls its part with
    for name, value in options.items():
        if name in reserved:
            raise _refused(name, "cannot be set by a request")
        if name in _GROUPS and name not in known:
            raise _refused(name, "must be an object with options of media that the request has")
        if name not in known:
            raise _refused(name, "is not an option of this model's processor")
        if name in _INTERLEAVING:
            if value:
                raise _refused(name, "is not supported: send a video's sound as a part of its own")
            continue
        if _MODEL.search(name) or _is_exact(defaults.get(name)):
            if value is not None and value != defaults.get(name):
                raise _refused(name, f"is the model's own: it is {defaults.get(name)!r}")
        elif name in ("num_frames", "fps"):
            most = limits.max_frames if name == "num_frames" else MAX_FPS
            if value is not None and (not _is_number(value) or not 0 < value <= most):
                raise _refused(name, f"must be a number above 0 and at most {most}")
        elif _SIZING.search(name):
            _check_size(name, value, defaults.get(name))


def _is_exact(default: Any) -> bool:
    """Height and width are what the encoder takes, the lengths of edges a limit."""
    return isinstance(default, Mapping) and default.keys() == {"height", "width"}


def _check_size(name: str, value: Any, default: Any) -> None:
    if value is None or value == default:
        return
    if isinstance(value, bool) or isinstance(default, bool) or default is None:
        raise _refused(name, f"changes how large an item becomes; here it is {default!r}")
    shape = isinstance(value, Mapping) and isinstance(default, Mapping)
    if shape and set(value) != set(default):
        raise _refused(name, f"must have the keys {', '.join(sorted(default))}")
    given, most = list(_numbers(value)), list(_numbers(default))
    if not given or not most or any(not 0 < number <= max(most) for number in given):
        raise _refused(name, f"must be positive and at most the model's own {default!r}")


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name} {why}", param=f"{FIELD}.{name}")


def _hints(kind: Any) -> dict[str, Any]:
    if kind is None:
        return {}
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError):  # names that only a type checker imports
        return dict(getattr(kind, "__annotations__", {}))


def _parameters(function: Any) -> set[str]:
    """Those that it names."""
    if function is None:
        return set()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return {one.name for one in found if one.kind in kinds} - {"self"}


def _defaults(part: Any) -> dict[str, Any]:
    if part is None:
        return {}
    found = part.to_dict() if hasattr(part, "to_dict") else {}
    return {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[float]:
    """All numbers of an option; a value of any other kind counts as no number at all."""
    if isinstance(value, Mapping):
        value = [number for number in value.values() if number is not None]
    for one in value if isinstance(value, list | tuple) else [value]:
        yield float(one) if _is_number(one) else -1.0
