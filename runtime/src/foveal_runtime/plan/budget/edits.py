"""The smallest edits of a resource that remove a problem, each proven by planning again.

Called by planner.py when something does not fit. An edit is only suggested after the planner has
accepted the resource that it would give, so following the advice never ends in the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from foveal_runtime.plan.budget.combined import (
    KnobStep,
    device_steps,
    kv_steps,
    media_steps,
    with_engine,
)
from foveal_runtime.plan.budget.items import items_under
from foveal_runtime.plan.budget.types import BudgetInputs, BudgetPlan, Edit, Problem
from foveal_runtime.plan.config import MIB
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import format_bytes

Planner = Callable[[BudgetInputs], BudgetPlan]
NUM_EDITS = 2
_SEARCH_MAX = 1 << 62
_USEFUL_LENGTH = 4096
"""No shorter context is suggested to save memory, nor one below the largest item."""


class _Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One field that could change: towards `end`, in steps of `granule`."""

    field: str
    before: int
    end: int
    put: Callable[[int], BudgetInputs]
    granule: int = 1
    is_bytes: bool = False
    note: str = ""


def suggest(
    problem: Problem, inputs: BudgetInputs, profile: ModelProfile, planner: Planner
) -> tuple[Edit, ...]:
    """At most two single edits that remove the problem, what a person would do first in front; none
    when no single edit helps."""
    base = msgspec.structs.replace(inputs, on_misfit="Block")
    known = {_key(p) for p in planner(base).problems}

    def helps(candidate: BudgetInputs) -> bool:
        left = {_key(p) for p in planner(candidate).problems}
        return _key(problem) not in left and left <= known

    found: list[tuple[int, float, Edit]] = []
    for knob in _knobs(problem, base, profile):
        value = _nearest(knob, helps)
        if value is None:
            continue
        before, after = _text(knob, knob.before), _text(knob, value)
        change = abs(value - knob.before) / max(1, knob.before)
        edit = Edit(field=knob.field, before=before, after=after, note=knob.note)
        found.append((_rank(edit), change, edit))
    stepped: set[str] = set()  # of each field the first step that helps, which is the smallest
    for edit, candidate in _switches(problem, base, profile):
        if edit.field not in stepped and helps(candidate):
            found.append((_rank(edit), 1.0, edit))
            stepped.add(edit.field)
    found.sort(key=lambda one: one[:2])
    return tuple(edit for *_, edit in found[:NUM_EDITS])


_LATER = (
    "engine.maxModelLen", "modalities.image.", "modalities.video.", "modalities.audio.",
    "caches.kv.dtype", "engine.maxNumBatchedTokens", "engine.accelerator.count",
    "engine.parallelism.tensor", "engine.accelerator.memory",
)  # fmt: skip
"""After what the user pinned: the order in which a person would change what is left."""


def _rank(edit: Edit) -> int:
    for place, prefix in enumerate(_LATER, 1):
        if edit.field.startswith(prefix):
            return place
    return 0


def _key(problem: Problem) -> tuple[str, str, str]:
    # The term that overflows may change while a limit stays too small; a modality may not.
    return problem.reason, problem.place, problem.term if "Context" in problem.reason else ""


def _text(knob: _Knob, value: int) -> str:
    return format_bytes(value) if knob.is_bytes else str(value)


def _nearest(knob: _Knob, helps: Callable[[BudgetInputs], bool]) -> int | None:
    """The value nearest to `before` that helps: doubling steps, then bisection."""
    sign = 1 if knob.end > knob.before else -1
    steps_max = abs(knob.end - knob.before) // knob.granule
    # Aligned values read better: 9Gi, not 9663680512.
    start = knob.before // knob.granule if sign > 0 else -(-knob.before // knob.granule)

    def at(step: int) -> int:
        return (start + sign * step) * knob.granule

    step = 1
    while step < steps_max and not helps(knob.put(at(step))):
        step *= 2
    high = min(step, steps_max)
    if high < 1 or not helps(knob.put(at(high))):
        return None
    low = step // 2
    while high - low > 1:
        middle = (low + high) // 2
        if helps(knob.put(at(middle))):
            high = middle
        else:
            low = middle
    return at(high)


def _knobs(problem: Problem, inputs: BudgetInputs, profile: ModelProfile) -> Iterator[_Knob]:
    engine = inputs.engine
    if problem.place == "frontend":
        yield from _frontend_knobs(problem, inputs)
    else:
        yield from _host_knobs(problem, inputs)
        yield from _compute_knobs(problem, inputs, profile)
    if problem.reason.endswith("Memory") and problem.reason != "NodeMemory":
        yield _Knob(
            field="caches.headroomPercent",
            before=inputs.headroom_percent,
            end=min(5, inputs.headroom_percent),
            put=lambda v: msgspec.structs.replace(inputs, headroom_percent=v),
        )
    if problem.place == "device":
        yield _Knob(
            field="engine.accelerator.memory",
            before=engine.device_bytes,
            end=_SEARCH_MAX,
            granule=256 * MIB,
            is_bytes=True,
            put=lambda v: with_engine(inputs, device_bytes=v),
            note="a device with this much memory",
        )


def _frontend(inputs: BudgetInputs, **changes: object) -> BudgetInputs:
    return msgspec.structs.replace(
        inputs, frontend=msgspec.structs.replace(inputs.frontend, **changes)
    )


def _limit(field: str, before: int, node: int, put: Callable[[int], BudgetInputs]) -> _Knob:
    """A pod's limit: up when it is too small, down when it exceeds every node."""
    end = node if 0 < node < before else (node or _SEARCH_MAX)
    return _Knob(field=field, before=before, end=end, granule=MIB, is_bytes=True, put=put)


