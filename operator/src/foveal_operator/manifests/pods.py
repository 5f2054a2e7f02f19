"""Common parts of both workloads' pods: security, volumes, probes, the one container.

Called by workloads.py and job.py. Every pod meets restricted Pod Security; every
memory-backed volume has a size limit that the budgets count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveal_operator.api.operations import SecretKey
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context, Role, content_hash
from foveal_operator.manifests.documents import CURVE_DIRECTORY, SECRETS_DIRECTORY
from foveal_operator.manifests.model_source import model_source
from foveal_operator.manifests.overlay import lay_over
from foveal_runtime.plan.quantity import format_bytes, format_millicores

CONFIG_DIRECTORY = "/etc/foveal/config"
USER_ID = 10001
DRAIN_MARGIN_SECONDS = 15
LAME_DUCK_SECONDS = 5
"""A frontend told to end still takes requests while nodes and gateways unlearn its address;
without it a rollout costs a few refused connections. Part of the margin."""
PROGRESS_PORT_NAME = "progress"
REVISION_LABEL = "foveal.dev/revision"
START_SECONDS = 1800
"""Until /livez must answer, which it does before anything is loaded. How long loading may take is
rollout.progressDeadlineSeconds, which the operator keeps: no probe has it, so no change of it
restarts a pod."""
HUNG_GRACE_SECONDS = 10
"""What answers no probe for a minute drains nothing: with the pod's own grace period a hung engine
was back after 196 s."""
SESSION_GROUP_LABEL = "foveal.dev/session-group"
"""Frontends and engines of one group understand each other: same runtime image, same model."""
SECRET_REVISION = "foveal.dev/secret-revision"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TMP_SIZE = "2Gi"
_SECRET_FIELDS = frozenset(
    {
        "nodePublishSecretRef",
        "secret",
        "secretKeyRef",
        "secretName",
        "secretProviderClass",
        "secretRef",
    }
)
"""Of volumes, projected sources, environments and drivers' credentials."""


def container_security() -> Obj:
    """Of every container; new on each call, as all that a builder returns."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security() -> Obj:
    """Of every pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


class Volumes:
    """Collects volumes and their mounts side by side, so that neither is forgotten."""

    def __init__(self) -> None:
        self.volumes: list[Obj] = []
        self.mounts: list[Obj] = []

    def add(self, volume: Obj, path: str, *, read_only: bool = False) -> None:
        self.volumes.append(volume)
        mount: Obj = {"name": volume["name"], "mountPath": path}
        if read_only:
            mount["readOnly"] = True
        self.mounts.append(mount)

    def add_secret(self, name: str, secret: str, keys: tuple[str, ...], path: str) -> None:
        """Only the named keys, readable by the pod's group alone."""
        source = {
            "secretName": secret,
            "defaultMode": 0o440,
            "items": [{"key": key, "path": key} for key in keys],
        }
        self.add({"name": name, "secret": source}, path, read_only=True)

    def add_claim(self, name: str, claim: str, path: str, *, read_only: bool = False) -> None:
        source = {"claimName": claim}
        self.add({"name": name, "persistentVolumeClaim": source}, path, read_only=read_only)


