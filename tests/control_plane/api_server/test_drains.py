"""What `kubectl drain` meets: evictions of engines and frontends, with and without budgets."""

from __future__ import annotations

import pytest

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Reply
from tests.support.api_server.nodes import READY, UNSCHEDULABLE, is_ready
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import NO_LEASE, STEPS, Step, run

BUDGET = "PodDisruptionBudget"


def evict(sandbox: Sandbox, pod: Obj) -> Reply:
    """As kubectl does; refused with 429 by a budget."""
    name = pod["metadata"]["name"]
    path = sandbox.api.path("Pod", sandbox.namespace, name, "eviction")
    metadata = {"name": name, "namespace": sandbox.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    return sandbox.api.request("POST", path, body)


def successor(sandbox: Sandbox, component: str, pod: Obj) -> Obj:
    """Another pod than this one, of the same name or not."""
    found: list[Obj] = []

    def is_there() -> bool:
        others = [one for one in sandbox.nodes.pods(component) if uid(one) != uid(pod)]
        found[:] = [one for one in others if one["metadata"]["name"] == pod["metadata"]["name"]]
        return bool(found or (component == "frontend" and others))

    wait_until(f"a {component} takes its place", is_there, 60)
    return found[0] if found else {}


def uid(pod: Obj) -> str:
    return str(pod["metadata"]["uid"])


@pytest.mark.timeout(300, func_only=True)
def test_a_single_engine_and_frontend_never_hold_back_a_drain(sandbox: Sandbox) -> None:
    sandbox.operator("a", NO_LEASE).start()
    run(sandbox, STEPS[0])
    assert sandbox.api.list(BUDGET, sandbox.namespace) == []
    for component in ("engine", "frontend"):
        (pod,) = sandbox.nodes.pods(component)
        assert evict(sandbox, pod).ok
        successor(sandbox, component, pod)
    sandbox.wait_condition("Ready", timeout_seconds=90)


@pytest.mark.timeout(300, func_only=True)
def test_of_two_engines_the_last_is_kept_until_its_fellow_serves(sandbox: Sandbox) -> None:
    """Where the first has nowhere to go the drain waits, and fewer replicas let it go on."""
    sandbox.operator("a", NO_LEASE).start()
    two = sandbox.sample("cpu", engine__replicas=2)
    run(sandbox, Step("two", lambda world: world.apply(two), num_engines=2))
    api, namespace = sandbox.api, sandbox.namespace
    api.wait(BUDGET, namespace, "qwen-engine", lambda pdb: allowed(pdb) == 1, 60)
    first, last = sorted(sandbox.nodes.pods("engine"), key=lambda pod: pod["metadata"]["name"])
    sandbox.nodes.fate(UNSCHEDULABLE, "engine")
    assert evict(sandbox, first).ok
    waiting = successor(sandbox, "engine", first)
    api.wait(BUDGET, namespace, "qwen-engine", lambda pdb: allowed(pdb) == 0, 60)
    refused = evict(sandbox, last)
    assert refused.status == 429
    assert "disruption budget" in refused.message
    assert evict(sandbox, waiting).ok, "one that does not serve protects nobody"
    sandbox.nodes.fate(READY, "engine")
    wait_until("both serve again", lambda: sandbox.nodes.are_ready("engine", 2), 60)
    (last,) = [pod for pod in sandbox.nodes.pods("engine") if uid(pod) == uid(last)]
    assert is_ready(last)
    wait_until("the last may go", lambda: evict(sandbox, last).ok, 60)
    sandbox.wait_condition("Ready", timeout_seconds=90)
    api.merge("MultiModalInference", namespace, "qwen", {"spec": {"engine": {"replicas": 1}}})
    api.wait(BUDGET, namespace, "qwen-engine", lambda pdb: pdb is None, 60)


def allowed(budget: Obj | None) -> int:
    return int((budget or {}).get("status", {}).get("disruptionsAllowed", -1))
