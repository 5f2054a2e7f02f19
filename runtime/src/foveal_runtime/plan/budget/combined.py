"""One combination of edits after which a resource fits, where no single edit is enough.

Called by planner.py. Tries what a person would do first and as little of it as possible: a shorter
context, smaller images, fewer frames, a modality off, fp8 KV, then more devices. The combination
is only given after the planner has accepted the resource that it makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from foveal_runtime.plan.budget.types import BudgetInputs, BudgetPlan, Edit
from foveal_runtime.plan.profile import ModelProfile

_LENGTHS = (65536, 32768, 16384, 8192, 4096)
_MAX_STEPS = 4
_DEVICES = (1, 2, 4, 8)


class KnobStep(NamedTuple):
    """One level of one knob: `edit` None leaves it as it is."""

    edit: Edit | None
    put: Callable[[BudgetInputs], BudgetInputs]


_AS_IS = KnobStep(None, lambda inputs: inputs)


def combine(
    inputs: BudgetInputs, profile: ModelProfile, planner: Callable[[BudgetInputs], BudgetPlan]
) -> tuple[Edit, ...]:
    """The edits of the smallest combination that fits; empty when there is none.

    Problems of frontends have edits of their own and do not count.
    """
    base = msgspec.structs.replace(inputs, on_misfit="Block")

    def fits(candidate: BudgetInputs) -> bool:
        return all(p.place == "frontend" for p in planner(candidate).problems)

    knobs = [_contexts(base, profile), *_media(base, profile), _kv_types(base)]
    levels = list(itertools.product(*(range(len(steps)) for steps in knobs)))
    levels.sort(key=lambda chosen: (sum(level > 0 for level in chosen), sum(chosen), chosen))
    for devices in _devices(base, profile):
        for chosen in levels:
            steps = [knob[level] for knob, level in zip(knobs, chosen, strict=True)]
            candidate = base
            for step in (*steps, devices):
                candidate = step.put(candidate)
            if fits(candidate):
                return tuple(one.edit for one in (*steps, devices) if one.edit is not None)
    return ()


def with_engine(inputs: BudgetInputs, **changes: object) -> BudgetInputs:
    """The inputs with other fields of the engine."""
    return msgspec.structs.replace(inputs, engine=msgspec.structs.replace(inputs.engine, **changes))


def limited(inputs: BudgetInputs, modality: str, **changes: object) -> BudgetInputs:
    """The inputs with other limits on one modality."""
    limits = msgspec.structs.replace(getattr(inputs.modalities, modality), **changes)
    modalities = msgspec.structs.replace(inputs.modalities, **{modality: limits})
    return msgspec.structs.replace(inputs, modalities=modalities)


def _contexts(inputs: BudgetInputs, profile: ModelProfile) -> list[KnobStep]:
    now = inputs.engine.max_model_len or profile.max_model_len
    lengths = [profile.max_model_len] if now > profile.max_model_len else []
    lengths += [one for one in _LENGTHS if one < min(now, profile.max_model_len)]
    return [
        _AS_IS,
        *(
            KnobStep(
                Edit(field="engine.maxModelLen", before=str(now), after=str(length)),
                lambda old, length=length: with_engine(old, max_model_len=length),  # type: ignore[misc]
            )
            for length in lengths
        ),
    ]


def _media(inputs: BudgetInputs, profile: ModelProfile) -> Iterator[list[KnobStep]]:
    for name in ("image", "video", "audio"):
        limits = getattr(inputs.modalities, name)
        if name in profile.items and limits.max_per_prompt > 0:
            steps = [*media_steps(inputs, profile, name)]
            yield [_AS_IS, *steps]


def media_steps(inputs: BudgetInputs, profile: ModelProfile, name: str) -> Iterator[KnobStep]:
    """Smaller images or fewer frames as the profile has figures for, then the modality off."""
    limits, item = getattr(inputs.modalities, name), profile.items[name]
    field, attribute, now = {
        "image": ("resizeToPixels", "resize_pixels", limits.processed_pixels),
        "video": ("maxFrames", "max_frames", limits.max_frames),
        "audio": ("maxSeconds", "max_seconds", limits.max_seconds),
    }[name]
    made = profile.limits
    top = [] if made is None or name == "audio" else [
        made.image_pixels if name == "image" else made.video_frames
    ]  # fmt: skip
    for limit in [*top, *(one.limit for one in item.smaller)][: _MAX_STEPS + len(top)]:
        if limit < now:
            yield KnobStep(
                Edit(field=f"modalities.{name}.{field}", before=f"{now:g}" if name == "audio"
                     else str(now), after=str(limit)),
                lambda old, limit=limit: limited(old, name, **{attribute: limit}),  # type: ignore[misc]
            )  # fmt: skip
    yield KnobStep(
        Edit(
            field=f"modalities.{name}.maxPerPrompt",
            before=str(limits.max_per_prompt),
            after="0",
            note=f"switches {name} off",
        ),
        lambda old: limited(old, name, max_per_prompt=0),
    )


def _kv_types(inputs: BudgetInputs) -> list[KnobStep]:
    return [_AS_IS, *kv_steps(inputs)]


def kv_steps(inputs: BudgetInputs) -> Iterator[KnobStep]:
    """fp8 keys and values, where the engine is on a GPU and has others."""
    if inputs.engine.device == "gpu" and inputs.engine.kv_dtype != "fp8":
        yield KnobStep(
            Edit(field="caches.kv.dtype", before=inputs.engine.kv_dtype, after="fp8",
                 note="compute capability 8.9 or higher"),
            lambda old: with_engine(old, kv_dtype="fp8"),
        )  # fmt: skip


def _devices(inputs: BudgetInputs, profile: ModelProfile) -> list[KnobStep]:
    return [_AS_IS, *device_steps(inputs, profile)]


def device_steps(inputs: BudgetInputs, profile: ModelProfile) -> Iterator[KnobStep]:
    """More devices, of a number that can share the model's heads; also fewer, when the present
    number cannot."""
    engine = inputs.engine
    if engine.device != "gpu":
        return
    possible = profile.possible_ranks() or _DEVICES
    is_refused = bool(profile.possible_ranks()) and engine.num_devices not in possible
    for count in _DEVICES:
        if count in possible and (is_refused or count > engine.num_devices):
            yield KnobStep(
                Edit(field=engine.devices_field, before=str(engine.num_devices), after=str(count),
                     note="tensor parallelism over them" if count > 1 else ""),
                lambda old, count=count: with_engine(old, num_devices=count),  # type: ignore[misc]
            )  # fmt: skip