def _size(field: str, before: int | None, put: Callable[[int], BudgetInputs]) -> Iterator[_Knob]:
    if before:
        yield _Knob(field=field, before=before, end=0, granule=MIB, is_bytes=True, put=put)


def _frontend_knobs(problem: Problem, inputs: BudgetInputs) -> Iterator[_Knob]:
    f = inputs.frontend
    if f.limit_bytes is not None:
        yield _limit(
            "frontend.hostMemory",
            f.limit_bytes,
            inputs.node_bytes,
            lambda v: _frontend(inputs, limit_bytes=v),
        )
    yield from _size(
        "caches.processor.size", f.processor_bytes, lambda v: _frontend(inputs, processor_bytes=v)
    )
    if f.processes > 1:
        yield _Knob(
            field="frontend.processes",
            before=f.processes,
            end=1,
            put=lambda v: _frontend(inputs, processes=v),
        )
    if f.media_workers > 1:
        yield _Knob(
            field="frontend.mediaWorkers",
            before=f.media_workers,
            end=1,
            put=lambda v: _frontend(inputs, media_workers=v),
        )
    yield _Knob(
        field="frontend.admission.maxMedia",
        before=f.max_media_bytes,
        end=64 * MIB,
        granule=MIB,
        is_bytes=True,
        put=lambda v: _frontend(inputs, max_media_bytes=v),
    )


def _host_knobs(problem: Problem, inputs: BudgetInputs) -> Iterator[_Knob]:
    e = inputs.engine
    if problem.place != "engine":
        return
    if e.limit_bytes is not None:
        yield _limit(
            "engine.hostMemory",
            e.limit_bytes,
            inputs.node_bytes,
            lambda v: with_engine(inputs, limit_bytes=v),
        )
    yield from _size("caches.ipc.size", e.ipc_bytes, lambda v: with_engine(inputs, ipc_bytes=v))
    yield from _size(
        "caches.encoder.hostSize",
        e.encoder_host_bytes,
        lambda v: with_engine(inputs, encoder_host_bytes=v),
    )


def _compute_knobs(
    problem: Problem, inputs: BudgetInputs, profile: ModelProfile
) -> Iterator[_Knob]:
    """KV, encoder and batch: device memory on a GPU, host memory on a CPU."""
    e = inputs.engine
    if e.kv_bytes:
        up = problem.reason == "KVTooSmall"
        yield _Knob(
            field="caches.kv.size",
            before=e.kv_bytes,
            end=_SEARCH_MAX if up else 0,
            granule=MIB,
            is_bytes=True,
            put=lambda v: with_engine(inputs, kv_bytes=v),
        )
    too_small = problem.reason == "EncoderTooSmall"
    if e.encoder_bytes is not None:
        yield _Knob(
            field="caches.encoder.size",
            before=e.encoder_bytes,
            end=_SEARCH_MAX if too_small else 0,
            granule=MIB,
            is_bytes=True,
            put=lambda v: with_engine(inputs, encoder_bytes=v),
        )
    if e.encoder_embeds:
        yield _Knob(
            field="caches.encoder.tokens",
            before=e.encoder_embeds,
            end=_SEARCH_MAX if too_small else 0,
            put=lambda v: with_engine(inputs, encoder_embeds=v),
        )
    length = e.max_model_len or profile.max_model_len
    items = items_under(profile, inputs.modalities).by_name.values()
    useful = max(_USEFUL_LENGTH, *(item.num_tokens + 1 for item in items), e.block_size)
    yield _Knob(
        field="engine.maxModelLen",
        before=length,
        end=profile.max_model_len
        if problem.reason in ("ContextTooShort", "ContextTooLong")
        else min(length, useful),
        granule=1 if length < 2 * useful or "Context" in problem.reason else 1024,
        put=lambda v: with_engine(inputs, max_model_len=v),
        note="tokens of prompt and output together",
    )
    yield _Knob(
        field="engine.maxNumBatchedTokens",
        before=e.max_num_batched_tokens,
        end=1 << 20 if problem.reason == "ChunkedInputOff" else 256,
        put=lambda v: with_engine(inputs, max_num_batched_tokens=v),
    )


def _switches(
    problem: Problem, inputs: BudgetInputs, profile: ModelProfile
) -> Iterator[tuple[Edit, BudgetInputs]]:
    """Edits in steps: Auto instead of a size, smaller media, another type, more devices."""
    e = inputs.engine
    if problem.place == "frontend":
        return
    if e.disable_chunked_mm_input:
        yield (
            Edit(field="engine.disableChunkedMultiModalInput", before="true", after="false"),
            with_engine(inputs, disable_chunked_mm_input=False),
        )
    if e.kv_bytes is not None:
        edit = Edit(field="caches.kv.size", before=format_bytes(e.kv_bytes), after="Auto")
        yield edit, with_engine(inputs, kv_bytes=None)
    steps: list[Iterable[KnobStep]] = []
    if problem.reason in ("ContextTooShort", "ProfileLimits"):
        steps = [media_steps(inputs, profile, problem.term)]
    elif problem.reason in ("DeviceMemory", "EngineMemory", "ChunkedInputOff", "EncoderTooSmall"):
        on = [n for n in profile.items if getattr(inputs.modalities, n).max_per_prompt > 0]
        steps = [media_steps(inputs, profile, name) for name in on]
    if problem.reason in ("DeviceMemory", "KVTooSmall"):
        steps.append(kv_steps(inputs))
    if problem.reason in ("DeviceMemory", "KVTooSmall", "DeviceCount"):
        steps.append(device_steps(inputs, profile))
    for group in steps:
        for step in group:
            if step.edit is not None:
                yield step.edit, step.put(inputs)
