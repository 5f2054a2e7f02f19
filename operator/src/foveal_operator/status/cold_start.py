"""Phases of a pod's start: waiting for a node, for its image, for the program in it.

Called by reconcile/report.py after every reconcile. A pod tells by the times in its status; the
runtime itself says what its own start was made of (foveal_startup_seconds). Each pod counts once,
when it is first seen ready: a later change of readiness is no cold start. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foveal_operator.kube.types import NamespacedName
from foveal_operator.rollout.pods import seconds
from foveal_operator.telemetry.series import Telemetry

METRIC = "foveal_inference_cold_start_seconds"


def phases(pod: Mapping[str, Any]) -> dict[str, float]:
    """schedule: until it had a node; pull: until its container ran (volumes, image); start: until
    it was ready. Empty for a pod that is not ready or whose container has run before."""
    status = pod.get("status", {})
    since = {
        condition["type"]: seconds(condition.get("lastTransitionTime"))
        for condition in status.get("conditions", ())
        if condition.get("status") == "True"
    }
    containers = status.get("containerStatuses", ())
    if not {"PodScheduled", "Ready"} <= set(since) or not containers:
        return {}
    if any(container.get("restartCount") for container in containers):
        return {}
    started = [seconds(c.get("state", {}).get("running", {}).get("startedAt")) for c in containers]
    made = seconds(pod["metadata"].get("creationTimestamp"))
    ran = max(started)
    if not made or not min(started):
        return {}
    return {
        "schedule": max(0.0, since["PodScheduled"] - made),
        "pull": max(0.0, ran - since["PodScheduled"]),
        "start": max(0.0, since["Ready"] - ran),
    }


class ColdStarts:
    """Remembers which pod each figure is of; one per operator."""

    def __init__(self) -> None:
        self._told: dict[tuple[NamespacedName, str], tuple[str, str]] = {}

    def put(
        self,
        telemetry: Telemetry,
        key: NamespacedName,
        role: str,
        pods: Iterable[Mapping[str, Any]],
    ) -> None:
        """Exports the phases of the newest pod that has become ready."""
        found = {
            (pod["metadata"].get("creationTimestamp", ""), pod["metadata"].get("uid", "")): each
            for pod in pods
            if (each := phases(pod))
        }
        if not found:
            return
        newest = max(found)
        if newest <= self._told.get((key, role), ("", "")):
            return
        self._told[key, role] = newest
        for phase, value in found[newest].items():
            telemetry.set(METRIC, value, namespace=key[0], name=key[1], role=role, phase=phase)

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone. Its series go with the others that are about it."""
        for role in ("frontend", "engine"):
            self._told.pop((key, role), None)
