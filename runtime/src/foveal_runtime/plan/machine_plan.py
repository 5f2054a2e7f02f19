"""The budgets of a whole deployment on one machine, where pods share one host's memory.

The same planner as the operator's. While everything fits with its usual sizes, the plan is that of
pods; else host memory above the minimum that works is shared in proportion to what each would take.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foveal_runtime.plan.budget.planner import limit_for, plan
from foveal_runtime.plan.budget.types import BudgetInputs, BudgetPlan, Place
from foveal_runtime.plan.config import GIB, MIB
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import format_gib

_SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
"""Of what is above the least: mirrors grow with the pools they mirror, so the first may miss."""


def machine_plan(
    inputs: BudgetInputs,
    profile: ModelProfile,
    host_bytes: int,
    num_frontends: int,
    num_engines: int,
) -> BudgetPlan:
    """The plan of each frontend and each engine. It has problems when it does not fit.

    Args:
        host_bytes: memory that all processes may have together; 0 = not known.
    """
    alone = msgspec.structs.replace(inputs, node_bytes=host_bytes)
    usual = plan(alone, profile)
    counts: dict[Place, int] = {"frontend": num_frontends, "engine": num_engines}
    if not usual.fits or not host_bytes or _total(usual, counts) <= host_bytes:
        return usual
    floor = plan(_limited(alone, {"frontend": 1, "engine": 1}), profile)
    percent = inputs.headroom_percent
    least = {
        place.place: limit_for(place.used_bytes, percent)
        for place in floor.places
        if place.place in counts
    }
    wish = {
        place.place: max(0, place.limit_bytes - least[place.place])
        for place in usual.places
        if place.place in counts
    }
    spare = host_bytes - sum(least[place] * number for place, number in counts.items())
    wished = sum(wish[place] * number for place, number in counts.items())
    found = usual
    for part in _SHARES:
        share = min(1.0, max(0, spare) * part / max(1, wished))
        limits = {place: least[place] + int(wish[place] * share) // MIB * MIB for place in counts}
        found = plan(_limited(alone, limits), profile)
        if found.fits and _total(found, counts) <= host_bytes:
            return found
    return found


def _total(found: BudgetPlan, counts: dict[Place, int]) -> int:
    return sum(p.limit_bytes * counts[p.place] for p in found.places if p.place in counts)


def _limited(inputs: BudgetInputs, limits: dict[Place, int]) -> BudgetInputs:
    """Limits that the user gave stay."""
    replace = msgspec.structs.replace
    frontend, engine = inputs.frontend, inputs.engine
    if frontend.limit_bytes is None:
        frontend = replace(frontend, limit_bytes=limits["frontend"])
    if engine.limit_bytes is None:
        engine = replace(engine, limit_bytes=limits["engine"])
    return replace(inputs, frontend=frontend, engine=engine)


def shortfall(found: BudgetPlan, host_bytes: int, num_frontends: int, num_engines: int) -> str:
    """Why the processes together do not fit this machine, "" when they do."""
    counts: dict[Place, int] = {"frontend": num_frontends, "engine": num_engines}
    needed = _total(found, counts)
    if not host_bytes or needed <= host_bytes:
        return ""
    return (
        f"{num_frontends} frontend(s) and {num_engines} engine(s) need at least "
        f"{format_gib(needed)} of host memory together, and {format_gib(host_bytes)} is available: "
        f"{format_gib(needed - host_bytes)} too little"
    )


def plan_lines(found: BudgetPlan, num_frontends: int, num_engines: int) -> Iterator[str]:
    """A short table in GiB: each limit with the items that take most of it, then what an engine
    holds."""
    devices = 1 if found.device is None else max(1, num_engines)
    counts: dict[Place, int] = {
        "frontend": num_frontends, "engine": num_engines, "device": devices,
    }  # fmt: skip
    for place in found.places:
        items = sorted(place.lines, key=lambda line: -line.bytes)
        parts = {line.name: line.bytes for line in items[:4]}
        parts["other"] = sum(line.bytes for line in items[4:])
        parts["headroom"] = place.headroom_bytes
        shown = " + ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        times = f"{counts[place.place]} x {format_gib(place.limit_bytes)}"
        yield f"  {place.place:<8} {times:>13} = {shown}"
    if found.kv_tokens:
        yield (
            f"  an engine holds {found.kv_tokens:,} tokens of KV: "
            f"{found.kv_tokens / found.max_model_len:.1f} requests of {found.max_model_len:,}"
        )
