"""Observed objects of one resource, and the status reported for them."""

from __future__ import annotations

from typing import Any

from foveal_operator.api import reasons
from foveal_operator.api.status import Condition, MultiModalInferenceStatus
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import desired
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.status.report import Observed, report
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


def status_of(
    obj: Obj = BASE, previous: tuple[Condition, ...] = (), **observed: Any
) -> MultiModalInferenceStatus:
    inference, plan = planned(obj)
    objects = desired(inference, plan, FACTS)
    values = {"now": NOW, "model": reasons.RESOLVED, **observed}
    return report(inference, None, plan, objects, Observed(**values), 3, previous)


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
