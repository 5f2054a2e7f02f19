"""What generic tools make of a resource's status: the verdicts of kstatus, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.api import reasons
from foveal_operator.api.parse import SpecError, parse
from foveal_operator.kube.types import Obj
from foveal_operator.status.report import plain, report
from tests.support.kstatus import verdict
from tests.support.observed_status import (
    BASE,
    NOW,
    container,
    ended,
    observed_of,
    pod,
    serving,
    status_of,
)
from tests.support.samples import put

GENERATION = 3


def seen(status: object, **metadata: Any) -> Obj:
    return {
        **BASE,
        "metadata": {**BASE["metadata"], "generation": GENERATION, **metadata},
        "status": plain(status),
    }


def failing(state: dict[str, Any]) -> dict[str, Any]:
    """All serve but one engine."""
    values = serving()
    bad = pod(
        "e-1", values["engine_pods"][1]["metadata"]["labels"].popitem()[1], ready=False, **state
    )
    return {**values, "engine_pods": (values["engine_pods"][0], bad)}


def waiting(reason: str) -> dict[str, Any]:
    return container(state={"waiting": {"reason": reason, "message": "m"}})


NO_PODS: dict[str, Any] = {"frontend_pods": (), "engine_pods": ()}
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
}
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("ready", serving(), "Current"),
    ("first pods are not there yet", {**serving(), **NO_PODS}, "InProgress"),
    ("downloading", {"model": reasons.DOWNLOADING}, "InProgress"),
    ("profiling", {"model": reasons.PROFILING}, "InProgress"),
    ("a session is down", {**serving(), "sessions_up": 1}, "InProgress"),
    ("an engine cannot be placed", failing(UNSCHEDULABLE), "InProgress"),
    ("an image cannot be pulled", failing(waiting("ImagePullBackOff")), "InProgress"),
    ("an engine was killed for memory", failing(ended(137, reason="OOMKilled")), "InProgress"),
    ("an engine crashes", failing(ended(1, "ValueError")), "InProgress"),
    ("the deadline has passed", {**serving(), **NO_PODS, "deadline_exceeded": True}, "Failed"),
]


@pytest.mark.parametrize(("observed", "expected"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_verdicts(observed: dict[str, Any], expected: str) -> None:
    assert verdict(seen(status_of(**observed))) == expected


def test_a_refused_spec_has_failed() -> None:
    with pytest.raises(SpecError) as caught:
        parse(put(BASE, "spec.engine.gpus", 1))
    status = report(None, caught.value, None, None, observed_of(**serving()), GENERATION)
    assert verdict(seen(status)) == "Failed"


def test_a_misfit_has_failed() -> None:
    small = put(BASE, "spec.engine.accelerator", {"memory": "16Gi"})
    assert verdict(seen(status_of(small))) == "Failed"


def test_a_new_spec_is_in_progress_until_it_is_looked_at() -> None:
    assert verdict(seen(status_of(**serving()), generation=GENERATION + 1)) == "InProgress"


def test_another_revision_that_serves_is_not_the_one_asked_for() -> None:
    changed = put(BASE, "spec.caches.ipc.size", "1Gi")
    assert verdict(seen(status_of(changed, **serving(BASE)))) == "InProgress"


def test_deleting_is_terminating() -> None:
    assert verdict(seen(status_of(**serving()), deletionTimestamp=NOW)) == "Terminating"
