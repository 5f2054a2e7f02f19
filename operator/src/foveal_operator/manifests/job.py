"""Jobs that run once per model: fetch the files, and say what the model costs.

Each name carries the hash of what the Job's result depends on, and of nothing else: a new operator
that builds the Job differently finds the old one's results under the same name. The profile is
small enough for a termination message, so its pod needs no right to write anything.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from foveal_operator.api.caches import Modalities
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import modalities_config
from foveal_operator.manifests.context import PROGRESS_PORT, Context, content_hash
from foveal_operator.manifests.model_source import model_source
from foveal_operator.manifests.overlay import lay_over
from foveal_operator.manifests.pods import (
    PROGRESS_PORT_NAME,
    QUEUE_LABEL,
    Volumes,
    container_security,
    pod_security,
    resources,
)
from foveal_runtime.plan.config import GIB
from foveal_runtime.plan.profile import profile_memory_bytes
from foveal_runtime.plan.quantity import parse_millicores

FETCH_MEMORY_BYTES = 2 * GIB
PROFILE_REQUEST_BYTES = 4 * GIB
"""Enough for most processors, which shrink what they are given; the limit is for those that do
not."""
OFFLINE = "HF_HUB_OFFLINE"
TEMPLATE = "foveal.dev/template"
"""Annotation of a Job: hash of its spec, which cannot change once it is there."""
SETTINGS = (
    "imagePullSecrets", "tolerations", "nodeSelector", "priorityClassName", "runtimeClassName",
    "hostAliases", "securityContext", "volumes",
)  # fmt: skip
"""Fields of a pod that Jobs take from the frontends' podTemplate, beside its affinity to nodes."""
CONTAINER_SETTINGS = ("env", "volumeMounts", "resources")
CPU_MILLICORES = 1000
# Not "http": a PodMonitor would scrape it, and alert when the Job is over.


def fetch_job(context: Context) -> Obj:
    """Downloads a hf:// or s3:// model into the claim; resumes where a broken one stopped."""
    model, source = context.inference.spec.model, model_source(context)
    args = ["fetch", model.uri, "--to", source.path]
    if model.revision:
        args += ["--revision", model.revision]
    # Read by the operator as it reads frontends and engines: no right to the pod is needed.
    args += ["--metrics-port", str(PROGRESS_PORT)]
    ports = [{"name": PROGRESS_PORT_NAME, "containerPort": PROGRESS_PORT, "protocol": "TCP"}]
    environment: list[Obj] = [{"name": "HOME", "value": "/tmp"}]
    credentials = [{"secretRef": {"name": model.secret_ref.name}}] if model.secret_ref else []
    result = {
        "uri": model.uri, "revision": model.revision, "claim": source.claim, "path": source.path,
    }  # fmt: skip
    return _job(
        context, "fetch", result, args, environment, FETCH_MEMORY_BYTES, read_only=False,
        envFrom=credentials, ports=ports,
    )  # fmt: skip


def profile_job(context: Context) -> Obj:
    """Predicts the model's costs from its files under the resource's limits on media."""
    spec = context.inference.spec
    image = spec.modalities.image
    limits: dict[str, object] = {
        "--max-pixels": image.max_pixels,
        **({"--resize-to-pixels": image.resize_to_pixels} if image.resize_to_pixels else {}),
        "--max-video-pixels": spec.modalities.video.max_pixels,
        "--resize-video-to-pixels": spec.modalities.video.resize_to_pixels,
        "--max-frames": spec.modalities.video.max_frames,
        "--max-seconds": spec.modalities.video.max_seconds,
        "--max-audio-seconds": spec.modalities.audio.max_seconds,
        "--dtype": spec.engine.dtype,
        **(
            {"--quantization": quantized}
            if (quantized := spec.engine.quantization) != "auto"
            else {}
        ),
        "--device": "cpu" if spec.engine.accelerator.type == "CPU" else "cuda",
    }
    args = ["profile", model_source(context).path]
    args += [word for flag, value in limits.items() for word in (flag, str(value))]
    args += ["--output", "/dev/termination-log"]
    environment = [{"name": OFFLINE, "value": "1"}, {"name": "HOME", "value": "/tmp"}]
    # The image: its processors say how large items get, its model layer what a step costs.
    result = {
        "uri": spec.model.uri, "revision": spec.model.revision, "image": context.image, **limits,
    }  # fmt: skip
    return _job(
        context, "profile", result, args, environment, profile_limit_bytes(spec.modalities),
        read_only=True,
    )  # fmt: skip


