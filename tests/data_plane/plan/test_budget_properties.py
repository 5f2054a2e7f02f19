"""Budgets never exceed limits, grow with them, and every suggested edit really helps."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal_runtime.plan.budget.planner import draft, plan
from foveal_runtime.plan.budget.types import BudgetInputs, BudgetPlan, EngineInputs, FrontendInputs
from foveal_runtime.plan.config import GIB, MIB
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import parse_bytes
from tests.support.budget_samples import TEXT, TOY, VLM, free_bytes

sizes = st.none() | st.integers(0, 12 * GIB)
limits = st.none() | st.integers(GIB, 64 * GIB)
profiles = st.sampled_from([VLM, TEXT, TOY])
frontends = st.builds(
    FrontendInputs,
    processes=st.integers(1, 8),
    media_workers=st.integers(1, 8),
    limit_bytes=limits,
    processor_bytes=sizes,
    max_media_bytes=st.integers(MIB, GIB),
)
engines = st.builds(
    EngineInputs,
    num_engines=st.integers(1, 40),
    limit_bytes=limits,
    device=st.sampled_from(["gpu", "cpu"]),
    num_devices=st.sampled_from([1, 2, 4]),
    device_bytes=st.integers(0, 141 * GIB),
    max_model_len=st.sampled_from([0, 400, 2048, 20_000]),
    max_num_batched_tokens=st.sampled_from([512, 2048, 16_384]),
    disable_chunked_mm_input=st.booleans(),
    ipc_bytes=sizes,
    encoder_bytes=sizes,
    encoder_host_bytes=sizes,
    kv_bytes=sizes,
)
inputs_strategy = st.builds(
    BudgetInputs,
    frontend=frontends,
    engine=engines,
    headroom_percent=st.integers(5, 40),
    on_misfit=st.sampled_from(["Block", "Shrink"]),
    node_bytes=st.just(0) | st.integers(4 * GIB, 128 * GIB),
)
roomy = st.builds(
    BudgetInputs,
    frontend=st.builds(FrontendInputs, processes=st.integers(1, 8)),
    engine=st.builds(
        EngineInputs,
        device=st.sampled_from(["gpu", "cpu"]),
        device_bytes=st.integers(80 * GIB, 141 * GIB),
        max_num_batched_tokens=st.sampled_from([512, 2048, 16_384]),
    ),
    headroom_percent=st.integers(5, 40),
    node_bytes=st.just(0) | st.integers(64 * GIB, 512 * GIB),
)


@given(inputs_strategy, profiles)
@settings(max_examples=200, deadline=None)
def test_a_plan_that_fits_never_exceeds_a_limit(
    inputs: BudgetInputs, profile: ModelProfile
) -> None:
    result = draft(inputs, profile)
    for place in result.places:
        assert all(line.bytes == line.each_bytes * line.count >= 0 for line in place.lines)
    if result.fits:
        check_limits(inputs, result)
    assert result == draft(inputs, profile)


@given(roomy, profiles)
@settings(max_examples=100, deadline=None)
def test_where_there_is_room_a_plan_fits(inputs: BudgetInputs, profile: ModelProfile) -> None:
    """Of random inputs one in ten fits, and nearly none of those names a node's memory."""
    result = draft(inputs, profile)
    assert result.fits
    check_limits(inputs, result)


def check_limits(inputs: BudgetInputs, result: BudgetPlan) -> None:
    assert result.kv_tokens >= result.max_model_len
    for place in result.places:
        assert free_bytes(place) >= 0
        if inputs.node_bytes and place.place != "device":
            assert place.limit_bytes <= inputs.node_bytes


