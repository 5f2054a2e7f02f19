"""The start-up documents: each field follows from the resource or is fixed for a reason, and a new
operator's documents are those that older runtimes read.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foveal_operator.manifests import ClusterFacts
from foveal_operator.manifests.context import Context
from foveal_operator.manifests.documents import (
    ADDED,
    document_json,
    engine_document,
    frontend_document,
)
from foveal_runtime.plan.config import EngineConfig, FrontendConfig
from tests.support.regenerate import planned
from tests.support.samples import resource
from tests.support.spec_fields import LEAVES, base_for, changed

# What no field of the resource changes, and why.
FIXED = {
    # What only a pod, or only the operator, knows.
    "engine.engine_id", "engine.node", "engine.bind", "engine.http_host", "engine.http_port",
    "engine.curve.server_public_file", "engine.curve.server_secret_file",
    "engine.curve.client_public_file", "engine.curve.client_secret_file", "engine.model.revision",
    "frontend.frontend_id", "frontend.node", "frontend.host", "frontend.loopback",
    "frontend.engines", "frontend.curve.server_public_file", "frontend.curve.client_public_file",
    "frontend.curve.client_secret_file", "frontend.curve.server_secret_file",
    "frontend.model.revision", "frontend.metrics_peers", "engine.log_format",
    "frontend.log_format",
    "frontend.model.quantization",  # of engines' weights alone
    # What clients put into `model` is the frontends' business: engines have the resource's name.
    "engine.model.name",
    # For tests and debugging on one machine.
    "engine.idle_check_seconds", "frontend.media_sources.allow_private_addresses",
    # One right value: a choice would only be a way to get it wrong.
    "frontend.max_uuid_length", "frontend.max_bindings",
    "frontend.media_sources.max_redirects", "frontend.injection.namespace",
    "frontend.admission.no_engine_wait_seconds", "frontend.admission.client_share",
    "frontend.admission.max_answer_scores",
    "frontend.admission.upload_window_seconds",
    "frontend.admission.min_upload_bytes_per_second",
    "frontend.admission.write_timeout_seconds",
    # Measured as no gain yet.
    "engine.caches.unpin_at",
    # Planned, and only for models with recurrent state.
    "engine.caches.snapshot_bytes",
    # A pod's limit must show at its start.
    "engine.caches.kv_touched",
    # One struct serves three modalities, and these say nothing of them.
    *(f"{role}.modalities.{field}" for role in ("engine", "frontend") for field in (
        "audio.max_frames", "audio.max_pixels", "audio.resize_pixels", "audio.max_pages",
        "image.max_frames", "image.max_seconds", "video.max_pages")),
    # Documents are read by frontends alone.
    "engine.modalities.image.max_pages",
}  # fmt: skip


def flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict) or path.endswith("_kwargs"):  # one value, of any form
        return {path: value}
    return {k: v for name, item in value.items() for k, v in flat(item, f"{path}.{name}").items()}


def documents(obj: Any) -> dict[str, Any]:
    inference, result = planned(obj)
    context = Context(inference=inference, plan=result, facts=ClusterFacts())
    engine, frontend = engine_document(context), frontend_document(context)
    found = flat(msgspec.to_builtins(engine), "engine")
    return found | flat(msgspec.to_builtins(frontend), "frontend")


def test_each_field_of_a_document_is_reached_or_fixed_for_a_reason() -> None:
    reached: set[str] = set()
    minimal = documents(resource())
    for path in LEAVES:
        found = documents(changed(base_for(path), path))
        reached |= {key for key in found if found[key] != minimal[key]}
    assert sorted(minimal.keys() - reached - FIXED) == []
    assert sorted(FIXED & reached) == []
    assert sorted(FIXED - minimal.keys()) == []


def without_what_was_added(kind: type[msgspec.Struct], part: str) -> set[str]:
    """Fields that runtimes of the first release know."""
    config: Any = kind
    for step in part.split("."):
        config = next(f.type for f in msgspec.structs.fields(config) if f.name == step)
    names = {field.name for field in msgspec.structs.fields(config)}
    return names - {name for owner, name in ADDED if owner == part}


@pytest.mark.parametrize("write", [engine_document, frontend_document])
def test_a_resource_that_does_not_use_a_new_field_gets_no_new_document(write: Any) -> None:
    """Regression: an older runtime refuses a field it does not know, and pods keep the image of
    their first day: an operator upgrade would have ended all of them."""
    inference, result = planned(resource())
    context = Context(inference=inference, plan=result, facts=ClusterFacts())
    config = write(context)
    text = document_json(config)
    sent = msgspec.json.decode(text)
    for (part, name), default in ADDED.items():
        whole, told = msgspec.to_builtins(config), sent
        for step in part.split("."):
            whole, told = whole.get(step, {}), told.get(step, {})
        if name in whole:
            assert whole[name] == default
            assert name not in told
            assert set(told) == without_what_was_added(type(config), part)
    kind = EngineConfig if isinstance(config, EngineConfig) else FrontendConfig
    assert msgspec.json.decode(text, type=kind) == config, "and says the same"


def test_a_new_field_that_is_used_is_told() -> None:
    inference, result = planned(resource(caches={"kv": {"dtype": "fp8"}}))
    context = Context(inference=inference, plan=result, facts=ClusterFacts())
    assert (
        msgspec.json.decode(document_json(engine_document(context)))["caches"]["kv_dtype"] == "fp8"
    )


def test_adapters_reach_the_plan_and_the_engines() -> None:
    lora = {
        "memory": "64Mi",
        "adapters": [{"name": "red", "path": "loras/red"}, {"name": "blue", "path": "/more/blue"}],
    }
    inference, result = planned(resource(engine={"lora": lora}))
    context = Context(inference=inference, plan=result, facts=ClusterFacts())
    told = engine_document(context)
    assert told.caches.lora_bytes == 64 << 20
    below, absolute = told.loras
    assert below.path == f"{told.model.path}/loras/red"
    assert absolute.path == "/more/blue"
    place = context.budgets.device or context.budgets.engine
    assert place.line("loras").bytes == (64 + 32) << 20
