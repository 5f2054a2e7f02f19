"""States of a resource by name, each as the operator would report it; made, not written by hand.

Used by test_gitops.py and by regenerate.py, which writes the Argo CD test data from them.
"""

from __future__ import annotations

from typing import Any

from foveal_operator.api import reasons
from foveal_operator.api.parse import SpecError, parse
from foveal_operator.kube.types import Obj
from foveal_operator.status.report import plain, report
from foveal_operator.status.verdicts import Observed
from tests.support.observed_status import (
    BASE,
    NOW,
    container,
    ended,
    pod,
    revisions,
    serving,
    status_of,
)
from tests.support.samples import put

GENERATION = 3
PULL = container(state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}  # fmt: skip


def _with(obj: Obj, status: Any) -> Obj:
    metadata = {**obj["metadata"], "generation": GENERATION}
    found = {**obj, "metadata": metadata}
    return found if status is None else {**found, "status": plain(status)}


def _engine_trouble(**status: Any) -> Obj:
    _, engine = revisions(BASE)
    broken = pod("e-0", engine, ready=False, **status)
    return _with(BASE, status_of(**{**serving(), "engine_pods": (broken,)}))


def _refused() -> Obj:
    wrong = put(BASE, "spec.engine.gpus", 1)
    try:
        parse(wrong)
    except SpecError as error:
        return _with(wrong, report(None, error, None, None, Observed(now=NOW), GENERATION))
    raise AssertionError("the spec is wrong")


def states() -> dict[str, tuple[Obj, str, str]]:
    """name -> (resource, kstatus verdict, Argo CD health)."""
    ready = _with(BASE, status_of(**serving()))
    misfit = put(BASE, "spec.engine.accelerator", {"memory": "16Gi"})
    changed = put(BASE, "spec.caches.ipc.size", "1Gi")
    busy, bad, good = ("InProgress", "Progressing"), ("Failed", "Degraded"), ("Current", "Healthy")
    deleting = put(ready, "metadata.deletionTimestamp", NOW)
    return {
        # Before the operator's first status kstatus knows no better: see docs/how-to/gitops.md.
        "fresh": (_with(BASE, None), "Current", "Progressing"),
        "stale": (put(ready, "metadata.generation", GENERATION + 1), *busy),
        "profiling": (_with(BASE, status_of(model=reasons.DOWNLOADING)), *busy),
        "starting": (_with(BASE, status_of()), *busy),
        "rolling": (_with(changed, status_of(changed, **serving(BASE))), *busy),
        "unschedulable": (_engine_trouble(conditions=[UNSCHEDULABLE]), *busy),
        "image-pull": (_engine_trouble(**PULL), *busy),
        "oom-killed": (_engine_trouble(**ended(137, reason="OOMKilled")), *busy),
        "session-down": (_with(BASE, status_of(**{**serving(), "sessions_up": 1})), *busy),
        "invalid-argument": (_engine_trouble(**ended(2, "block_size: 7")), *bad),
        "deadline": (_with(BASE, status_of(deadline_exceeded=True)), *bad),
        "misfit": (_with(misfit, status_of(misfit)), *bad),
        "refused": (_refused(), *bad),
        "ready": (ready, *good),
        "deleting": (deleting, "Terminating", "Healthy"),
        "paused": (put(ready, "spec.paused", True), "Current", "Suspended"),
    }
