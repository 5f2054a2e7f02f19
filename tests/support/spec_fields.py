"""Every leaf of the spec's schema, with a value for it and a resource that it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foveal_operator.kube.types import Obj
from tests.support.api_server_rules import root_schema
from tests.support.samples import AUTOSCALED, put, resource

KEY = {"name": "keys", "key": "k"}
ENGINE_SCALING = {"maxReplicas": 4, "prometheusAddress": "http://p:9090"}
DRA = {"deviceClassName": "gpu"}
SHARED = {"type": "SharedMemory", "claimName": "tmpfs"}
ROUTE = {"parentRefs": [{"name": "gw"}]}

# Fields that need company: path -> what stands there before.
BASES: dict[str, dict[str, Any]] = {
    "spec.frontend.autoscaling.": {"spec.frontend.autoscaling": AUTOSCALED},
    "spec.engine.autoscaling.": {"spec.engine.autoscaling": ENGINE_SCALING},
    "spec.engine.accelerator.deviceSelectors": {"spec.engine.accelerator": DRA},
    "spec.caches.ipc.type": {},
    "spec.caches.ipc.claimName": {"spec.caches.ipc": SHARED},
    "spec.networking.httpRoute.": {"spec.networking.httpRoute": ROUTE},
    "spec.networking.httpRoute.weight": {
        "spec.networking.httpRoute": {**ROUTE, "splits": [{"name": "canary", "weight": 1}]}
    },
    "spec.networking.inferencePool.": {"spec.networking.inferencePool": {"endpointPicker": "p"}},
    "spec.security.injection.": {"spec.security.injection": {"keySecretRef": KEY}},
}
for ref in ("apiKeySecretRef", "adminKeySecretRef"):
    BASES[f"spec.security.{ref}."] = {f"spec.security.{ref}": KEY}
BASES["spec.networking.cacheEvents."] = {
    "spec.networking.cacheEvents": {"readerLabels": {"app": "router"}}
}
BASES["spec.model.pooling"] = {"spec.model.task": "Embed"}
BASES["spec.model.secretRef."] = {"spec.model.secretRef": {"name": "token"}}
for role in ("frontend", "engine"):
    BASES[f"spec.{role}.autoscaling.prometheusAuth."] = {
        f"spec.{role}.autoscaling.prometheusAuth": {"name": "thanos"}
    }
BASES["spec.security.mediaSources.localFiles."] = {
    "spec.security.mediaSources.localFiles": {"claimName": "files"}
}
BASES["spec.engine.lora."] = {"spec.engine.lora": {"memory": "64Mi"}}
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
    "spec.engine.lora.memory": "128Mi",
    "spec.engine.lora.adapters": [{"name": "red", "path": "loras/red"}],
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
    "spec.security.allowedOrigins": ["https://app.example.org"],
    "spec.frontend.unknownOptions": "Ignore",
    "spec.frontend.toolFormat": "hermes",
    "spec.frontend.chatTemplate": "{{ messages[0].content }}",
    "spec.frontend.requestDefaults": {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "spec.model.task": "Embed",
    "spec.model.pooling": "Mean",
    "spec.frontend.page": False,
    "spec.networking.httpRoute.hostnames": ["example.org"],
    "spec.networking.httpRoute.matches": [{"path": "/a"}],
    "spec.networking.httpRoute.splits": [{"name": "canary", "weight": 1}],
    "spec.networking.cacheEvents.format": "Foveal",
    "spec.networking.cacheEvents.readerLabels": {"a": "b"},
    "spec.networking.service.type": "NodePort",
    "spec.networking.service.annotations": {"a": "b"},
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
    if "990u" in rules:
        return "7"
    return "3Gi" if "isQuantity" in rules else "other"


def base_for(path: str, of: Obj | None = None) -> Obj:
    """A resource, the minimal one unless another is given, with what the field needs beside it."""
    obj = of or resource()
    for prefix, parts in BASES.items():
        if path.startswith(prefix):
            for where, value in parts.items():
                obj = put(obj, where, value)
    return obj


def changed(base: Obj, path: str) -> Obj:
    """`base` with the sample of a field, and what that cannot be without."""
    after = put(base, path, sample(path, LEAVES[path]))
    if path == "spec.caches.ipc.type":
        after = put(after, "spec.caches.ipc.claimName", "tmpfs")
    return after
