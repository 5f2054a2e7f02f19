"""Raw pods as the few facts that a rollout depends on. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime

import msgspec

from foveal_operator.api import reasons
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import QUEUE_LABEL, REVISION_LABEL, SESSION_GROUP_LABEL
from foveal_operator.pods.diagnose import diagnose, is_gated, is_ready
from foveal_operator.rollout.view import RolloutView

LATE_SECONDS = 60.0
"""A pod that got its node so late has waited for one: its time to load begins then."""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One live pod.

    Attributes:
        ordinal: of an engine; -1 for a frontend.
        serves: ready and, for an engine, with a session.
        is_hopeless: not ready for a cause that time alone seldom heals (crash, image, no node).
        age_seconds: since its creation.
        admitted_seconds: since it has a node, 0 before that; no end where neither a queue nor a
            missing node held it back.
        load: requests in it; 0 = idle or not known.
    """

    name: str
    uid: str
    ordinal: int
    revision: str
    group: str
    is_terminating: bool
    is_ready: bool
    serves: bool
    is_hopeless: bool = False
    is_unschedulable: bool = False
    age_seconds: float = 0.0
    admitted_seconds: float = math.inf
    load: int = 0


class Pods(msgspec.Struct, frozen=True, kw_only=True):
    """All pods of a resource."""

    engines: tuple[Pod, ...]
    frontends: tuple[Pod, ...]

    def revisions(self) -> frozenset[str]:
        return frozenset(pod.revision for pod in (*self.engines, *self.frontends))


def seconds(time: str | None) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 for none."""
    if not time:
        return 0.0
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def template_revision(workload: Obj | None) -> str:
    return _template_label(workload, REVISION_LABEL)


def template_group(workload: Obj | None) -> str:
    return _template_label(workload, SESSION_GROUP_LABEL)


def _template_label(workload: Obj | None, label: str) -> str:
    if workload is None:
        return ""
    metadata = workload["spec"]["template"].get("metadata", {})
    return str(metadata.get("labels", {}).get(label, ""))


def config_maps(pod_spec: Obj) -> Iterable[str]:
    """ConfigMaps that a pod or a pod template mounts."""
    for volume in pod_spec.get("volumes", ()):
        name = volume.get("configMap", {}).get("name")
        if name:
            yield name


def read_pods(view: RolloutView, num_frontends: int) -> Pods:
    """What the view says of every pod.

    An engine has a session when it says so. One that has not answered is believed to have one when
    a frontend of its group is ready, because a frontend is ready only with a session. Without any
    frontend asked for, none can be expected.
    """
    frontends = tuple(_pod(view, pod, serves=is_ready(pod)) for pod in view.frontend_pods)
    groups = {pod.group for pod in frontends if pod.is_ready}
    engines = []
    for raw in view.engine_pods:
        name = raw["metadata"]["name"]
        known = view.sessions.get(name)
        has_session = known > 0 if known is not None else _group(raw) in groups
        serves = is_ready(raw) and (has_session or num_frontends == 0)
        engines.append(_pod(view, raw, serves=serves))
    return Pods(engines=tuple(engines), frontends=frontends)


def _group(raw: Obj) -> str:
    return str(raw["metadata"].get("labels", {}).get(SESSION_GROUP_LABEL, ""))


def _pod(view: RolloutView, raw: Obj, *, serves: bool) -> Pod:
    metadata = raw["metadata"]
    name = str(metadata["name"])
    trouble = diagnose([raw])
    suffix = name.rpartition("-")[2]
    return Pod(
        name=name,
        uid=str(metadata.get("uid", "")),
        ordinal=int(suffix) if suffix.isdecimal() else -1,
        revision=str(metadata.get("labels", {}).get(REVISION_LABEL, "")),
        group=_group(raw),
        is_terminating=bool(metadata.get("deletionTimestamp")),
        is_ready=is_ready(raw),
        serves=serves,
        is_hopeless=trouble is not None and trouble.reason is not reasons.QUEUED,
        is_unschedulable=trouble is not None and trouble.reason is reasons.UNSCHEDULABLE,
        age_seconds=max(0.0, view.now - seconds(metadata.get("creationTimestamp"))),
        admitted_seconds=_admitted_seconds(view, raw),
        load=view.load.get(name, 0),
    )


def _admitted_seconds(view: RolloutView, raw: Obj) -> float:
    metadata = raw["metadata"]
    if is_gated(raw) or metadata["name"] in view.awaiting:
        return 0.0
    is_queued = QUEUE_LABEL in metadata.get("labels", {})
    for condition in raw.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition.get("status") == "True":
            scheduled = seconds(condition.get("lastTransitionTime"))
            is_late = scheduled - seconds(metadata.get("creationTimestamp")) > LATE_SECONDS
            return max(0.0, view.now - scheduled) if is_queued or is_late else math.inf
    return 0.0 if is_queued else math.inf  # no field tells when the gates went
