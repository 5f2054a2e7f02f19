"""Every byte before any pod exists: resource + model profile + node facts in, BudgetPlan out.

Called by the operator on each reconcile, by `foveal plan` and `foveal up`; the figures it returns
are the ones the processes obey. Pure: the same inputs give the same plan. The rules are told in
docs/reference/budgets.md with worked examples.

Auto, in one paragraph: with a limit, the terms the software needs come first and the Auto caches
share what is left (frontend: all of it to the processor caches; engine host memory: IPC pool 2,
KV on a CPU 2, encoder host tier 1; a device: encoder cache by its rule, all the rest to KV). Of a
model with recurrent state, snapshots of it take half as much as KV.
Without a limit the caches take their defaults and the limit follows, never above what a node has.
"""

from __future__ import annotations

import functools

import msgspec

from foveal_runtime.plan.budget.combined import combine
from foveal_runtime.plan.budget.edits import suggest
from foveal_runtime.plan.budget.lines import (
    cache_line,
    device_lines,
    engine_lines,
    frontend_lines,
)
from foveal_runtime.plan.budget.needs import Needs, derive_needs
from foveal_runtime.plan.budget.pools import Shares, divide, preferred, total
from foveal_runtime.plan.budget.types import (
    DEVICE_TOLERANCE_PERCENT,
    BudgetInputs,
    BudgetPlan,
    Line,
    Place,
    PlaceBudget,
    Problem,
)
from foveal_runtime.plan.config import MIB
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import format_gib

_LIMIT_FIELD = {"frontend": "frontend.hostMemory", "engine": "engine.hostMemory"}
_REASON = {"frontend": "FrontendMemory", "engine": "EngineMemory", "device": "DeviceMemory"}


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    budget: PlaceBudget
    sizes: dict[str, int]
    problem: Problem | None = None
    note: str = ""


def plan(inputs: BudgetInputs, profile: ModelProfile) -> BudgetPlan:
    """The budgets, with the smallest edits that remove each problem. Never raises for a misfit."""
    result = draft(inputs, profile)
    if result.fits:
        return result
    planner = functools.partial(draft, profile=profile)
    problems = [
        msgspec.structs.replace(problem, edits=suggest(problem, inputs, profile, planner))
        for problem in result.problems
    ]
    engine = [place for place, one in enumerate(problems) if one.place != "frontend"]
    if len(engine) > 1 or any(_is_dear(problems[place]) for place in engine):
        # The first message that is read names a configuration that works.
        first = engine[0]
        together = combine(inputs, profile, planner)
        if together and together != problems[first].edits[:1]:
            problems[first] = msgspec.structs.replace(problems[first], together=together)
    return msgspec.structs.replace(result, problems=tuple(problems))


def _is_dear(problem: Problem) -> bool:
    """Whether all that helps alone is other hardware."""
    return all(edit.field.startswith(_HARDWARE) for edit in problem.edits)


_HARDWARE = ("engine.accelerator.", "engine.parallelism.")


def draft(inputs: BudgetInputs, profile: ModelProfile) -> BudgetPlan:
    """The plan without suggested edits; what suggestions are tried with."""
    needs = derive_needs(inputs, profile)
    engine = _place_pod("engine", inputs, needs, engine_lines(inputs, needs, profile), profile)
    # A frontend's mirrors grow with the pool they mirror, so the engine comes first.
    fixed = frontend_lines(inputs, needs, engine.sizes["ipc"], profile)
    frontend = _place_pod("frontend", inputs, needs, fixed, profile)
    device = _place_device(inputs, needs, profile) if inputs.engine.device == "gpu" else None
    placed = [p for p in (frontend, engine, device) if p is not None]
    sizes = {name: size for p in placed for name, size in p.sizes.items()}
    kv_bytes = sizes["kv"] - sizes["kv"] % needs.kv.block_bytes
    return BudgetPlan(
        frontend=frontend.budget,
        engine=engine.budget,
        device=device.budget if device else None,
        problems=(*needs.problems, *(p.problem for p in placed if p.problem)),
        notes=(*needs.notes, *(p.note for p in placed if p.note)),
        processor_bytes=sizes["processor"],
        frontend_shm_bytes=needs.frontend_shm_bytes,
        ipc_bytes=sizes["ipc"],
        ipc_staging_bytes=needs.ipc_staging_bytes,
        engine_shm_bytes=needs.engine_shm_bytes,
        encoder_compute_embeds=needs.encoder_compute_embeds,
        encoder_embeds=sizes["encoder"] // needs.bytes_per_embed if needs.bytes_per_embed else 0,
        encoder_host_bytes=sizes["encoderHost"],
        kv_bytes=kv_bytes,
        kv_tokens=needs.kv.num_tokens(kv_bytes),
        kv_window_bytes=needs.kv.divide(kv_bytes).window * needs.kv.window_block_bytes,
        snapshot_bytes=sizes.get("snapshots", 0),
        max_model_len=needs.max_model_len,
    )