def _settings(context: Context, what: str) -> Obj:
    """What of the frontends' podTemplate a pod needs to run in this cluster: a Job runs where
    frontends run, and reaches the hub as they reach sources of media. Labels and annotations are
    for policies, and for what injects sidecars. No sidecars: with one a Job would never end. No
    queue, which is for serving. No affinity to pods, which come only after the Jobs. No
    HF_HUB_OFFLINE, with which nothing is fetched."""
    template = context.inference.spec.frontend.pod_template or {}
    overlay, metadata = template.get("spec"), template.get("metadata", {})
    spec = overlay if isinstance(overlay, dict) else {}
    if isinstance(metadata, dict) and isinstance(labels := metadata.get("labels"), dict):
        labels = {key: value for key, value in labels.items() if key != QUEUE_LABEL}
        metadata = {**metadata, "labels": labels}
    given, affinity = spec.get("containers"), spec.get("affinity")
    own = [
        {"name": what, **{key: one[key] for key in CONTAINER_SETTINGS if key in one}}
        for one in (given if isinstance(given, list) else ())
        if isinstance(one, dict) and one.get("name") == "frontend"
    ]
    for one in own:
        if isinstance(env := one.get("env"), list):
            one["env"] = [e for e in env if not (isinstance(e, dict) and e.get("name") == OFFLINE)]
    found = {key: spec[key] for key in SETTINGS if key in spec}
    if isinstance(affinity, dict) and "nodeAffinity" in affinity:
        found["affinity"] = {"nodeAffinity": affinity["nodeAffinity"]}
    return {"metadata": metadata, "spec": {**found, **({"containers": own} if own else {})}}


def _cpu_millicores(settings: Obj) -> int:
    """What a Job requests: no more than it is limited to."""
    found = CPU_MILLICORES
    for own in settings["spec"].get("containers", ()):
        with suppress(KeyError, TypeError, ValueError):  # none, or none that lay_over accepts
            found = min(found, parse_millicores(str(own["resources"]["limits"]["cpu"])))
    return found


def profile_limit_bytes(modalities: Modalities) -> int:
    """The Job's limit under the resource's limits on media, which are its arguments as well."""
    return profile_memory_bytes(modalities_config(modalities))


def _job(
    context: Context,
    what: str,
    result: Obj,
    args: list[str],
    environment: list[Obj],
    memory_bytes: int,
    *,
    read_only: bool,
    **container: Any,
) -> Obj:
    """`result`: what its result depends on. Another release must put the same into it, or every
    model is fetched and profiled once more; a test holds it to that."""
    volumes, source, settings = Volumes(), model_source(context), _settings(context, what)
    cpu_millicores = _cpu_millicores(settings)
    volumes.volumes.append(source.volume())
    volumes.mounts.append(source.mount(read_only=read_only))
    volumes.add({"name": "tmp", "emptyDir": {"sizeLimit": "8Gi"}}, "/tmp")
    pod = {
        "serviceAccountName": context.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # A pod for each attempt: with OnFailure the last pod is deleted when the Job gives up, and
        # with it the reason.
        "restartPolicy": "Never",
        "securityContext": pod_security(),
        "containers": [
            {
                "name": what,
                "image": context.image,
                "command": ["foveal-runtime"],
                "args": args,
                "env": environment,
                "resources": resources(cpu_millicores, memory_bytes, None, PROFILE_REQUEST_BYTES),
                "securityContext": container_security(),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": volumes.mounts,
                **{key: value for key, value in container.items() if value},
            }
        ],
        "volumes": volumes.volumes,
    }
    spec: Obj = {
        "backoffLimit": 6,
        "template": {"metadata": {"labels": context.labels("model")}, "spec": pod},
    }
    spec["template"] = lay_over(
        spec["template"], settings, "spec.frontend.podTemplate", what, "frontend"
    )
    suffix = f"{what}-{content_hash(result)}"
    body = context.object("batch/v1", "Job", suffix, "model", spec=spec)
    annotations = {TEMPLATE: content_hash(spec)}
    return {**body, "metadata": {**body["metadata"], "annotations": annotations}}
