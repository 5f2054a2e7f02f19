"""Every series of the operator, declared as data: name, kind, labels, help.

series.py turns these into live series; rules, dashboards and docs read the same list. Names
follow controller-runtime, so that boards made for other operators work. Labels are bounded: kinds,
verbs, codes and results are small sets, and a resource's series go when the resource goes.
"""

from __future__ import annotations

from foveal_runtime.plan.metrics.metric import Metric

OWN_LABEL = ("operator", "foveal")
"""On every series whose family other programs expose as well: kube-scheduler and cert-manager have
a leader, a work queue and API requests, too."""


def is_shared(name: str) -> bool:
    """Whether other programs expose a family of this name."""
    return not name.startswith("foveal_")


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PER = ("namespace", "name")
CONTROLLER = "multimodalinference"
_KINDS = (("kind", ("ConfigMap", "Deployment", "Service", "StatefulSet")),)


def _counter(
    name: str, help_: str, *labels: str, known: tuple[tuple[str, tuple[str, ...]], ...] = ()
) -> Metric:
    return Metric(
        name=name, kind="counter", help=help_, roles=("operator",), labels=labels, known=known
    )


def _gauge(name: str, help_: str, *labels: str, unit: str = "") -> Metric:
    return Metric(
        name=name, kind="gauge", help=help_, roles=("operator",), labels=labels, unit=unit
    )


def _seconds(name: str, help_: str, *labels: str) -> Metric:
    return Metric(
        name=name, kind="histogram", help=help_, roles=("operator",), labels=labels,
        unit="seconds", buckets=SECONDS,
    )  # fmt: skip


OPERATOR_METRICS: tuple[Metric, ...] = (
    _counter(
        "controller_runtime_reconcile", "Reconciles by result.", "controller", "result",
        known=(("controller", (CONTROLLER,)),
               ("result", ("success", "requeue", "requeue_after", "error"))),
    ),
    _counter(
        "controller_runtime_reconcile_errors", "Reconciles that failed.", "controller",
        known=(("controller", (CONTROLLER,)),),
    ),
    _seconds("controller_runtime_reconcile_time_seconds", "Duration of a reconcile.", "controller"),
    _gauge("controller_runtime_active_workers", "Reconciles in progress.", "controller"),
    _gauge("workqueue_depth", "Keys that wait.", "name"),
    _counter("workqueue_adds", "Keys added.", "name"),
    _counter(
        "workqueue_retries", "Keys put back after a failure.", "name",
        known=(("name", (CONTROLLER,)),),
    ),
    _seconds("workqueue_queue_duration_seconds", "Seconds a key waits once it is due.", "name"),
    _seconds("workqueue_work_duration_seconds", "Seconds a key is worked on.", "name"),
    _gauge("workqueue_longest_running_processor_seconds", "Age of the oldest reconcile.", "name"),
    _counter(
        "rest_client_requests", "Requests to the API server, those without an answer, too.",
        "verb", "code",
        known=(("verb", ("LIST", "APPLY")), ("code", ("429", "500", "503", "<error>"))),
    ),
    _seconds("rest_client_request_duration_seconds", "Seconds of an API request.", "verb"),
    _gauge("leader_election_master_status", "1 on the replica that writes.", "name"),
    _gauge("foveal_operator_cached_objects", "Objects in the caches.", "kind"),
    _gauge("foveal_operator_watch_is_up", "1 while every kind is watched."),
    _counter("foveal_operator_watch_restarts", "Restarts of watches that ended or went silent."),
    _counter(
        "foveal_operator_watch_missed", "Changes that a re-list found and the watch missed.",
        "kind", known=_KINDS,
    ),
    _counter("foveal_operator_writes", "Objects written, by kind.", "kind", "verb"),
    _counter(
        "foveal_operator_drift_repairs", "Objects changed by other managers, corrected.", "kind",
        known=_KINDS,
    ),
    _gauge("foveal_inference_ready", "1 when every replica of the revision serves.", *_PER),
    _gauge("foveal_inference_available", "1 when anything serves.", *_PER),
    _gauge(
        "foveal_inference_starting",
        "1 until it serves for the first time, or again after zero replicas, or is stalled.",
        *_PER,
    ),
    _gauge("foveal_inference_stalled", "1 when only an edit can fix the resource.", *_PER),
    _gauge("foveal_inference_generation", "Generation of the spec.", *_PER),
    _gauge("foveal_inference_observed_generation", "Generation that the status describes.", *_PER),
    _gauge("foveal_inference_pods", "Pods by role and state.", *_PER, "role", "state"),
    _gauge(
        "foveal_inference_budget_bytes", "Planned bytes of a cache or limit.", *_PER, "budget",
        unit="bytes",
    ),
    _gauge(
        "foveal_inference_measured_bytes", "The same, as pods measured it.", *_PER, "budget",
        unit="bytes",
    ),
    _gauge(
        "foveal_inference_condition", "1 for the status that a condition has, 0 for the others.",
        *_PER, "type", "status",
    ),
    _gauge(
        "foveal_inference_max_pods", "Most pods of a role: its autoscaler's maximum, or replicas.",
        *_PER, "role",
    ),
    _counter(
        "foveal_inference_pod_failures", "Failures seen in status.lastFailure, by reason.",
        *_PER, "reason",
    ),
    _gauge(
        "foveal_inference_cold_start_seconds", "Start of the newest pod that became ready: "
        "schedule (until it had a node), pull (until its container ran), start (until ready).",
        *_PER, "role", "phase", unit="seconds",
    ),
)  # fmt: skip
