"""Gauges of each resource: its status as series, and the phases of its pods' starts.

Called by reconcile/report.py after every reconcile, and when a resource is gone. Decides nothing. A
pod tells by the times in its status; the runtime itself says what its own start was made of
(foveal_startup_seconds). Each pod counts once, when it is first seen ready: a later change of
readiness is no cold start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.api.status import Condition, MultiModalInferenceStatus
from foveal_operator.common.clock import seconds
from foveal_operator.kube.types import NamespacedName
from foveal_operator.telemetry.series import Telemetry

_STATES = ("desired", "replicas", "updated", "ready", "draining")
_FAILURES = (reasons.OOM_KILLED, reasons.SHM_FULL, reasons.DEVICE_FULL, reasons.CRASHED,
             reasons.INVALID_ARGUMENT, reasons.EVICTED, reasons.FETCH_DENIED, reasons.NOT_FOUND,
             reasons.FETCH_FAILED, reasons.UNSUPPORTED_MODEL,
             reasons.PROFILE_FAILED)  # fmt: skip
"""All that status.lastFailure says of pods and of Jobs."""
_STATUSES = ("True", "False", "Unknown")


def put(
    telemetry: Telemetry,
    resource: dict[str, Any],
    inference: InferenceSpec | None,
    status: MultiModalInferenceStatus,
) -> None:
    """`resource` as it was before this status; `inference` is None for a refused spec."""
    metadata = resource["metadata"]
    labels = {"namespace": metadata["namespace"], "name": metadata["name"]}
    conditions(telemetry, resource, status.conditions)
    generation = metadata.get("generation", 0)
    telemetry.set("foveal_inference_generation", generation, **labels)
    observed = status.observed_generation
    telemetry.set("foveal_inference_observed_generation", observed, **labels)
    for role, counts in (("frontend", status.frontend), ("engine", status.engine)):
        for state in _STATES:
            value = getattr(counts, state) if counts else 0
            telemetry.set("foveal_inference_pods", value, **labels, role=role, state=state)
    if inference is not None:
        for role, most in (
            ("frontend", inference.num_frontends),
            ("engine", inference.num_engines),
        ):
            telemetry.set("foveal_inference_max_pods", most, **labels, role=role)
    planned = {name: budget.bytes for name, budget in status.budgets.items()}
    measured = {
        name: budget.measured_bytes
        for name, budget in status.budgets.items()
        if budget.measured_bytes is not None
    }
    for family, known in (
        ("foveal_inference_budget_bytes", planned),
        ("foveal_inference_measured_bytes", measured),
    ):
        telemetry.forget(family, known, label="budget", **labels)
        for name, value in known.items():
            telemetry.set(family, value, **labels, budget=name)
    _failure(telemetry, labels, resource, status)


def conditions(telemetry: Telemetry, resource: dict[str, Any], told: tuple[Condition, ...]) -> None:
    """All conditions of a resource; what is not among them holds no more."""
    metadata = resource["metadata"]
    labels = {"namespace": metadata["namespace"], "name": metadata["name"]}
    states = {condition.type: condition.status for condition in told}
    for family, kind in (
        ("foveal_inference_ready", "Ready"),
        ("foveal_inference_available", "Available"),
        ("foveal_inference_stalled", "Stalled"),
    ):
        telemetry.set(family, states.get(kind) == "True", **labels)
    starts = any(c.type == "Available" and c.reason == reasons.STARTING.name for c in told)
    is_stalled = states.get("Stalled") == "True"
    telemetry.set("foveal_inference_starting", starts and not is_stalled, **labels)
    # Reconciling and Stalled come and go; a series left behind would say that they still hold.
    telemetry.forget("foveal_inference_condition", states, label="type", **labels)
    for kind, found in states.items():
        for value in _STATUSES:
            telemetry.set(
                "foveal_inference_condition", found == value, **labels, type=kind, status=value
            )


def _failure(
    telemetry: Telemetry,
    labels: dict[str, str],
    resource: dict[str, Any],
    status: MultiModalInferenceStatus,
) -> None:
    """Counts a failure that is newer than what the status named before: when the pod of the last
    one has gone, an earlier one is named again. All reasons begin at zero."""
    for reason in _FAILURES:
        telemetry.count("foveal_inference_pod_failures", 0.0, **labels, reason=reason.name)
    last = status.last_failure
    if last is None:
        return
    before = (resource.get("status") or {}).get("lastFailure") or {}
    if (last.time or "", last.pod) > (before.get("time", ""), before.get("pod", "")):
        telemetry.count("foveal_inference_pod_failures", 1.0, **labels, reason=last.reason)


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
