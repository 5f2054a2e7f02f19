"""The largest items of a resource: those of the profile, as far as they hold for its limits.

Called by needs.py. A modality that is switched off has none and costs nothing. Limits below those
of the profile take the figures that it has for smaller ones; limits above them have no figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from foveal_runtime.plan.budget.types import Problem
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.profile import (
    SMALLER_FRAMES,
    SMALLER_PIXELS,
    ItemProfile,
    ModelProfile,
    ProfileLimits,
)

_FLAGS = {
    ("image", "pixels"): "--max-pixels",
    ("video", "pixels"): "--max-video-pixels",
    ("video", "frames"): "--max-frames",
    ("audio", "seconds"): "--max-audio-seconds",
}
_FIELDS = {"pixels": "maxPixels or resizeToPixels", "frames": "maxFrames", "seconds": "maxSeconds"}


class Items(NamedTuple):
    """`by_name`: modality → its largest item; what does not apply is a problem, what is a bound and
    not exact a note."""

    by_name: dict[str, ItemProfile]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def items_under(profile: ModelProfile, modalities: ModalitiesConfig) -> Items:
    """The largest item of each modality that the model has and the limits leave on."""
    found: dict[str, ItemProfile] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    if not profile.is_multimodal:
        return Items({}, (), ())
    asked = ProfileLimits.of(modalities)
    for name, item in sorted(profile.items.items()):
        if getattr(modalities, name).max_per_prompt == 0:
            continue
        found[name] = item
        if profile.limits is None:
            continue
        made, wanted = _limits(name, profile.limits), _limits(name, asked)
        larger = [what for what in made if wanted[what] > made[what]]
        if larger:
            problems.extend(_inapplicable(name, what, made, wanted) for what in larger)
            continue
        key = {"image": "pixels", "video": "frames"}.get(name)
        if key is not None and wanted[key] < made[key]:
            found[name] = item.at(int(wanted[key]))
        if wanted != made and not _is_exact(item, key, made, wanted):
            notes.append(
                f"the figures of {name} are upper bounds: the profile was made with larger limits "
                f"({', '.join(f'{what} {made[what]:.10g}' for what in made)})"
            )
    return Items(found, tuple(problems), tuple(notes))


def _limits(name: str, limits: ProfileLimits) -> dict[str, float]:
    if name == "image":
        return {"pixels": limits.image_pixels}
    if name == "video":
        return {"frames": limits.video_frames, "pixels": limits.video_pixels}
    return {"seconds": limits.audio_seconds}


def _is_exact(
    item: ItemProfile, key: str | None, made: Mapping[str, float], wanted: Mapping[str, float]
) -> bool:
    """Whether the profile has figures for this very limit, and no other limit differs."""
    if key is None or any(made[what] != wanted[what] for what in made if what != key):
        return False
    tried = {"pixels": SMALLER_PIXELS, "frames": SMALLER_FRAMES}[key]
    below = next((limit for limit in tried if limit <= wanted[key]), None)
    # Nothing between two limits with equal figures differs from them.
    return below is not None and item.at(below).num_embeds == item.at(int(wanted[key])).num_embeds


def _inapplicable(
    name: str, what: str, made: Mapping[str, float], wanted: Mapping[str, float]
) -> Problem:
    return Problem(
        reason="ProfileLimits",
        place="engine",
        term=name,
        needed=int(wanted[what]),
        available=int(made[what]),
        unit=what,
        detail=f"the profile was made for {name}s of at most {made[what]:.10g} {what} and "
        f"modalities.{name} ({_FIELDS[what]}) allows {wanted[what]:.10g}: its tokens, bytes and "
        f"activations of {name}s do not apply. Make the profile again with "
        f"{_FLAGS[name, what]} {wanted[what]:.10g}, or lower the limit to {made[what]:.10g}",
    )
