"""The frontend Deployment and the engine StatefulSet, and what sets how many pods each has.

Frontends are stateless: surge is free, and readiness and a grace period drain them. Engines have
stable names, which are stable mirror identities, and are replaced by the operator alone (OnDelete),
which picks the one to restart: an idle one first, or the one whose device must be freed.
"""

from __future__ import annotations

from foveal_operator.api.autoscaling import EngineAutoscaling, FrontendAutoscaling
from foveal_operator.api.workloads import Accelerator, Engine, Frontend
from foveal_operator.kube.kinds import FIELD_MANAGER
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import (
    ENGINE_EVENTS_PORT,
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    Context,
    Role,
    content_hash,
)
from foveal_operator.manifests.documents import (
    FILES_DIRECTORY,
    SHARED_DIRECTORY,
    WARM_DIRECTORY,
    config_map,
    engine_cpu_millicores,
    frontend_cpu_millicores,
)
from foveal_operator.manifests.pods import (
    add_user_secret,
    pod_template,
    resources,
    role_container,
    role_volumes,
)

FRONTEND_KEYS = ("server-public", "client-public", "client-secret")
ENGINE_KEYS = ("server-public", "server-secret", "client-public")
CLAIM_NAME = "devices"
UNHASHED_DEVICES = "engine-devices"
"""Suffix of every claim template before their names had a hash."""
_TARGETS = {"CPU": 70, "PreprocessQueue": 4, "Concurrency": 64}
_ENGINE_TARGETS = {"RunningRequests": 64, "KVUsage": 80}


def frontend_deployment(context: Context) -> Obj:
    """One frontend pod for each replica; `replicas` is left out once an autoscaler owns it."""
    spec, plan = context.inference.spec, context.budgets
    volumes = role_volumes(
        context, config_map(context, "frontend"), plan.frontend_shm_bytes, FRONTEND_KEYS
    )
    add_user_secret(volumes, "api", spec.security.api_key_secret_ref)
    add_user_secret(volumes, "admin", spec.security.admin_key_secret_ref)
    if spec.security.injection:
        add_user_secret(volumes, "injection", spec.security.injection.key_secret_ref)
    if spec.caches.ipc.claim_name:
        volumes.add_claim("shared", spec.caches.ipc.claim_name, SHARED_DIRECTORY)
    if spec.security.media_sources.local_files:
        claim = spec.security.media_sources.local_files.claim_name
        volumes.add_claim("files", claim, FILES_DIRECTORY, read_only=True)
    needs = resources(frontend_cpu_millicores(context), plan.frontend.limit_bytes)
    container = role_container(context, "frontend", spec.networking.port, volumes, needs)
    body: Obj = {
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0},
        },
        "selector": {"matchLabels": context.selector("frontend")},
        "template": pod_template(context, "frontend", container, volumes),
    }
    facts = context.facts
    replicas = _replicas(spec.frontend, facts.live_frontends, facts.frontends_handed_over)
    return context.object(
        "apps/v1", "Deployment", "frontend", "frontend", spec={**replicas, **body}
    )


def engine_stateful_set(context: Context) -> Obj:
    """One engine pod for each replica, each with its devices."""
    spec, plan = context.inference.spec, context.budgets
    volumes = role_volumes(
        context, config_map(context, "engine"), plan.engine_shm_bytes, ENGINE_KEYS
    )
    if spec.caches.ipc.claim_name:
        volumes.add_claim("shared", spec.caches.ipc.claim_name, SHARED_DIRECTORY)
    if spec.caches.encoder.warm_set:
        volumes.add_claim("warm", spec.caches.encoder.warm_set.claim_name, WARM_DIRECTORY)
    devices, extra = _devices(context)
    needs = resources(engine_cpu_millicores(context), plan.engine.limit_bytes, devices)
    ports = {"wire": ENGINE_PORT}
    if spec.networking.cache_events:
        ports |= {"events": ENGINE_EVENTS_PORT, "replay": ENGINE_EVENTS_PORT + 1}
    more = [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()]
    container = role_container(context, "engine", ENGINE_HTTP_PORT, volumes, needs, more)
    body: Obj = {
        "serviceName": context.child("engine"),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": context.selector("engine")},
        "template": pod_template(context, "engine", container, volumes, **extra),
    }
    facts = context.facts
    replicas = _replicas(spec.engine, facts.live_engines, facts.engines_handed_over)
    return context.object("apps/v1", "StatefulSet", "engine", "engine", spec={**replicas, **body})


