"""Operator: does it keep up, and what does it find wrong."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Row, graph, stat
from foveal_operator.observability.promql import OPERATOR_DASHBOARD as _O

_CONDITION = "foveal_inference_condition"
_RECONCILE = "controller_runtime_reconcile_time_seconds"

_NOW = Row("Now", (
    stat("Leaders", "Processes that hold the Lease, of the installation that has most: always 1.",
         f"max({_O.total('leader_election_master_status', 'namespace,name')})",
         warn=2, bad=2, width=4,
         runbooks=("FovealOperatorNoLeader", "FovealOperatorTwoLeaders")),
    stat("Resources", "Resources that the operator knows.",
         f"count(count by (namespace,name) ({_O.series(_CONDITION, type='Ready')}))",
         width=4),
    stat("Not ready", "Resources whose condition Ready is not True.",
         f"sum({_O.series(_CONDITION, type='Ready', status='~False|Unknown')})", width=4,
         warn=1, bad=1),
    stat("Queue", "Resources that wait for a worker.", _O.total("workqueue_depth"), width=4),
    stat("Errors", "Reconciles that failed, in a second.",
         _O.rate("controller_runtime_reconcile_errors"), "ops", width=4),
    stat("Reconcile p95", "One reconcile.", _O.quantile(0.95, _RECONCILE), "s", width=4),
))  # fmt: skip

_WORK = Row("Work", (
    graph("Reconciles", "In a second, by result.",
          (_O.rate("controller_runtime_reconcile", "result"), "{{result}}"), unit="ops"),
    graph("Time of a reconcile", "Once a worker has it.",
          (_O.quantile(0.5, _RECONCILE), "p50"), (_O.quantile(0.99, _RECONCILE), "p99"),
          unit="s"),
    graph("Time in the queue", "From being queued to a worker.",
          (_O.quantile(0.5, "workqueue_queue_duration_seconds"), "p50"),
          (_O.quantile(0.99, "workqueue_queue_duration_seconds"), "p99"), unit="s"),
    graph("Queue", "Waiting, under way; additions and retries in a second.",
          (_O.total("workqueue_depth"), "waiting"),
          (_O.total("controller_runtime_active_workers"), "under way"),
          (_O.rate("workqueue_adds"), "added/s", "ops"),
          (_O.rate("workqueue_retries"), "retried/s", "ops"),
          runbooks=("FovealOperatorQueueStuck",)),
    graph("API calls", "In a second, by verb and status code.",
          (_O.rate("rest_client_requests", "verb,code"), "{{verb}} {{code}}"), unit="ops"),
    graph("Time of an API call", "p95 by verb.",
          (_O.quantile(0.95, "rest_client_request_duration_seconds", "verb"), "{{verb}}"),
          unit="s"),
))  # fmt: skip

_FOUND = Row("What it finds", (
    graph("Conditions that are not met", "Resources by condition.",
          (_O.total(_CONDITION, "type", status="False"), "{{type}}"), stacked=True),
    graph("Budget misfits", "Resources whose budgets do not fit.",
          (_O.total(_CONDITION, "namespace,name", type="BudgetFits", status="False"),
           "{{namespace}}/{{name}}")),
    graph("Drift corrected", "Owned objects that others had changed or deleted, in five minutes.",
          (_O.total("foveal_operator_drift_repairs", "kind", inner="increase(%s[5m])"),
           "{{kind}}")),
    graph("Pod failures", "In five minutes, by reason.",
          (_O.total("foveal_inference_pod_failures", "reason", inner="increase(%s[5m])"),
           "{{reason}}")),
    graph("Leader", "Which process holds the Lease.",
          (_O.total("leader_election_master_status", "pod"), "{{pod}}")),
    graph("Planned memory", "All resources, by budget.",
          (_O.total("foveal_inference_budget_bytes", "budget"), "{{budget}}"),
          unit="bytes"),
))  # fmt: skip

_WATCHES = Row("Watches and writes", (
    graph("Objects written", "In a second, by kind: none while nothing changes.",
          (_O.rate("foveal_operator_writes", "kind,verb"), "{{verb}} {{kind}}"), unit="ops"),
    graph("Objects known", "In the caches of each replica.",
          (_O.total("foveal_operator_cached_objects", "pod,kind"), "{{pod}} {{kind}}")),
    graph("Watches", "1 while all run; restarts, and changes only a re-list found, in a second.",
          (_O.total("foveal_operator_watch_is_up", "pod", how="min"), "{{pod}} up"),
          (_O.rate("foveal_operator_watch_restarts", "pod"), "{{pod}} restarts/s", "ops"),
          (_O.rate("foveal_operator_watch_missed", "kind"), "missed/s: {{kind}}", "ops"),
          runbooks=("FovealOperatorWatchesDown",)),
    graph("Time of a key's work", "From a worker's start to its end; the oldest now.",
          (_O.quantile(0.95, "workqueue_work_duration_seconds"), "p95"),
          (_O.total("workqueue_longest_running_processor_seconds", how="max"), "oldest"),
          unit="s"),
))  # fmt: skip

OPERATOR_BOARD = Board(
    uid="foveal-operator",
    title="Foveal / Operator",
    about="Does it keep up, and what does it find wrong.",
    rows=(_NOW, _WORK, _FOUND, _WATCHES),
    variables=("installation",),
)
