"""Replicas pass to an autoscaler and back: in no write do they fall below what is live (G19)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_server.audit import Audit
from tests.support.api_server.calls import Call
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import NO_LEASE, Step, run

AUTOSCALING = {"minReplicas": 2, "maxReplicas": 6, "metric": "CPU", "target": 70}
NAME = "qwen-frontend"


class Replicas(Audit):
    """Notes what the Deployment asks for after each write of the operator's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def after(self, call: Call, status: int, reply: dict[str, Any]) -> None:
        super().after(call, status, reply)
        if call.target.resource == "deployments" and status < 300 and "spec" in reply:
            self.seen.append(int(reply["spec"].get("replicas", 0)))


def live(sandbox: Sandbox) -> int:
    deployment = sandbox.api.get("Deployment", sandbox.namespace, NAME)
    assert deployment is not None
    return int(deployment["spec"]["replicas"])


def autoscaler_says(sandbox: Sandbox, replicas: int) -> None:
    """What the HPA's controller writes, as it writes it."""
    change = {"spec": {"replicas": replicas}}
    sandbox.api.merge(
        "Deployment", sandbox.namespace, NAME, change, "scale", manager="kube-controller-manager"
    ).must()


def has_autoscaler(sandbox: Sandbox) -> bool:
    return sandbox.api.get("HorizontalPodAutoscaler", sandbox.namespace, NAME) is not None


@pytest.mark.timeout(400, func_only=True)
def test_on_and_off_and_over_a_restart_no_replica_is_lost(sandbox: Sandbox) -> None:
    seen = Replicas()
    sandbox.proxy.audit = seen
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    fixed = sandbox.sample("cpu", frontend__replicas=3)
    run(sandbox, Step("create", lambda w: w.apply(fixed), num_frontends=3))

    # On: the autoscaler begins with what it finds, and nobody takes back what it adds.
    seen.seen.clear()
    scaled = sandbox.sample("cpu", frontend__autoscaling=AUTOSCALING)
    sandbox.apply(scaled)
    wait_until("there is an autoscaler", lambda: has_autoscaler(sandbox), 60)
    sandbox.settled()
    assert live(sandbox) == 3
    assert min(seen.seen, default=3) >= 3, seen.seen
    seen.seen.clear()
    autoscaler_says(sandbox, 5)
    cause = sandbox.sample("cpu", frontend__autoscaling=AUTOSCALING, frontend__cpu="3")
    run(sandbox, Step("another template", lambda w: w.apply(cause), num_frontends=5))
    operator.kill()
    seen.forget("a")
    operator.start()
    operator.wait_ready()
    sandbox.settled()
    assert live(sandbox) == 5
    assert seen.seen, "the template was applied"
    assert min(seen.seen) >= 5, seen.seen

    # Off, to the number that is live: not one write asks for fewer.
    seen.seen.clear()
    back = sandbox.sample("cpu", frontend__replicas=5, frontend__cpu="3")
    run(sandbox, Step("off", lambda w: w.apply(back), num_frontends=5))
    assert not has_autoscaler(sandbox)
    assert live(sandbox) == 5
    assert seen.seen, "the operator took the field back"
    assert min(seen.seen) >= 5, seen.seen


@pytest.mark.timeout(300, func_only=True)
def test_a_lost_label_takes_no_replica(sandbox: Sandbox) -> None:
    """The watch says DELETED of what it no longer selects: minReplicas was applied."""
    seen = Replicas()
    sandbox.proxy.audit = seen
    sandbox.operator("a", NO_LEASE).start()
    scaled = sandbox.sample("cpu", frontend__autoscaling=AUTOSCALING)
    run(sandbox, Step("create", lambda w: w.apply(scaled), num_frontends=2))
    autoscaler_says(sandbox, 5)
    sandbox.settled()
    seen.seen.clear()
    for value in (None, "somebody"):
        labels = {"app.kubernetes.io/managed-by": value}
        change = {"metadata": {"labels": labels}}
        sandbox.api.merge("Deployment", sandbox.namespace, NAME, change, manager="kubectl").must()
        wait_until("the label is back", lambda: label(sandbox) == "foveal-operator", 60)
        sandbox.settled()
        assert live(sandbox) == 5
    assert seen.seen, "the label was applied"
    assert min(seen.seen) >= 5, seen.seen
    cause = sandbox.sample("cpu", frontend__autoscaling=AUTOSCALING, frontend__cpu="3")
    run(sandbox, Step("another template", lambda w: w.apply(cause), num_frontends=5))
    assert min(seen.seen) >= 5, seen.seen


def label(sandbox: Sandbox) -> str:
    deployment = sandbox.api.get("Deployment", sandbox.namespace, NAME) or {"metadata": {}}
    return str(deployment["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by", ""))
