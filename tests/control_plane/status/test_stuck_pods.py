"""What stands still without a pod that says why: a node that does not answer, a paused rollout."""

from __future__ import annotations

import pytest

from tests.support.observed_status import (
    BASE,
    conditions,
    pod,
    revisions,
    serving,
    status_of,
)
from tests.support.samples import put


@pytest.mark.parametrize("revision", ["", "earlier"])
def test_an_engine_on_a_dead_node_is_told_with_both_ways_out(revision: str) -> None:
    """It was Starting without an end: Kubernetes makes no second pod of its name."""
    _, engine = revisions(BASE)
    lost = pod("e-1", revision or engine, ready=False)
    lost["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    lost["spec"] = {"nodeName": "n-7"}
    values = {**serving(), "engine_pods": (pod("e-0", engine), lost)}

    in_time = status_of(**{**values, "now": "2026-01-01T00:01:00Z"})
    assert conditions(in_time)["EnginesReady"] != "False TerminationStuck"
    late = status_of(**{**values, "now": "2026-01-01T00:01:01Z"})
    assert conditions(late)["EnginesReady"] == "False TerminationStuck"
    (message,) = [c.message for c in late.conditions if c.type == "EnginesReady"]
    assert message.startswith("e-1 should have ended at 2026-01-01T00:00:00Z, and node n-7 ")
    assert "Delete the Node" in message
    assert "node.kubernetes.io/out-of-service" in message


def test_a_frontend_that_does_not_go_is_replaced_all_the_same() -> None:
    frontend, _ = revisions(BASE)
    lost = pod("f-0", frontend, ready=False)
    lost["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    new = pod("f-1", frontend, ready=False)
    values = {**serving(), "frontend_pods": (lost, new), "now": "2026-01-01T01:00:00Z"}
    assert conditions(status_of(**values))["FrontendsReady"] == "False Starting"


@pytest.mark.parametrize(("pods", "reason"), [(1, "Rolling"), (0, "Starting")])
def test_a_deployment_that_somebody_has_paused_is_told_with_the_way_on(
    pods: int, reason: str
) -> None:
    """It was Rolling without an end, and nothing but the Deployment's own spec said why."""
    values = serving(BASE)
    values["frontend_pods"] = values["frontend_pods"][:pods]
    values["deployment"]["spec"]["paused"] = True
    status = status_of(put(BASE, "spec.frontend.processes", 2), **values)
    assert conditions(status)["FrontendsReady"] == f"False {reason}"
    (message,) = [c.message for c in status.conditions if c.type == "Ready"]
    assert message.endswith("; Deployment qwen-frontend is paused: resume it, "
                            "kubectl rollout resume deployment/qwen-frontend")  # fmt: skip
    assert "paused" not in str([c for c in status.conditions if c.type == "EnginesReady"])


def test_a_paused_deployment_that_has_nothing_to_do_is_no_matter() -> None:
    values = serving()
    values["deployment"]["spec"]["paused"] = True
    status = status_of(**values)
    assert conditions(status)["Ready"] == "True Ready"
    assert "paused" not in str(status.conditions)
