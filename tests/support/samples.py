"""Resources for tests: legal ones by name, and a table of illegal ones with the field at fault."""

from __future__ import annotations

import copy
from typing import Any

from foveal_operator.kube.types import Obj
from tests.support.samples_networking import ILLEGAL_NETWORKING, ILLEGAL_SIZES, ROUTED


def resource(name: str = "qwen", **spec: Any) -> Obj:
    """A resource with the one required field and whatever is given."""
    return {
        "apiVersion": "foveal.dev/v1alpha1",
        "kind": "MultiModalInference",
        "metadata": {"name": name, "namespace": "models"},
        "spec": {"model": {"uri": "hf://Qwen/Qwen2.5-VL-7B-Instruct"}, **spec},
    }


def put(obj: Obj, path: str, value: Any) -> Obj:
    """A copy with the dotted path set."""
    changed = copy.deepcopy(obj)
    at = changed
    *parents, last = path.split(".")
    for key in parents:
        at = at.setdefault(key, {})
    at[last] = value
    return changed


AUTOSCALED = {
    "minReplicas": 2,
    "maxReplicas": 6,
    "metric": "PreprocessQueue",
    "target": 8,
    "prometheusAddress": "http://prometheus.monitoring:9090",
}
LEGAL: dict[str, Obj] = {
    "minimal": resource(),
    "gpu": resource(
        model={
            "uri": "hf://Qwen/Qwen2.5-VL-7B-Instruct",
            "revision": "main",
            "name": "qwen2.5-vl",
            "secretRef": {"name": "hf-token"},
            "cache": {"size": "100Gi", "storageClassName": "fast"},
        },
        modalities={"image": {"maxPerPrompt": 8, "maxPixels": 12_000_000}, "audio": {}},
        frontend={"replicas": 3, "processes": 2, "mediaWorkers": 4, "hostMemory": "24Gi"},
        engine={
            "replicas": 2,
            "accelerator": {"memory": "80Gi"},
            "parallelism": {"tensor": 2},
            "maxModelLen": 32_768,
            "hostMemory": "48Gi",
            "podTemplate": {"spec": {"nodeSelector": {"gpu": "h100"}}},
        },
        caches={"ipc": {"size": "8Gi"}, "encoder": {"tokens": 32_768}, "onMisfit": "Shrink"},
        security={
            "apiKeySecretRef": {"name": "keys"},
            "mediaSources": {"allowedDomains": ["images.example.org", ".example.com"]},
        },
    ),
    "cpu": resource(
        model={"uri": "pvc://models/tiny"},
        engine={"accelerator": {"type": "CPU"}, "hostMemory": "6Gi", "dtype": "float32"},
        frontend={"hostMemory": "4Gi"},
        caches={"processor": {"size": "256Mi"}, "ipc": {"size": "0"}},
    ),
    "scaled": resource(
        frontend={"autoscaling": AUTOSCALED},
        engine={
            "autoscaling": {
                "maxReplicas": 4,
                "prometheusAddress": "https://prometheus:9091",
                "prometheusAuth": {"name": "prometheus"},
            },
            "accelerator": {
                "deviceClassName": "gpu.nvidia.com",
                "deviceSelectors": ["device.attributes['gpu.nvidia.com'].family == 'Hopper'"],
                "memory": "72Gi",
            },
        },
        networking={
            "port": 8080,
            "httpRoute": {"parentRefs": [{"name": "gateway", "namespace": "infra"}]},
            "inferencePool": {"endpointPicker": "picker"},
        },
        observability={"podMonitor": "Enabled", "labels": {"release": "prometheus"}},
        caches={
            "ipc": {"size": "4Gi", "type": "SharedMemory", "claimName": "shared-tmpfs"},
            "encoder": {"hostSize": "2Gi", "warmSet": {"claimName": "warm"}, "eviction": "Cost"},
            "kv": {"dtype": "fp8"},
        },
    ),
    "routed": resource(**ROUTED),
}
_TOO_LONG = "x" * 41