def role_volumes(
    context: Context, config_map: Obj, shm_bytes: int, curve_keys: tuple[str, ...]
) -> Volumes:
    """Configuration, model, keys, /dev/shm and /tmp."""
    volumes = Volumes()
    source = {"name": config_map["metadata"]["name"]}
    volumes.add({"name": "config", "configMap": source}, CONFIG_DIRECTORY, read_only=True)
    model = model_source(context)
    volumes.volumes.append(model.volume())
    volumes.mounts.append(model.mount())
    volumes.add_secret("curve", context.child("curve"), curve_keys, CURVE_DIRECTORY)
    shm = {"medium": "Memory", "sizeLimit": format_bytes(shm_bytes)}
    volumes.add({"name": "shm", "emptyDir": shm}, "/dev/shm")
    volumes.add({"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}}, "/tmp")
    return volumes


def add_user_secret(volumes: Volumes, purpose: str, ref: SecretKey | None) -> None:
    if ref is not None:
        path = f"{SECRETS_DIRECTORY}/{purpose}"
        volumes.add_secret(f"secret-{purpose}", ref.name, (ref.key,), path)


def service_account(context: Context) -> Obj:
    """Of all pods: no token, no Role. They never talk to the API server."""
    return context.object(
        "v1", "ServiceAccount", "", "frontend", automountServiceAccountToken=False
    )


def environment() -> list[Obj]:
    """What documents may ask for, and a home that can be written."""
    fields = {
        "NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
        "POD_NAME": "metadata.name",
    }
    found: list[Obj] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    return [*found, {"name": "HF_HUB_OFFLINE", "value": "1"}, {"name": "HOME", "value": "/tmp"}]


def resources(
    cpu_millicores: int, memory_bytes: int, devices: Obj | None = None, requested_bytes: int = 0
) -> Obj:
    """Memory is requested as it is limited: a cache must never find its memory taken. Jobs, which
    may be tried again, can request less."""
    memory = format_bytes(memory_bytes)
    requested = format_bytes(min(requested_bytes or memory_bytes, memory_bytes))
    found: Obj = {
        "requests": {"cpu": format_millicores(cpu_millicores), "memory": requested},
        "limits": {"memory": memory},
    }
    for key, value in (devices or {}).items():
        if key == "claims":
            found["claims"] = value
        else:
            found["requests"][key] = found["limits"][key] = value
    return found


def probe(path: str, period: int, failures: int) -> Obj:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 3,
    }


def role_container(
    context: Context,
    role: Role,
    port: int,
    volumes: Volumes,
    needs: Obj,
    extra_ports: Sequence[Obj] = (),
) -> Obj:
    """The one container of a frontend or engine pod."""
    pause: Obj = {"preStop": {"sleep": {"seconds": LAME_DUCK_SECONDS}}}
    return {
        "name": role,
        "image": context.image,
        "command": ["foveal-runtime"],
        "args": [role, "--config", f"{CONFIG_DIRECTORY}/{role}.json"],
        "env": environment(),
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}, *extra_ports],
        "resources": needs,
        "securityContext": container_security(),
        "startupProbe": probe("/livez", 5, START_SECONDS // 5),
        "readinessProbe": probe("/readyz", 2, 2),
        "livenessProbe": {
            **probe("/livez", 10, 6),
            "terminationGracePeriodSeconds": HUNG_GRACE_SECONDS,
        },
        **({"lifecycle": pause} if role == "frontend" else {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": volumes.mounts,
    }


def session_group(context: Context) -> str:
    """What decides wire version, model namespace and CURVE keys. Other images may speak the same
    version, but only their processes know; to take them for strangers costs a rollout some
    patience, no more."""
    source, facts = model_source(context), context.facts
    # The last part stands for a revision, so that groups keep the names that they have.
    parts = [context.image, source.image or source.claim, source.path, ""]
    return content_hash([*parts, facts.key_generation] if facts.key_generation else parts)


def pod_template(
    context: Context, role: Role, container: Obj, volumes: Volumes, **extra: Any
) -> Obj:
    """The finished template, the user's overlay on it, labelled with the hash of what it says."""
    spec = context.inference.spec
    overlay = spec.frontend.pod_template if role == "frontend" else spec.engine.pod_template
    grace = spec.rollout.drain_timeout_seconds + DRAIN_MARGIN_SECONDS
    metadata: Obj = {
        "labels": {**context.labels(role), SESSION_GROUP_LABEL: session_group(context)}
    }
    if role == "engine" and spec.engine.queue_name:
        metadata["labels"][QUEUE_LABEL] = spec.engine.queue_name
    if spec.security.secret_revision and (role == "frontend" or _names_secret(overlay)):
        metadata["annotations"] = {SECRET_REVISION: spec.security.secret_revision}
    template: Obj = {
        "metadata": metadata,
        "spec": {
            "serviceAccountName": context.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "terminationGracePeriodSeconds": grace,
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": context.selector(role)},
                }
            ],
            "containers": [container],
            "volumes": volumes.volumes,
            **extra,
        },
    }
    template = lay_over(template, overlay, f"spec.{role}.podTemplate", role)
    revision = content_hash(template)
    labels = {**template["metadata"]["labels"], REVISION_LABEL: revision}
    return {**template, "metadata": {**template["metadata"], "labels": labels}}


def _names_secret(overlay: Any) -> bool:
    """Whether a podTemplate reads a Secret of the user's: nothing else in an engine's pod does."""
    if isinstance(overlay, list):
        return any(_names_secret(item) for item in overlay)
    if not isinstance(overlay, dict):
        return False
    return bool(overlay.keys() & _SECRET_FIELDS) or any(map(_names_secret, overlay.values()))
