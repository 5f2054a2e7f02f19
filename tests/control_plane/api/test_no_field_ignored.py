"""No field of the resource is silently ignored: each one changes an object, a budget or a rollout.

Walks the generated schema, so a new field fails here until it has a sample and an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.config import GIB
from tests.support.api_server_rules import root_schema
from tests.support.regenerate import FACTS, profile_for
from tests.support.samples import AUTOSCALED, put, resource

KEY = {"name": "keys", "key": "k"}
ENGINE_SCALING = {"maxReplicas": 4, "prometheusAddress": "http://p:9090"}
DRA = {"deviceClassName": "gpu"}
SHARED = {"type": "SharedMemory", "claimName": "tmpfs"}
ROUTE = {"parentRefs": [{"name": "gw"}]}
GATEWAY = "spec.networking.httpRoute.parentRefs"

# Fields that need company: path -> what stands there before.
BASES: dict[str, dict[str, Any]] = {
    "spec.frontend.autoscaling.": {"spec.frontend.autoscaling": AUTOSCALED},
    "spec.engine.autoscaling.": {"spec.engine.autoscaling": ENGINE_SCALING},
    "spec.engine.accelerator.deviceSelectors": {"spec.engine.accelerator": DRA},
    "spec.caches.ipc.type": {},
    "spec.caches.ipc.claimName": {"spec.caches.ipc": SHARED},
    "spec.networking.httpRoute.": {"spec.networking.httpRoute": ROUTE},
    "spec.networking.inferencePool.": {"spec.networking.inferencePool": {"endpointPicker": "p"}},
    "spec.security.injection.": {"spec.security.injection": {"keySecretRef": KEY}},
}
for ref in ("apiKeySecretRef", "adminKeySecretRef"):
    BASES[f"spec.security.{ref}."] = {f"spec.security.{ref}": KEY}
BASES["spec.model.secretRef."] = {"spec.model.secretRef": {"name": "token"}}
for role in ("frontend", "engine"):
    BASES[f"spec.{role}.autoscaling.prometheusAuth."] = {
        f"spec.{role}.autoscaling.prometheusAuth": {"name": "thanos"}
    }
BASES["spec.security.mediaSources.localFiles."] = {
    "spec.security.mediaSources.localFiles": {"claimName": "files"}
}
BASES["spec.caches.encoder.warmSet."] = {"spec.caches.encoder.warmSet": {"claimName": "w"}}

# Values that the generic ones below do not suit.
VALUES: dict[str, Any] = {
    "spec.model.uri": "hf://other/model",
    "spec.frontend.autoscaling.metric": "Concurrency",
    "spec.frontend.autoscaling.prometheusAddress": "http://other:9090",
    "spec.engine.autoscaling.metric": "KVUsage",
    "spec.engine.autoscaling.prometheusAddress": "http://other:9090",
    "spec.engine.accelerator.type": "CPU",
    "spec.engine.accelerator.resourceName": "amd.com/gpu",
    "spec.engine.accelerator.memory": "40Gi",
    "spec.engine.maxModelLen": 20_000,
    "spec.engine.maxNumEncoderInputTokens": 40_000,
    "spec.engine.maxNumBatchedTokens": 17_000,
    "spec.engine.hostMemory": "40Gi",
    "spec.frontend.hostMemory": "40Gi",
    "spec.caches.ipc.type": "SharedMemory",
    "spec.caches.encoder.tokens": 40_000,
    "spec.caches.kv.size": "8Gi",
    "spec.caches.encoder.eviction": "Cost",
    "spec.model.cache.accessMode": "ReadWriteOnce",
    "spec.rollout.drainTimeoutSeconds": 240,
    "spec.rollout.progressDeadlineSeconds": 3600,
    "spec.networking.httpRoute.parentRefs": [{"name": "a"}, {"name": "b"}],
    "spec.engine.accelerator.deviceSelectors": ["device.driver == 'x'"],
    "spec.security.mediaSources.allowedDomains": ["example.org"],
    "spec.networking.httpRoute.hostnames": ["example.org"],
    "spec.observability.labels": {"a": "b"},
    "spec.frontend.podTemplate": {"metadata": {"labels": {"a": "b"}}},
    "spec.engine.podTemplate": {"metadata": {"labels": {"a": "b"}}},
    "spec.observability.podMonitor": "Disabled",
    "spec.observability.prometheusRule": "Disabled",
    "spec.observability.dashboard": "Disabled",
    "spec.networking.port": 9001,
    "spec.security.networkPolicy": "Disabled",
}
TRUE_BY_DEFAULT = {
    "spec.engine.prefixCaching", "spec.engine.cudaGraphs", "spec.rollout.autoRollback",
}  # fmt: skip
# Read by the rollout and by the reconciler, which act over time: no object shows them.
OVER_TIME = {
    "spec.rollout.strategy",
    "spec.rollout.maxSurge",
    "spec.rollout.maxUnavailable",
    "spec.rollout.autoRollback",
    "spec.paused",
}
# Changes the plan only when something does not fit: test_budget.py.
ON_MISFIT = {"spec.caches.onMisfit"}


def leaves(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    properties = schema.get("properties")
    if not properties:
        yield path, schema
        return
    for name, child in properties.items():
        yield from leaves(child, f"{path}.{name}")


LEAVES = dict(leaves(root_schema()["properties"]["spec"], "spec"))


def sample(path: str, schema: dict[str, Any]) -> Any:
    if path in VALUES:
        return VALUES[path]
    if "enum" in schema:
        return schema["enum"][-1]
    if schema["type"] == "integer":
        return max(schema["minimum"], 3)
    if schema["type"] == "boolean":
        return path not in TRUE_BY_DEFAULT
    rules = str(schema.get("x-kubernetes-validations", ""))
    return "3Gi" if "isQuantity" in rules else "other"


def base_for(path: str) -> Obj:
    obj = resource()
    for prefix, parts in BASES.items():
        if path.startswith(prefix):
            for where, value in parts.items():
                obj = put(obj, where, value)
    return obj


def effect(obj: Obj) -> bytes:
    inference = parse(obj)
    inputs = budget_inputs(inference, NodeFacts(device_bytes=80 * GIB))
    result = plan(inputs, profile_for(inference))
    objects = desired(inference, result, FACTS)
    before = desired(inference, None, FACTS)  # the profile Job is only there without a plan
    return msgspec.json.encode([objects, before], order="deterministic")


@pytest.mark.parametrize("path", sorted(set(LEAVES) - OVER_TIME - ON_MISFIT))
def test_a_field_has_an_effect(path: str) -> None:
    before = base_for(path)
    after = put(before, path, sample(path, LEAVES[path]))
    if path == "spec.caches.ipc.type":
        after = put(after, "spec.caches.ipc.claimName", "tmpfs")
    assert effect(after) != effect(before), f"{path} is ignored"


def test_the_exceptions_exist() -> None:
    assert set(LEAVES) >= OVER_TIME | ON_MISFIT | set(VALUES)