ILLEGAL: list[tuple[str, str, Any, str]] = [
    # name of the case, path, value, field that the message must name
    ("name too long", "metadata.name", _TOO_LONG, "metadata.name"),
    ("name starts with a digit", "metadata.name", "1x", "metadata.name"),
    ("name with a dot", "metadata.name", "a.b", "metadata.name"),
    ("unknown part", "spec.engin", {}, "spec.engin"),
    ("unknown field", "spec.engine.gpus", 1, "spec.engine.gpus"),
    ("unknown cache", "spec.caches.l2", {"size": "1Gi"}, "spec.caches.l2"),
    ("no model", "spec.model", {}, "spec.model.uri"),
    ("uri without scheme", "spec.model.uri", "Qwen/Qwen2.5-VL", "spec.model.uri"),
    ("uri with http", "spec.model.uri", "https://example.org/m", "spec.model.uri"),
    ("uri without a name", "spec.model.uri", "hf://", "spec.model.uri"),
    ("uri with a space", "spec.model.uri", "hf://a/b c", "spec.model.uri"),
    ("uri with a line break", "spec.model.uri", "hf://a/b\n", "spec.model.uri"),
    ("claim with a query", "spec.model.uri", "pvc://a?x=1/p", "spec.model.uri"),
    ("claim with a fragment", "spec.model.uri", "pvc://a#b/p", "spec.model.uri"),
    ("claim that is a way up", "spec.model.uri", "pvc://../p", "spec.model.uri"),
    ("claim with a line break", "spec.model.uri", "pvc://a\n/p", "spec.model.uri"),
    ("uri too long", "spec.model.uri", "hf://" + "a" * 1020, "spec.model.uri"),
    ("uri not text", "spec.model.uri", 7, "spec.model.uri"),
    ("revision with a space", "spec.model.revision", "a b", "spec.model.revision"),
    (
        "revision of a claim model",
        "spec.model",
        {"uri": "pvc://c/m", "revision": "v1"},
        "spec.model.revision",
    ),
    ("secret name in capitals", "spec.model.secretRef", {"name": "A"}, "spec.model.secretRef.name"),
    (
        "cache of a claim model",
        "spec.model",
        {"uri": "pvc://c/m", "cache": {"size": "1Gi"}},
        "spec.model.cache",
    ),
    (
        "claim and size",
        "spec.model.cache",
        {"claimName": "c", "size": "1Gi"},
        "spec.model.cache.claimName",
    ),
    ("cache size Auto", "spec.model.cache", {"size": "Auto"}, "spec.model.cache.size"),
    ("cache size zero", "spec.model.cache", {"size": "0"}, "spec.model.cache.size"),
    ("access mode", "spec.model.cache", {"accessMode": "RWX"}, "spec.model.cache.accessMode"),
    ("image empty", "spec.image", "", "spec.image"),
    (
        "negative items",
        "spec.modalities.image.maxPerPrompt",
        -1,
        "spec.modalities.image.maxPerPrompt",
    ),
    ("items as text", "spec.modalities.image.maxPerPrompt", "4", "image.maxPerPrompt"),
    ("too many items", "spec.modalities.video.maxPerPrompt", 999, "video.maxPerPrompt"),
    ("frames of an image", "spec.modalities.image.maxFrames", 4, "spec.modalities.image.maxFrames"),
    ("unknown modality", "spec.modalities.smell", {}, "spec.modalities.smell"),
    ("item size of 0", "spec.modalities.image.maxSize", "0", "spec.modalities.image.maxSize"),
    (
        "replicas and autoscaling",
        "spec.frontend",
        {"replicas": 2, "autoscaling": AUTOSCALED},
        "spec.frontend.replicas",
    ),
    ("negative replicas", "spec.frontend.replicas", -1, "spec.frontend.replicas"),
    ("replicas as text", "spec.engine.replicas", "2", "spec.engine.replicas"),
    ("replicas too many", "spec.engine.replicas", 1000, "spec.engine.replicas"),
    ("no processes", "spec.frontend.processes", 0, "spec.frontend.processes"),
    ("no media workers", "spec.frontend.mediaWorkers", 0, "spec.frontend.mediaWorkers"),
    ("frontend memory Auto", "spec.frontend.hostMemory", "Auto", "spec.frontend.hostMemory"),
    ("frontend memory 0", "spec.frontend.hostMemory", "0", "spec.frontend.hostMemory"),
    ("cpu beyond any node", "spec.frontend.cpu", "1e400", "spec.frontend.cpu"),
    ("cpu of nothing", "spec.engine.cpu", "0.0000001", "spec.engine.cpu"),
    ("memory beyond any machine", "spec.engine.hostMemory", "9E", "spec.engine.hostMemory"),
    (
        "memory with an absurd exponent",
        "spec.frontend.hostMemory",
        "1e400",
        "spec.frontend.hostMemory",
    ),
    (
        "memory without a unit",
        "spec.engine.accelerator.memory",
        "80",
        "spec.engine.accelerator.memory",
    ),
    ("memory of nothing", "spec.engine.hostMemory", "0.0000001", "spec.engine.hostMemory"),
    ("cache beyond any machine", "spec.caches.kv.size", "1e400", "spec.caches.kv.size"),
    ("cache without a unit", "spec.caches.ipc.size", "16", "spec.caches.ipc.size"),
    (
        "image size below any image",
        "spec.modalities.image.resizeToPixels",
        4,
        "spec.modalities.image.resizeToPixels",
    ),
    ("cpu not a quantity", "spec.frontend.cpu", "two", "spec.frontend.cpu"),
    (
        "min above max",
        "spec.frontend.autoscaling",
        {"minReplicas": 4, "maxReplicas": 2},
        "spec.frontend.autoscaling.minReplicas",
    ),
    (
        "no max",
        "spec.frontend.autoscaling",
        {"minReplicas": 4},
        "spec.frontend.autoscaling.maxReplicas",
    ),
    (
        "queue without Prometheus",
        "spec.frontend.autoscaling",
        {"maxReplicas": 2, "metric": "PreprocessQueue"},
        "spec.frontend.autoscaling.prometheusAddress",
    ),
    (
        "CPU above 100 percent",
        "spec.frontend.autoscaling",
        {"maxReplicas": 2, "target": 150},
        "spec.frontend.autoscaling.target",
    ),
    (
        "unknown metric",
        "spec.frontend.autoscaling",
        {"maxReplicas": 2, "metric": "Memory"},
        "spec.frontend.autoscaling.metric",
    ),
    (
        "engines without Prometheus",
        "spec.engine.autoscaling",
        {"maxReplicas": 2},
        "spec.engine.autoscaling.prometheusAddress",
    ),
    (
        "Prometheus without scheme",
        "spec.engine.autoscaling",
        {"maxReplicas": 2, "prometheusAddress": "prometheus:9090"},
        "spec.engine.autoscaling.prometheusAddress",
    ),
    (
        "engines and autoscaling",
        "spec.engine",
        {"replicas": 1, "autoscaling": {"maxReplicas": 2, "prometheusAddress": "http://p"}},
        "spec.engine.replicas",
    ),
    (
        "credentials for no Prometheus",
        "spec.frontend.autoscaling",
        {"maxReplicas": 2, "prometheusAuth": {"name": "thanos"}},
        "spec.frontend.autoscaling.prometheusAuth",
    ),
    (
        "credentials of another kind",
        "spec.engine.autoscaling",
        {
            "maxReplicas": 2,
            "prometheusAddress": "https://p",
            "prometheusAuth": {"name": "thanos", "mode": "Token"},
        },
        "spec.engine.autoscaling.prometheusAuth.mode",
    ),
    ("queue limit 0", "spec.frontend.admission.maxRequests", 0, "admission.maxRequests"),
    ("media limit 0", "spec.frontend.admission.maxMedia", "0", "admission.maxMedia"),
    ("unknown device", "spec.engine.accelerator", {"type": "TPU"}, "spec.engine.accelerator.type"),
    ("no device", "spec.engine.accelerator", {"count": 0}, "spec.engine.accelerator.count"),
    (
        "resource and class",
        "spec.engine.accelerator",
        {"resourceName": "nvidia.com/gpu", "deviceClassName": "gpu"},
        "spec.engine.accelerator.deviceClassName",
    ),
    (
        "selectors without class",
        "spec.engine.accelerator",
        {"deviceSelectors": ["true"]},
        "spec.engine.accelerator.deviceSelectors",
    ),
    (
        "devices of a CPU",
        "spec.engine.accelerator",
        {"type": "CPU", "count": 2},
        "spec.engine.accelerator.type",
    ),
    (
        "device memory of a CPU",
        "spec.engine.accelerator",
        {"type": "CPU", "memory": "80Gi"},
        "spec.engine.accelerator.type",
    ),
    (
        "resource without domain",
        "spec.engine.accelerator",
        {"resourceName": "gpu"},
        "spec.engine.accelerator.resourceName",
    ),
    (
        "tensor of no devices",
        "spec.engine.parallelism",
        {"tensor": 0},
        "spec.engine.parallelism.tensor",
    ),
    ("pipelines", "spec.engine.parallelism", {"pipeline": 2}, "spec.engine.parallelism.pipeline"),
    (
        "tensor of other devices",
        "spec.engine",
        {"parallelism": {"tensor": 4}, "accelerator": {"count": 2}},
        "spec.engine.parallelism.tensor",
    ),
    (
        "tensor on a CPU",
        "spec.engine",
        {"parallelism": {"tensor": 2}, "accelerator": {"type": "CPU"}},
        "spec.engine.parallelism.tensor",
    ),
    *(
        (f"{field} and {devices}", "spec.engine", {field: value, **devices}, f"spec.engine.{field}")
        for field, value in (("lora", {"memory": "64Mi"}), ("quantization", "int8"))
        for devices in ({"accelerator": {"count": 2}}, {"parallelism": {"tensor": 2}})
    ),
    ("run ahead as a boolean", "spec.engine.runAhead", True, "spec.engine.runAhead"),
    ("nobody may wait", "spec.engine.maxWaiting", 0, "spec.engine.maxWaiting"),
    ("KV dtype", "spec.caches.kv.dtype", "int4", "spec.caches.kv.dtype"),
    ("KV in host memory", "spec.caches.kv.hostOffload", "8Gi", "spec.caches.kv.hostOffload"),
    ("eviction", "spec.caches.encoder.eviction", "FIFO", "spec.caches.encoder.eviction"),
    ("arguments", "spec.engine.extraArgs", {"seed": "1"}, "spec.engine.extraArgs"),
    (
        "files without a claim",
        "spec.security.mediaSources.localFiles",
        {},
        "spec.security.mediaSources.localFiles.claimName",
    ),
    ("context of nothing", "spec.engine.maxModelLen", 0, "spec.engine.maxModelLen"),
    ("batch too small", "spec.engine.maxNumBatchedTokens", 1, "spec.engine.maxNumBatchedTokens"),
    ("block size", "spec.engine.blockSize", 17, "spec.engine.blockSize"),
    ("dtype", "spec.engine.dtype", "int4", "spec.engine.dtype"),
    ("policy", "spec.engine.schedulingPolicy", "LIFO", "spec.engine.schedulingPolicy"),
    ("chunking as text", "spec.engine.disableChunkedMultiModalInput", "yes", "MultiModalInput"),
    ("size as number", "spec.caches.ipc.size", 4, "spec.caches.ipc.size"),
    ("size with a space", "spec.caches.ipc.size", "4 Gi", "spec.caches.ipc.size"),
    ("size in GB words", "spec.caches.processor.size", "4GB", "spec.caches.processor.size"),
    ("negative size", "spec.caches.kv.size", "-1Gi", "spec.caches.kv.size"),
    ("auto in small letters", "spec.caches.kv.size", "auto", "spec.caches.kv.size"),
    (
        "encoder size and tokens",
        "spec.caches.encoder",
        {"size": "1Gi", "tokens": 4096},
        "spec.caches.encoder.tokens",
    ),
    ("encoder of no tokens", "spec.caches.encoder", {"tokens": 0}, "spec.caches.encoder.tokens"),
    (
        "shared memory without claim",
        "spec.caches.ipc",
        {"type": "SharedMemory"},
        "spec.caches.ipc.claimName",
    ),
    ("claim without shared memory", "spec.caches.ipc", {"claimName": "c"}, "caches.ipc.claimName"),
    ("headroom of nothing", "spec.caches.headroomPercent", 0, "spec.caches.headroomPercent"),
    ("headroom of all", "spec.caches.headroomPercent", 100, "spec.caches.headroomPercent"),
    ("misfit", "spec.caches.onMisfit", "Ignore", "spec.caches.onMisfit"),
    ("strategy", "spec.rollout.strategy", "Recreate", "spec.rollout.strategy"),
    (
        "drain past the deadline",
        "spec.rollout",
        {"drainTimeoutSeconds": 600, "progressDeadlineSeconds": 300},
        "spec.rollout.drainTimeoutSeconds",
    ),
    ("privileged port", "spec.networking.port", 80, "spec.networking.port"),
    (
        "route without gateway",
        "spec.networking.httpRoute",
        {"parentRefs": []},
        "spec.networking.httpRoute.parentRefs",
    ),
    *ILLEGAL_NETWORKING,
    *ILLEGAL_SIZES,
    (
        "pool without picker",
        "spec.networking.inferencePool",
        {},
        "spec.networking.inferencePool.endpointPicker",
    ),
    (
        "domain with a scheme",
        "spec.security.mediaSources",
        {"allowedDomains": ["https://example.org"]},
        "spec.security.mediaSources.allowedDomains",
    ),
    (
        "too many domains",
        "spec.security.mediaSources",
        {"allowedDomains": [f"h{i}.example.org" for i in range(65)]},
        "spec.security.mediaSources.allowedDomains",
    ),
    (
        "api key without Secret",
        "spec.security.apiKeySecretRef",
        {"key": "k"},
        "spec.security.apiKeySecretRef.name",
    ),
    ("salt header", "spec.security.tenantSaltHeader", "X Tenant", "tenantSaltHeader"),
    ("origin", "spec.security.allowedOrigins", ["app.example.org"], "allowedOrigins"),
    ("unknown options", "spec.frontend.unknownOptions", "Drop", "spec.frontend.unknownOptions"),
    ("task", "spec.model.task", "Rank", "spec.model.task"),
    ("pooling of no embedding", "spec.model.pooling", "Mean", "spec.model.pooling"),
    ("tool format", "spec.frontend.toolFormat", "xml", "spec.frontend.toolFormat"),
    ("network policy", "spec.security.networkPolicy", "Auto", "spec.security.networkPolicy"),
    ("monitor toggle", "spec.observability.podMonitor", True, "spec.observability.podMonitor"),
    ("paused as text", "spec.paused", "true", "spec.paused"),
]
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    # rules over several parts: name, changes by path, field named
    (
        "ipc above host memory",
        {"spec.caches.ipc.size": "16Gi", "spec.engine.hostMemory": "8Gi"},
        "spec.caches.ipc.size",
    ),
    (
        "fp8 on a CPU",
        {"spec.caches.kv.dtype": "fp8", "spec.engine.accelerator.type": "CPU"},
        "spec.caches.kv.dtype",
    ),
    (
        "processor above host memory",
        {"spec.caches.processor.size": "8Gi", "spec.frontend.hostMemory": "8192Mi"},
        "spec.caches.processor.size",
    ),
    (
        "encoder above the device",
        {"spec.caches.encoder.size": "30Gi", "spec.engine.accelerator.memory": "24Gi"},
        "spec.caches.encoder.size",
    ),
    (
        "kv and encoder above the device",
        {
            "spec.caches.encoder.size": "8Gi",
            "spec.caches.kv.size": "16Gi",
            "spec.engine.accelerator.memory": "24Gi",
        },
        "spec.caches.kv.size",
    ),
]

# Changes of spec.model.cache that no update may make: before, after, the field at fault.
TRANSITIONS = [
    ({"claimName": "weights"}, {"claimName": "other"}, "cache.claimName"),
    ({"claimName": "weights"}, {}, "cache.claimName"),
    ({"claimName": "weights"}, None, "cache.claimName"),
    ({"accessMode": "ReadWriteOnce"}, {"accessMode": "ReadWriteMany"}, "cache.accessMode"),
    ({"storageClassName": "a"}, {}, "cache.storageClassName"),
    ({"size": "10Gi"}, {"size": "9Gi"}, "cache.size"),
    ({"size": "200Gi"}, {}, "cache.size"),
    ({"size": "200Gi"}, None, "cache.size"),
]
