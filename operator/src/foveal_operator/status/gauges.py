"""Gauges of each resource: its status as series.

Called by reconcile/report.py after every reconcile, and when a resource is gone. Decides nothing.
"""

from __future__ import annotations

from typing import Any

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.api.status import Condition, MultiModalInferenceStatus
from foveal_operator.telemetry.series import Telemetry

_STATES = ("desired", "replicas", "updated", "ready", "draining")
_FAILURES = (reasons.OOM_KILLED, reasons.CRASHED, reasons.IMAGE_PULL, reasons.UNSCHEDULABLE,
             reasons.INVALID_ARGUMENT)  # fmt: skip
_STATUSES = ("True", "False", "Unknown")
_PER_RESOURCE = (
    "foveal_inference_ready",
    "foveal_inference_available",
    "foveal_inference_stalled",
    "foveal_inference_generation",
    "foveal_inference_observed_generation",
    "foveal_inference_pods",
    "foveal_inference_max_pods",
    "foveal_inference_budget_bytes",
    "foveal_inference_measured_bytes",
    "foveal_inference_condition",
    "foveal_inference_pod_failures",
    "foveal_inference_cold_start_seconds",
)


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
    for name, budget in status.budgets.items():
        telemetry.set("foveal_inference_budget_bytes", budget.bytes, **labels, budget=name)
        if budget.measured_bytes is not None:
            measured = budget.measured_bytes
            telemetry.set("foveal_inference_measured_bytes", measured, **labels, budget=name)
    _failure(telemetry, labels, resource, status)


def forget(telemetry: Telemetry, namespace: str, name: str) -> None:
    """The resource is gone: so are its series."""
    for family in _PER_RESOURCE:
        telemetry.forget(family, namespace=namespace, name=name)


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
    """Counts a failure when the status names it first; those to be expected begin at zero."""
    for reason in _FAILURES:
        telemetry.count("foveal_inference_pod_failures", 0.0, **labels, reason=reason.name)
    last = status.last_failure
    if last is None:
        return
    before = (resource.get("status") or {}).get("lastFailure") or {}
    if (before.get("pod"), before.get("time", "")) != (last.pod, last.time or ""):
        telemetry.count("foveal_inference_pod_failures", 1.0, **labels, reason=last.reason)
