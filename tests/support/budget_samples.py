"""Profiles and inputs that the budget tests share: one text model, one 7B-class VLM, one toy."""

from __future__ import annotations

import msgspec

from foveal_runtime.plan.budget.types import (
    BudgetInputs,
    BudgetPlan,
    EngineInputs,
    FrontendInputs,
    PlaceBudget,
)
from foveal_runtime.plan.config import GIB, MIB
from foveal_runtime.plan.profile import ItemProfile, ModelProfile

VLM = ModelProfile(
    model="vlm-7b",
    max_model_len=32768,
    weight_bytes=15 * GIB,
    kv_bytes_per_token=57_344,
    embed_width=3584,
    embed_bytes=2,
    activation_bytes=1 * GIB,
    activation_bytes_per_token=100_000,
    items={
        "image": ItemProfile(num_tokens=16_386, num_embeds=16_384, processed_bytes=77 * MIB),
        "video": ItemProfile(num_tokens=16_386, num_embeds=16_384, processed_bytes=77 * MIB),
    },
)
TEXT = ModelProfile(
    model="text",
    is_multimodal=False,
    max_model_len=4096,
    weight_bytes=2 * GIB,
    kv_bytes_per_token=32_768,
)
TOY = ModelProfile(
    model="toy",
    dtype="float32",
    max_model_len=512,
    weight_bytes=4 * MIB,
    kv_bytes_per_token=2 * 4 * 2 * 32 * 4,
    embed_width=128,
    embed_bytes=4,
    items={"image": ItemProfile(num_tokens=36, num_embeds=36, processed_bytes=27_648)},
)


def gpu(memory_bytes: int = 80 * GIB, **changes: object) -> BudgetInputs:
    engine = msgspec.structs.replace(EngineInputs(device_bytes=memory_bytes), **changes)
    return BudgetInputs(engine=engine)


def cpu(**changes: object) -> BudgetInputs:
    return BudgetInputs(engine=msgspec.structs.replace(EngineInputs(device="cpu"), **changes))


def free_bytes(place: PlaceBudget) -> int:
    """What a plan leaves of a place's limit."""
    return place.limit_bytes - place.headroom_bytes - place.used_bytes


def with_frontend(inputs: BudgetInputs, **changes: object) -> BudgetInputs:
    frontend: FrontendInputs = msgspec.structs.replace(inputs.frontend, **changes)
    return msgspec.structs.replace(inputs, frontend=frontend)


def reasons(result: BudgetPlan) -> list[str]:
    return [problem.reason for problem in result.problems]