def headroom_of(limit_bytes: int, percent: int) -> int:
    return -(-limit_bytes * percent // 100)


def limit_for(used_bytes: int, percent: int) -> int:
    """The smallest whole-MiB limit that leaves the headroom free above `used_bytes`."""
    limit = -(-used_bytes * 100 // (100 - percent))
    return -(-limit // MIB) * MIB


def _place_pod(
    place: Place,
    inputs: BudgetInputs,
    needs: Needs,
    fixed: tuple[Line, ...],
    profile: ModelProfile,
) -> _Placed:
    """One pod's memory: the user's limit, or the one that follows, clipped to a node."""
    percent = inputs.headroom_percent
    if place == "frontend":
        pools = needs.frontend_pools
        given = inputs.frontend.limit_bytes
    else:
        pools = needs.engine_pools
        given = inputs.engine.limit_bytes
    fixed_bytes = sum(line.bytes for line in fixed)
    shrink = inputs.on_misfit == "Shrink"
    note = ""
    if given is not None:
        limit = given
        shares = divide(pools, _usable(limit, percent) - fixed_bytes, shrink=shrink)
        why = f"what {_LIMIT_FIELD[place]} leaves"
    else:
        sizes = preferred(pools)
        limit = limit_for(fixed_bytes + total(pools, sizes), percent)
        shares, why = Shares(sizes=sizes), "the default"
        if 0 < inputs.node_bytes < limit:
            limit, why = inputs.node_bytes, "what the node's memory leaves"
            usable = _usable(limit, percent) - fixed_bytes
            shares = divide(pools, usable, stop_at_default=True, shrink=shrink)
            note = (
                f"{place}: the default sizes need more than a node's {format_gib(limit)}; "
                "they were clipped to it"
            )
    lines = (*fixed, *(cache_line(p, shares, place, needs, profile, why) for p in pools))
    budget = PlaceBudget(
        place=place,
        limit_bytes=limit,
        headroom_bytes=headroom_of(limit, percent),
        source="Derived" if given is None else "Pinned",
        lines=lines,
    )
    problem = _misfit(budget, shares, percent, needs.max_model_len)
    if problem is None and given is not None and 0 < inputs.node_bytes < given:
        problem = Problem(
            reason="NodeMemory",
            place=place,
            term="limit",
            needed=given,
            available=inputs.node_bytes,
            unit="bytes",
            detail=f"{_LIMIT_FIELD[place]} is {format_gib(given)} and no node has more than "
            f"{format_gib(inputs.node_bytes)} to allocate",
        )
    return _Placed(
        budget=budget, sizes=shares.sizes, problem=problem, note=note or _shrunk(place, shares)
    )


def _place_device(inputs: BudgetInputs, needs: Needs, profile: ModelProfile) -> _Placed:
    """One device: weights and activations of one rank, the encoder cache, KV takes the rest."""
    fixed = device_lines(inputs, needs, profile)
    memory = inputs.engine.device_bytes
    usable = _usable(memory, inputs.headroom_percent) - sum(line.bytes for line in fixed)
    pools = needs.device_pools
    shares = divide(pools, usable, shrink=inputs.on_misfit == "Shrink")
    why = "what weights, activations and the encoder cache leave of the device"
    lines = (*fixed, *(cache_line(p, shares, "device", needs, profile, why) for p in pools))
    budget = PlaceBudget(
        place="device",
        limit_bytes=memory,
        headroom_bytes=headroom_of(memory, inputs.headroom_percent),
        source="Pinned",
        lines=lines,
    )
    sizes = {**shares.sizes, "kv": shares.sizes["kv"] * inputs.engine.num_devices}
    if memory == 0:
        needed = limit_for(budget.used_bytes, inputs.headroom_percent)
        problem: Problem | None = Problem(
            reason="DeviceMemoryUnknown",
            place="device",
            term="device",
            needed=needed,
            available=0,
            unit="bytes",
            detail="the memory of the engine's device is not known, so no cache can be planned "
            f"(at least {format_gib(needed)} are needed)",
        )
    else:
        problem = _misfit(budget, shares, inputs.headroom_percent, needs.max_model_len)
    found = inputs.engine.found_device_bytes
    # Drivers keep a part of what is sold as 80 GiB for themselves; the headroom covers that.
    if found > 0 and memory * 100 > found * (100 + DEVICE_TOLERANCE_PERCENT):
        problem = Problem(
            reason="DeviceTooSmall",
            place="device",
            term="device",
            needed=memory,
            available=found,
            unit="bytes",
            detail=f"engine.accelerator.memory is {format_gib(memory)} and devices that its "
            f"pods may get have no more than {format_gib(found)}",
        )
    return _Placed(budget=budget, sizes=sizes, problem=problem, note=_shrunk("device", shares))


def _usable(limit_bytes: int, percent: int) -> int:
    return limit_bytes - headroom_of(limit_bytes, percent)


def _shrunk(place: Place, shares: Shares) -> str:
    if not shares.shrunk:
        return ""
    return f"{place}: onMisfit Shrink reduced {', '.join(sorted(shares.shrunk))} to fit"


def _misfit(
    budget: PlaceBudget, shares: Shares, percent: int, max_model_len: int
) -> Problem | None:
    """Names the first term, in the order of the table, that passes what may be used."""
    if shares.short_bytes <= 0:
        return None
    usable = budget.limit_bytes - budget.headroom_bytes
    term = _first_over(budget.lines, usable)
    used = budget.used_bytes
    what = {
        "frontend": "The memory limit of a frontend pod is",
        "engine": "The memory limit of an engine pod is",
        "device": "The device has",
    }[budget.place]
    largest = sorted(budget.lines, key=lambda line: -line.bytes)[:3]
    items = ", ".join(
        f"{line.name} {format_gib(line.bytes)}"
        + (f" (maxModelLen {max_model_len})" if line.name == "kv" else "")
        for line in largest
    )
    return Problem(
        reason=_REASON[budget.place],
        place=budget.place,
        term=term.name,
        needed=used,
        available=usable,
        unit="bytes",
        detail=f"{what} {format_gib(budget.limit_bytes)}, of which {format_gib(usable)} is usable "
        f"({percent} % headroom). At least {format_gib(used)} is needed: "
        f"{format_gib(used - usable)} too little. Largest items: {items}",
    )


def _first_over(lines: tuple[Line, ...], usable: int) -> Line:
    used = 0
    for line in lines:
        used += line.bytes
        if used > usable:
            return line
    raise AssertionError("a misfit without a term that does not fit")
