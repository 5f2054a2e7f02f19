"""The operator's families: work queue, reconciles and API calls under the names that dashboards
for controllers know, and what it says about each resource.

Per-resource families carry `namespace` and `resource` and end with the resource. Label values come
from closed sets (condition types, reasons, roles, budget names), so the number of series is bounded
by the number of resources. No client library here.
"""

from __future__ import annotations

from foveal_runtime.plan.metric import REQUEST_BUCKETS, STAGE_BUCKETS, Kind, Metric

_RESOURCE = ("namespace", "resource")


def _one(
    kind: Kind,
    name: str,
    help_text: str,
    *labels: str,
    unit: str = "",
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        help=help_text,
        roles=("operator",),
        labels=labels,
        unit=unit,
        buckets=buckets,
    )


_CONTROLLER = (
    _one("counter", "controller_runtime_reconcile", "Reconciles that ended, by result: success, "
         "error, requeue, requeue_after.", "controller", "result"),
    _one("counter", "controller_runtime_reconcile_errors", "Reconciles that failed.",
         "controller"),
    _one("histogram", "controller_runtime_reconcile_time_seconds", "One reconcile.",
         "controller", unit="seconds", buckets=STAGE_BUCKETS),
    _one("gauge", "controller_runtime_active_workers", "Reconciles under way.", "controller"),
    _one("gauge", "workqueue_depth", "Resources that wait for a worker.", "name"),
    _one("counter", "workqueue_adds", "Resources put on the queue.", "name"),
    _one("counter", "workqueue_retries", "Resources put back after a failure.", "name"),
    _one("histogram", "workqueue_queue_duration_seconds", "From being queued to a worker.",
         "name", unit="seconds", buckets=REQUEST_BUCKETS),
    _one("counter", "rest_client_requests", "API calls by verb and status code.", "method",
         "code"),
    _one("histogram", "rest_client_request_duration_seconds", "One API call.", "verb",
         unit="seconds", buckets=STAGE_BUCKETS),
    _one("gauge", "leader_election_master_status", "1 in the process that holds the Lease.",
         "name"),
)  # fmt: skip

_RESOURCES = (
    _one("gauge", "foveal_operator_condition", "1 for the status that a condition has, 0 for the "
         "others.", *_RESOURCE, "type", "status"),
    _one("gauge", "foveal_operator_replicas", "Pods of a role by state: desired, ready, updated, "
         "draining.", *_RESOURCE, "role", "state"),
    _one("gauge", "foveal_operator_max_replicas", "Most pods of a role that its autoscaler may "
         "ask for; the fixed number without one.", *_RESOURCE, "role"),
    _one("gauge", "foveal_operator_budget_bytes", "The resource's budgets as in its status: "
         "planned, and measured once pods report.", *_RESOURCE, "budget", "source", unit="bytes"),
    _one("counter", "foveal_operator_drift_corrections", "Owned objects that had been changed or "
         "deleted by others and were put right.", *_RESOURCE, "kind"),
    _one("counter", "foveal_operator_pod_failures", "Containers that ended wrongly or cannot "
         "start, by condition reason.", *_RESOURCE, "reason"),
)  # fmt: skip

OPERATOR_METRICS: tuple[Metric, ...] = (*_CONTROLLER, *_RESOURCES)
