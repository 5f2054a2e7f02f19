"""Observed objects of one resource, and the status reported for them."""

from __future__ import annotations

from typing import Any

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Condition, MultiModalInferenceStatus
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import desired
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.model.flow import ModelDecision
from foveal_operator.pods.metrics import PodReports
from foveal_operator.rollout import RolloutDecision
from foveal_operator.status.report import report
from foveal_operator.status.verdicts import Observed
from tests.support.budget_samples import VLM
from tests.support.regenerate import FACTS, planned
from tests.support.samples import put, resource

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
BASE = put(resource(), "spec.engine.replicas", 2)


def pod(name: str, revision: str = "", *, ready: bool = True, **status: Any) -> Obj:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    conditions += status.pop("conditions", [])
    return {
        "metadata": {"name": name, "labels": {REVISION_LABEL: revision}},
        "status": {"conditions": conditions, **status},
    }


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "engine", **state}]}


def ended(code: int, message: str = "", reason: str = "Error", at: str = NOW) -> dict[str, Any]:
    terminated = {"exitCode": code, "message": message, "reason": reason, "finishedAt": at}
    return container(
        lastState={"terminated": terminated}, state={"waiting": {"reason": "CrashLoopBackOff"}}
    )


def revisions(obj: Obj) -> tuple[str, str]:
    inference, plan = planned(obj)
    objects = desired(inference, plan, FACTS)
    found = []
    for kind in ("Deployment", "StatefulSet"):
        (body,) = objects.of_kind(kind)
        found.append(body["spec"]["template"]["metadata"]["labels"][REVISION_LABEL])
    return found[0], found[1]


def observed_of(
    model: Reason = reasons.WAITING,
    model_message: str = "",
    takes: tuple[str, ...] | None = None,
    **values: Any,
) -> Observed:
    """What a pass has observed; values of pods' reports or of the rollout's decision go there."""
    reported = {key: values.pop(key) for key in PodReports.__struct_fields__ if key in values}
    told = ("strategy", "message", "deadline_exceeded")
    decided = {key: values.pop(key) for key in told if key in values}
    profile = None
    if takes is not None:
        items = dict.fromkeys(takes, VLM.items["image"])
        profile = msgspec.structs.replace(VLM, items=items)
    decision = ModelDecision(profile=profile, reason=model, message=model_message)
    own = {"now": NOW, "model": decision, **values}
    return Observed(reports=PodReports(**reported), rollout=RolloutDecision(**decided), **own)


def status_of(
    obj: Obj = BASE, previous: tuple[Condition, ...] = (), **observed: Any
) -> MultiModalInferenceStatus:
    inference, plan = planned(obj)
    objects = desired(inference, plan, FACTS)
    values = {"model": reasons.RESOLVED, **observed}
    return report(inference, None, plan, objects, observed_of(**values), 3, previous)


def serving(obj: Obj = BASE) -> dict[str, Any]:
    frontend, engine = revisions(obj)
    return {
        "deployment": {"metadata": {"name": "qwen-frontend"}, "spec": {"replicas": 1}},
        "stateful_set": {"metadata": {"name": "qwen-engine"}, "spec": {"replicas": 2}},
        "frontend_pods": (pod("f-0", frontend),),
        "engine_pods": (pod("e-0", engine), pod("e-1", engine)),
        "sessions_up": 2,
        "sessions_wanted": 2,
    }


def conditions(status: MultiModalInferenceStatus) -> dict[str, str]:
    return {c.type: f"{c.status} {c.reason}" for c in status.conditions}
