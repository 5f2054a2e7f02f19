"""Input and output of a rollout decision: the structs between the reconciler and the rules, and
raw pods as the few facts that a rollout depends on. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.common.clock import seconds
from foveal_operator.kube.kinds import CLAIM_TEMPLATE, CONFIG_MAP
from foveal_operator.kube.types import Obj, ObjectKey, condition, label_of
from foveal_operator.manifests.pods import QUEUE_LABEL, REVISION_LABEL, SESSION_GROUP_LABEL
from foveal_operator.pods.diagnose import diagnose, is_gated, is_ready
from foveal_runtime.plan.quantity import parse

Body = dict[str, Any]


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over one resource; objects are raw, absent ones None or empty.

    Attributes:
        stateful_set, deployment: as wanted by manifests.desired; None while no pods are asked for.
        record: the live ConfigMap `record_name(name)`, the rollout's only memory.
        engine_pods, frontend_pods: every pod of the role that is not finished, draining ones too.
        free_devices: devices of the engines' kind that no pod has asked for; None = not known.
        awaiting: pods for which there is no node yet; the deadline does not run meanwhile, unless
            there is a good revision to go back to.
        sessions: engine pod -> frontends that have a session with it, of pods that answered.
        load: engine pod -> requests in it, of pods that answered; the idle go first.
        announced: `status.rolloutStrategy` as stored: an outage is announced before it begins.
        refused: why the StatefulSet can create no pod, in the API server's words.
        now: seconds since the epoch.
    """

    inference: InferenceSpec
    stateful_set: Obj | None
    deployment: Obj | None
    live_stateful_set: Obj | None = None
    live_deployment: Obj | None = None
    record: Obj | None = None
    engine_pods: tuple[Obj, ...] = ()
    frontend_pods: tuple[Obj, ...] = ()
    free_devices: int | None = None
    awaiting: frozenset[str] = frozenset()
    sessions: Mapping[str, int] = {}
    load: Mapping[str, int] = {}
    announced: str = ""
    refused: str = ""
    now: float


class RolloutDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, in this order: record, stateful_set, deployment, delete_pods.

    Attributes:
        record: the ConfigMap to apply; None = as it is.
        stateful_set, deployment: bodies for server-side apply; None = leave the live one alone.
            A body with metadata.resourceVersion is refused (409) when the live one has changed;
            decide again then.
        delete_pods: (name, uid) of engine pods to delete with that uid as precondition.
        strategy: for status.rolloutStrategy: what was chosen and why; the outage, if there is one.
        message: where the rollout stands; "" when there is none.
        in_progress: some pod or template is not of the revision that is asked for.
        keep: ConfigMaps and claim templates that pods or the last good revision refer to; never
            pruned.
        next_check_seconds: decide again after so long even if nothing changes; None = no need.
    """

    record: Body | None = None
    stateful_set: Body | None = None
    deployment: Body | None = None
    delete_pods: tuple[tuple[str, str], ...] = ()
    strategy: str = ""
    message: str = ""
    in_progress: bool = False
    deadline_exceeded: bool = False
    rolled_back: bool = False
    keep: frozenset[ObjectKey] = frozenset()
    next_check_seconds: float | None = None


def record_name(name: str) -> str:
    """The ConfigMap that remembers a resource's last good revision and its present rollout."""
    return f"{name}-rollout"


LATE_SECONDS = 60.0
"""A pod that got its node so late has waited for one: its time to load begins then."""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One live pod.

    Attributes:
        ordinal: of an engine; -1 for a frontend.
        serves: ready and, for an engine, with a session.
        is_hopeless: not ready for a cause that time alone seldom heals (crash, image, no node).
        is_queued: a queue has not admitted it yet.
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
    is_queued: bool = False
    age_seconds: float = 0.0
    admitted_seconds: float = math.inf
    load: int = 0


class Pods(msgspec.Struct, frozen=True, kw_only=True):
    """All pods of a resource."""

    engines: tuple[Pod, ...]
    frontends: tuple[Pod, ...]


