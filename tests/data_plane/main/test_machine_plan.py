"""Budgets of a whole machine: the pods' plan while that fits, a fair share of less memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.budget.types import BudgetInputs, EngineInputs
from foveal_runtime.plan.machine_plan import machine_plan, plan_lines, shortfall
from foveal_runtime.plan.profile import ItemProfile, ModelProfile

GIB = 1024**3
PROFILE = ModelProfile(
    max_model_len=8192, weight_bytes=4 * GIB, kv_bytes_per_token=32 * 1024, embed_width=2048,
    items={"image": ItemProfile(num_tokens=1024, num_embeds=1024, processed_bytes=8 << 20)},
)  # fmt: skip
CPU = BudgetInputs(engine=EngineInputs(device="cpu"))


def used(found: Any, num_frontends: int, num_engines: int) -> int:
    return int(found.frontend.limit_bytes * num_frontends + found.engine.limit_bytes * num_engines)


def test_where_everything_fits_the_plan_is_that_of_pods() -> None:
    assert machine_plan(CPU, PROFILE, 64 * GIB, 1, 1) == plan(
        msgspec.structs.replace(CPU, node_bytes=64 * GIB), PROFILE
    )


@pytest.mark.parametrize("host", [10 * GIB, 12 * GIB, 15 * GIB, 18 * GIB])
def test_on_a_laptop_frontends_and_engines_share_what_there_is(host: int) -> None:
    """Each pod's plan alone took all of the node: 4 + 4 GiB of caches even on a laptop."""
    pods = plan(msgspec.structs.replace(CPU, node_bytes=host), PROFILE)
    assert used(pods, 1, 1) > host
    found = machine_plan(CPU, PROFILE, host, 1, 1)
    assert found.fits
    assert used(found, 1, 1) <= host
    assert used(found, 1, 1) > 0.8 * host, "memory is left unused"
    assert found.kv_tokens >= PROFILE.max_model_len


def test_more_memory_never_makes_a_cache_smaller() -> None:
    hosts = range(10 * GIB, 40 * GIB, 2 * GIB)
    plans = [machine_plan(CPU, PROFILE, host, 1, 1) for host in hosts]
    for name in ("kv_bytes", "ipc_bytes", "processor_bytes"):
        sizes = [getattr(found, name) for found in plans]
        assert sizes == sorted(sizes), name


def test_what_cannot_fit_together_says_how_much_is_missing() -> None:
    found = machine_plan(CPU, PROFILE, 12 * GIB, 1, 2)
    said = shortfall(found, 12 * GIB, 1, 2)
    assert said.startswith("1 frontend(s) and 2 engine(s) need at least ")
    assert said.endswith("GiB too little")


def test_a_pinned_size_stays() -> None:
    pinned = msgspec.structs.replace(
        CPU, engine=msgspec.structs.replace(CPU.engine, kv_bytes=2 * GIB)
    )
    assert machine_plan(pinned, PROFILE, 13 * GIB, 1, 1).kv_bytes == 2 * GIB


def test_a_device_is_filled_as_for_pods() -> None:
    engine = EngineInputs(device="gpu", device_bytes=24 * GIB)
    found = machine_plan(BudgetInputs(engine=engine), PROFILE, 64 * GIB, 1, 1)
    assert found.device is not None
    assert found.kv_bytes > 12 * GIB
    text = "\n".join(plan_lines(found, 1, 1))
    assert "device   1 x 24.00 GiB = kv " in text
    assert "an engine holds" in text
