"""A HorizontalPodAutoscaler of the user's on a workload of ours: it is named, and left as it is."""

from __future__ import annotations

import pytest

from foveal_operator.kube.types import Obj
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import NO_LEASE, STEPS, run

KIND = "HorizontalPodAutoscaler"


def autoscaler(sandbox: Sandbox, kind: str, target: str) -> Obj:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": KIND,
        "metadata": {"name": "mine", "namespace": sandbox.namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": target},
            "minReplicas": 2,
            "maxReplicas": 4,
        },
    }


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize(
    ("kind", "target"), [("Deployment", "qwen-frontend"), ("StatefulSet", "qwen-engine")]
)
def test_it_is_named_while_it_is_there(sandbox: Sandbox, kind: str, target: str) -> None:
    """The operator set the replicas back without a word, and after ten minutes its log asked
    whether another operator did it."""
    sandbox.operator("a", NO_LEASE).start()
    run(sandbox, STEPS[0])
    api, namespace = sandbox.api, sandbox.namespace
    before = api.create(autoscaler(sandbox, kind, target)).must()

    def scale() -> None:
        """As the autoscaler's controller writes it."""
        change = {"spec": {"replicas": 2}}
        api.merge(kind, namespace, target, change, "scale", "kube-controller-manager").must()

    def is_back() -> bool:
        return ((api.get(kind, namespace, target) or {}).get("spec") or {}).get("replicas") == 1

    scale()
    said = f"ForeignAutoscaler: HorizontalPodAutoscaler mine sets the replicas of {kind} {target}"
    wait_until("it is named", lambda: sandbox.condition_text("ScalingActive").startswith(said), 60)
    wait_until("the number is the resource's", is_back, 30)
    assert sandbox.conditions(field="reason")["Ready"] in ("Ready", "Rolling", "Starting")
    events = [e for e in api.list("Event", namespace) if e["reason"] == "ForeignAutoscaler"]
    assert [event["type"] for event in events] == ["Warning"]
    assert api.get(KIND, namespace, "mine") == before, "it is the user's"
    api.delete(KIND, namespace, "mine").must()
    wait_until("it is forgotten", lambda: not sandbox.condition_text("ScalingActive"), 100)


@pytest.mark.timeout(300, func_only=True)
def test_a_hand_that_scales_once_is_no_autoscaler(sandbox: Sandbox) -> None:
    sandbox.operator("a", NO_LEASE).start()
    run(sandbox, STEPS[0])
    api, namespace = sandbox.api, sandbox.namespace
    api.create(autoscaler(sandbox, "Deployment", "another")).must()
    change = {"spec": {"replicas": 2}}
    api.merge("Deployment", namespace, "qwen-frontend", change, "scale", "kubectl").must()

    def replicas() -> int:
        found = api.get("Deployment", namespace, "qwen-frontend") or {}
        return int(found["spec"]["replicas"])

    wait_until("it is taken back", lambda: replicas() == 1, 30)
    sandbox.wait_condition("Ready", timeout_seconds=60)
    assert sandbox.condition_text("ScalingActive") == ""
