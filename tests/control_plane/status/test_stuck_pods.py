"""Pods that should have gone and have not: their node does not answer any more."""

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
