"""The frontend Deployment: stateless, surge is free, drained by readiness and grace period."""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.config_map import frontend_config_map
from foveal_operator.manifests.context import Context
from foveal_operator.manifests.documents import (
    FILES_DIRECTORY,
    SHARED_DIRECTORY,
    frontend_cpu_millicores,
)
from foveal_operator.manifests.pods import (
    add_user_secret,
    pod_template,
    resources,
    role_container,
    role_volumes,
)

CURVE_KEYS = ("server-public", "client-public", "client-secret")


def frontend_deployment(context: Context) -> Obj:
    """One frontend pod for each replica; `replicas` is left out once an autoscaler owns it."""
    spec, plan = context.inference.spec, context.budgets
    config_map = frontend_config_map(context)["metadata"]["name"]
    volumes = role_volumes(context, config_map, plan.frontend_shm_bytes, CURVE_KEYS)
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
    container = role_container(
        context, "frontend", spec.networking.port, volumes, needs, extra_ports=[]
    )
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
    replicas = frontend_replicas(context)
    if replicas is not None:
        body = {"replicas": replicas, **body}
    return context.object("apps/v1", "Deployment", "frontend", "frontend", spec=body)


def frontend_replicas(context: Context) -> int | None:
    """What the operator applies; None when the autoscaler has taken over."""
    frontend, facts = context.inference.spec.frontend, context.facts
    if frontend.autoscaling is None:
        return 1 if frontend.replicas is None else frontend.replicas
    if facts.frontends_handed_over:
        return None
    # Until the autoscaler owns the field the live value stays applied: leaving it out too early
    # would reset the workload to one pod.
    return facts.live_frontends or frontend.autoscaling.min_replicas
