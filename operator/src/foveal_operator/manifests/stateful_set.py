"""The engine StatefulSet: stable names, all pods at once, replaced only by the operator.

OnDelete, because the operator picks the engine to restart (idle first, or the one whose device
must be freed). A stable ordinal is a stable mirror identity.
"""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.config_map import engine_config_map
from foveal_operator.manifests.context import (
    DEFAULT_RESOURCE_NAME,
    ENGINE_EVENTS_PORT,
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    Context,
)
from foveal_operator.manifests.documents import (
    SHARED_DIRECTORY,
    WARM_DIRECTORY,
    engine_cpu_millicores,
)
from foveal_operator.manifests.pods import pod_template, resources, role_container, role_volumes

CURVE_KEYS = ("server-public", "server-secret", "client-public")
CLAIM_NAME = "devices"


def engine_stateful_set(context: Context) -> Obj:
    """One engine pod for each replica, each with its devices."""
    spec, plan = context.inference.spec, context.budgets
    config_map = engine_config_map(context)["metadata"]["name"]
    volumes = role_volumes(context, config_map, plan.engine_shm_bytes, CURVE_KEYS)
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
    replicas = engine_replicas(context)
    if replicas is not None:
        body = {"replicas": replicas, **body}
    return context.object("apps/v1", "StatefulSet", "engine", "engine", spec=body)


def engine_replicas(context: Context) -> int | None:
    """What the operator applies; None when the autoscaler has taken over."""
    engine, facts = context.inference.spec.engine, context.facts
    if engine.autoscaling is None:
        return 1 if engine.replicas is None else engine.replicas
    if facts.engines_handed_over:
        return None
    return facts.live_engines or engine.autoscaling.min_replicas


def _devices(context: Context) -> tuple[Obj, Obj]:
    """Container resources and pod fields that give an engine its devices."""
    engine = context.inference.spec.engine
    accelerator = engine.accelerator
    if accelerator.type == "CPU":
        return {}, {}
    if accelerator.device_class_name:
        template = context.child("engine-devices")
        claim = {"name": CLAIM_NAME, "resourceClaimTemplateName": template}
        return {"claims": [{"name": CLAIM_NAME}]}, {"resourceClaims": [claim]}
    name = accelerator.resource_name or DEFAULT_RESOURCE_NAME
    toleration = {"key": name, "operator": "Exists", "effect": "NoSchedule"}
    return {name: str(engine.num_devices)}, {"tolerations": [toleration]}
