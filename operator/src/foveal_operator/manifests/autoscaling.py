"""HorizontalPodAutoscaler for CPU, KEDA ScaledObjects for what Prometheus knows.

The autoscaler targets the workload, never the resource, so nothing in Git drifts.
"""

from __future__ import annotations

from foveal_operator.api.workloads import EngineAutoscaling, FrontendAutoscaling
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context, Role

_TARGETS = {"CPU": 70, "PreprocessQueue": 4, "Concurrency": 64}
_ENGINE_TARGETS = {"RunningRequests": 64, "KVUsage": 80}


def frontend_autoscaler(context: Context, scaling: FrontendAutoscaling) -> Obj:
    """An HPA for metric CPU, else a ScaledObject."""
    target = scaling.target or _TARGETS[scaling.metric]
    if scaling.metric != "CPU":
        assert scaling.prometheus_address is not None
        pods = _series(context, "frontend")
        query = {
            # Seconds spent per second = items being prepared at a time (Little's law).
            "PreprocessQueue": f"sum(rate(foveal_media_stage_seconds_sum{pods}[1m]))",
            "Concurrency": f"sum(foveal_requests_inflight{pods})",
        }[scaling.metric]
        return _scaled_object(context, "frontend", scaling, query, target)
    spec = {
        "scaleTargetRef": _target(context, "frontend"),
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [
            {
                "type": "Resource",
                "resource": {
                    "name": "cpu",
                    "target": {"type": "Utilization", "averageUtilization": target},
                },
            }
        ],
        "behavior": _behavior(scaling),
    }
    return context.object(
        "autoscaling/v2", "HorizontalPodAutoscaler", "frontend", "frontend", spec=spec
    )


def engine_autoscaler(context: Context, scaling: EngineAutoscaling) -> Obj:
    """A ScaledObject over running requests or KV use."""
    target = scaling.target or _ENGINE_TARGETS[scaling.metric]
    pods = _series(context, "engine")
    query = {
        "RunningRequests": f"sum(vllm:num_requests_running{pods})",
        "KVUsage": f"100 * sum(vllm:kv_cache_usage_perc{pods})",
    }[scaling.metric]
    return _scaled_object(context, "engine", scaling, query, target)


def _series(context: Context, role: Role) -> str:
    """Selects by the labels that the PodMonitor gives: a pattern of pods' names would take those of
    a resource whose name begins with this one's, and frontends repeat engines' gauges."""
    namespace = context.inference.namespace
    return f'{{namespace="{namespace}",resource="{context.name}",role="{role}"}}'


def _target(context: Context, role: Role) -> Obj:
    kind = "Deployment" if role == "frontend" else "StatefulSet"
    return {"apiVersion": "apps/v1", "kind": kind, "name": context.child(role)}


def _behavior(scaling: FrontendAutoscaling | EngineAutoscaling) -> Obj:
    return {"scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_stabilization_seconds}}


def _scaled_object(
    context: Context,
    role: Role,
    scaling: FrontendAutoscaling | EngineAutoscaling,
    query: str,
    target: int,
) -> Obj:
    trigger: Obj = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": scaling.prometheus_address,
            "query": query,
            "threshold": str(target),
        },
    }
    if scaling.prometheus_auth:
        trigger["metadata"]["authModes"] = scaling.prometheus_auth.mode.lower()
        trigger["authenticationRef"] = {"name": scaling.prometheus_auth.name}
    spec = {
        "scaleTargetRef": _target(context, role),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(scaling)}},
        "triggers": [trigger],
    }
    return context.object("keda.sh/v1alpha1", "ScaledObject", role, role, spec=spec)