def _devices(context: Context) -> tuple[Obj, Obj]:
    """Container resources and pod fields that give an engine its devices."""
    engine = context.inference.spec.engine
    accelerator = engine.accelerator
    if accelerator.type == "CPU":
        return {}, {}
    if accelerator.device_class_name:
        template = resource_claim_template(context, accelerator)["metadata"]["name"]
        claim = {"name": CLAIM_NAME, "resourceClaimTemplateName": template}
        return {"claims": [{"name": CLAIM_NAME}]}, {"resourceClaims": [claim]}
    name = accelerator.extended_resource
    toleration = {"key": name, "operator": "Exists", "effect": "NoSchedule"}
    return {name: str(engine.num_devices)}, {"tolerations": [toleration]}


def resource_claim_template(context: Context, accelerator: Accelerator) -> Obj:
    """Dynamic resource allocation: the devices of one engine, claimed from a DeviceClass.

    Immutable in Kubernetes, so it is named by the hash of what it holds. One without a hash is kept
    while it says what is wanted: another name would restart engines for nothing.
    """
    exactly: Obj = {
        "deviceClassName": accelerator.device_class_name,
        "allocationMode": "ExactCount",
        "count": context.inference.spec.engine.num_devices,
    }
    if accelerator.device_selectors:
        exactly["selectors"] = [
            {"cel": {"expression": expression}} for expression in accelerator.device_selectors
        ]
    spec = {"spec": {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}}
    is_unhashed = _claimed(spec) == _claimed(context.facts.unhashed_devices)
    suffix = UNHASHED_DEVICES if is_unhashed else f"{UNHASHED_DEVICES}-{content_hash(spec)}"
    return context.object(
        "resource.k8s.io/v1", "ResourceClaimTemplate", suffix, "engine", spec=spec
    )


def _claimed(spec: Obj) -> list[list[object]]:
    """What a claim template asks for, without what the API server has filled in."""
    requests = spec.get("spec", {}).get("devices", {}).get("requests", ())
    fields = ("deviceClassName", "allocationMode", "count", "selectors")
    return [[one.get("exactly", {}).get(field) for field in fields] for one in requests]


def live_replicas(workload: Obj | None) -> int | None:
    """spec.replicas as it stands; None where there is no workload."""
    return None if workload is None else int(workload.get("spec", {}).get("replicas", 1))


def is_handed_over(workload: Obj | None) -> bool:
    """Somebody other than the operator owns spec.replicas, by metadata.managedFields.

    From then on the operator leaves the field out of what it applies. Until then it applies the
    live value: leaving it out as its only owner would reset the workload to one pod.
    """
    if workload is None:
        return False
    return any(
        entry.get("manager") != FIELD_MANAGER
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in workload["metadata"].get("managedFields", ())
    )


def _replicas(part: Engine | Frontend, live: int | None, handed_over: bool) -> Obj:
    """What the operator applies of spec.replicas; nothing when the autoscaler has taken over."""
    if part.autoscaling is None:
        return {"replicas": 1 if part.replicas is None else part.replicas}
    return {} if handed_over else {"replicas": live or part.autoscaling.min_replicas}


def pod_disruption_budget(context: Context, role: Role) -> Obj:
    """A node drain may evict one pod of the role at a time. A pod that is not ready may always be
    evicted: one that crashes must not keep a node from being drained."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": context.selector(role)},
    }
    return context.object("policy/v1", "PodDisruptionBudget", role, role, spec=spec)


def frontend_autoscaler(context: Context, scaling: FrontendAutoscaling) -> Obj:
    """A HorizontalPodAutoscaler for CPU, else a KEDA ScaledObject. Both target the workload, never
    the resource, so nothing in Git drifts."""
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