def template_revision(workload: Obj | None) -> str:
    return _template_label(workload, REVISION_LABEL)


def template_group(workload: Obj | None) -> str:
    return _template_label(workload, SESSION_GROUP_LABEL)


def _template_label(workload: Obj | None, label: str) -> str:
    if workload is None:
        return ""
    metadata = workload["spec"]["template"].get("metadata", {})
    return str(metadata.get("labels", {}).get(label, ""))


def takes_no_more(template: Obj, pod: Obj) -> bool:
    """Whether a quota that has room for the pod has room for one of the template in its place."""
    before = _asked(pod)
    return all(amount <= before.get(what, 0) for what, amount in _asked(template).items())


def _asked(pod: Obj) -> dict[tuple[str, str], Fraction]:
    """Requests and limits of all containers together."""
    found: dict[tuple[str, str], Fraction] = {}
    for container in pod.get("spec", {}).get("containers") or ():
        for part in ("requests", "limits"):
            for name, amount in (container.get("resources", {}).get(part) or {}).items():
                found[part, name] = found.get((part, name), Fraction(0)) + parse(str(amount))
    return found


def objects_in_use(pods: Iterable[Obj]) -> set[ObjectKey]:
    """ConfigMaps that pods or pod templates mount, and claim templates that they name."""
    found = set[ObjectKey]()
    for pod in pods:
        spec = pod.get("spec", {})
        mounted = [volume.get("configMap", {}) for volume in spec.get("volumes") or ()]
        found |= {(CONFIG_MAP.name, str(one["name"])) for one in mounted if one.get("name")}
        named = [claim.get("resourceClaimTemplateName") for claim in spec.get("resourceClaims", ())]
        found |= {(CLAIM_TEMPLATE.name, str(name)) for name in named if name}
    return found


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
        group = label_of(raw, SESSION_GROUP_LABEL)
        has_session = known > 0 if known is not None else group in groups
        serves = is_ready(raw) and (has_session or num_frontends == 0)
        engines.append(_pod(view, raw, serves=serves))
    return Pods(engines=tuple(engines), frontends=frontends)


def _pod(view: RolloutView, raw: Obj, *, serves: bool) -> Pod:
    metadata = raw["metadata"]
    name = str(metadata["name"])
    failure = diagnose([raw])
    suffix = name.rpartition("-")[2]
    return Pod(
        name=name,
        uid=str(metadata.get("uid", "")),
        ordinal=int(suffix) if suffix.isdecimal() else -1,
        revision=label_of(raw, REVISION_LABEL),
        group=label_of(raw, SESSION_GROUP_LABEL),
        is_terminating=bool(metadata.get("deletionTimestamp")),
        is_ready=is_ready(raw),
        serves=serves,
        is_hopeless=failure is not None and failure.reason is not reasons.QUEUED,
        is_unschedulable=failure is not None and failure.reason is reasons.UNSCHEDULABLE,
        is_queued=failure is not None and failure.reason is reasons.QUEUED,
        age_seconds=max(0.0, view.now - seconds(metadata.get("creationTimestamp"))),
        admitted_seconds=_admitted_seconds(view, raw),
        load=view.load.get(name, 0),
    )


def _admitted_seconds(view: RolloutView, raw: Obj) -> float:
    metadata = raw["metadata"]
    if is_gated(raw) or metadata["name"] in view.awaiting:
        return 0.0
    is_queued = QUEUE_LABEL in metadata.get("labels", {})
    found = condition(raw, "PodScheduled")
    if found.get("status") == "True":
        scheduled = seconds(found.get("lastTransitionTime"))
        is_late = scheduled - seconds(metadata.get("creationTimestamp")) > LATE_SECONDS
        return max(0.0, view.now - scheduled) if is_queued or is_late else math.inf
    return 0.0 if is_queued else math.inf  # no field tells when the gates went