@given(inputs_strategy, profiles, st.integers(0, 32 * GIB))
@settings(max_examples=300, deadline=None)
def test_a_larger_limit_never_makes_a_cache_smaller(
    inputs: BudgetInputs, profile: ModelProfile, more: int
) -> None:
    """Each cache follows its own limit. (A larger IPC pool costs frontends their mirrors.)"""
    inputs = msgspec.structs.replace(inputs, node_bytes=0)
    f, e = inputs.frontend, inputs.engine
    bigger = {
        "frontend": msgspec.structs.replace(f, limit_bytes=(f.limit_bytes or GIB) + more),
        "engine": msgspec.structs.replace(e, limit_bytes=(e.limit_bytes or GIB) + more),
        "device": msgspec.structs.replace(e, device_bytes=e.device_bytes + more),
    }
    smaller = {
        "frontend": msgspec.structs.replace(f, limit_bytes=f.limit_bytes or GIB),
        "engine": msgspec.structs.replace(e, limit_bytes=e.limit_bytes or GIB),
        "device": e,
    }
    for place in ("frontend", "engine", "device"):
        part = "frontend" if place == "frontend" else "engine"
        low = draft(msgspec.structs.replace(inputs, **{part: smaller[place]}), profile)
        high = draft(msgspec.structs.replace(inputs, **{part: bigger[place]}), profile)
        before = {line.name: line.bytes for b in low.places if b.place == place for line in b.lines}
        after = {line.name: line.bytes for b in high.places if b.place == place for line in b.lines}
        assert not [name for name in before if after[name] < before[name]]
        if "DeviceMemoryUnknown" in {p.reason for p in low.problems}:
            continue
        mine = {p.reason for p in low.problems if p.place == place}
        assert {p.reason for p in high.problems if p.place == place} <= mine


@given(inputs_strategy, profiles, st.integers(1, 8), st.integers(1, 8), limits)
@settings(max_examples=150, deadline=None)
def test_the_frontends_never_change_an_engine(
    inputs: BudgetInputs, profile: ModelProfile, processes: int, workers: int, limit: int | None
) -> None:
    other = FrontendInputs(processes=processes, media_workers=workers, limit_bytes=limit)
    one, two = (
        draft(inputs, profile),
        draft(msgspec.structs.replace(inputs, frontend=other), profile),
    )
    for name in (
        "ipc_bytes",
        "ipc_staging_bytes",
        "encoder_embeds",
        "kv_bytes",
        "engine",
        "device",
    ):
        assert getattr(one, name) == getattr(two, name)


FIELDS = {
    "frontend.hostMemory": ("frontend", "limit_bytes"),
    "frontend.processes": ("frontend", "processes"),
    "frontend.mediaWorkers": ("frontend", "media_workers"),
    "frontend.admission.maxMedia": ("frontend", "max_media_bytes"),
    "caches.processor.size": ("frontend", "processor_bytes"),
    "engine.hostMemory": ("engine", "limit_bytes"),
    "engine.accelerator.memory": ("engine", "device_bytes"),
    "engine.accelerator.count": ("engine", "num_devices"),
    "engine.maxModelLen": ("engine", "max_model_len"),
    "engine.maxNumBatchedTokens": ("engine", "max_num_batched_tokens"),
    "engine.disableChunkedMultiModalInput": ("engine", "disable_chunked_mm_input"),
    "caches.ipc.size": ("engine", "ipc_bytes"),
    "caches.encoder.size": ("engine", "encoder_bytes"),
    "caches.encoder.tokens": ("engine", "encoder_embeds"),
    "caches.encoder.hostSize": ("engine", "encoder_host_bytes"),
    "caches.kv.size": ("engine", "kv_bytes"),
    "caches.headroomPercent": ("", "headroom_percent"),
}


def _apply(inputs: BudgetInputs, field: str, after: str) -> BudgetInputs:
    part, attribute = FIELDS[field]
    value = {"Auto": None, "false": False}.get(after, 0 if after == "Auto" else after)
    if isinstance(value, str):
        value = parse_bytes(value)
    if not part:
        return msgspec.structs.replace(inputs, **{attribute: value})
    changed = msgspec.structs.replace(getattr(inputs, part), **{attribute: value})
    return msgspec.structs.replace(inputs, **{part: changed})


@given(inputs_strategy, profiles)
@settings(max_examples=60, deadline=None)
def test_following_a_suggestion_removes_the_problem(
    inputs: BudgetInputs, profile: ModelProfile
) -> None:
    inputs = msgspec.structs.replace(inputs, on_misfit="Block")
    for problem in plan(inputs, profile).problems:
        assert len(problem.edits) <= 2
        for edit in problem.edits:
            if edit.field.startswith("modalities."):
                continue
            after = draft(_apply(inputs, edit.field, edit.after), profile)
            assert problem.reason not in {
                p.reason for p in after.problems if p.place == problem.place
            } or problem.reason.startswith("Context")
