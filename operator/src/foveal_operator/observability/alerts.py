"""Alert rules as data: those of one resource, and those of the operator itself.

`resource_rule_groups` is what the operator puts into each resource's PrometheusRule (the tokens are
filled in there); `operator_rule_groups` is what the chart installs once. Each alert has a page in
docs/runbooks/ under its own name. Pure; no client library.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from foveal_operator.observability.promql import OPERATOR, RESOURCE, Scope

RUNBOOKS = "https://foveal.dev/docs/runbooks"
"""Where runbooks are read unless the chart or the operator's --runbooks says otherwise."""
Severity = Literal["critical", "warning", "info"]
_R, _O = RESOURCE, OPERATOR
_LONG = Scope(_R.namespace, _R.resource, window="15m")
_HOUR = Scope(_R.namespace, _R.resource, window="1h")


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. `hold` is how long the expression must hold; texts may use $labels and $value."""

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    about: str

    def rule(self, runbooks: str, labels: dict[str, str]) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity, **labels},
            "annotations": {
                "summary": self.summary,
                "description": self.about,
                "runbook_url": f"{runbooks.rstrip('/')}/{self.name}.md",
            },
        }


def _condition(kind: str, status: str) -> str:
    name = "foveal_inference_condition"
    return f"{_R.total(name, how='max', type=kind, status=status)} == 1"


_MEANT_TO_SERVE = (
    f"{_R.total('foveal_inference_pods', how='min', state='desired')} > 0 and on () "
    f"{_R.total('foveal_inference_starting', how='max')} == 0"
)
"""Not scaled to zero, and not loading for the first time within its progress deadline."""
_POD_LIMIT = f"({_R.total('foveal_memory_limit_bytes', 'pod', how='max')} > 0)"
_POD_USED = _R.total("foveal_memory_used_bytes", "pod", how="max")
_STALE_OF = _R.rate("foveal_mirror_needs", why="stale")
_ITEMS = _R.rate("foveal_cache_queries", cache="ipc")
_HITS_NOW = _LONG.ratio("vllm:mm_cache_hits", "vllm:mm_cache_queries")
_HITS_BEFORE = _HITS_NOW.replace("[15m]", "[15m] offset 45m")
_STARTED = _R.total("process_start_time_seconds", how="max")
_PLANNED = _R.total("foveal_inference_budget_bytes", "budget", how="max")
_MEASURED = _R.total("foveal_inference_measured_bytes", "budget", how="max")
_READY_FRONTENDS = _R.total("foveal_inference_pods", role="frontend", state="ready")
_MOST_FRONTENDS = _R.total("foveal_inference_max_pods", role="frontend")

MEMORY_ALERTS = (
    Alert(
        name="FovealPodMemoryNearLimit",
        expr=f"{_POD_USED} / {_POD_LIMIT} > 0.9",
        hold="5m",
        severity="warning",
        summary="Pod {{ $labels.pod }} uses {{ $value | humanizePercentage }} of its memory limit.",
        about="At the limit the kernel ends the process. A budget was predicted too small, or "
        "something outside the budgets grows.",
    ),
    Alert(
        name="FovealBudgetExceeded",
        expr=f"{_MEASURED} / {_PLANNED} > 1.15",
        hold="15m",
        severity="warning",
        summary="Budget {{ $labels.budget }} is measured at {{ $value | humanizePercentage }} of "
        "what was planned.",
        about="The prediction for this part was more than 15 % too small; the headroom covers it "
        "for now.",
    ),
    Alert(
        name="FovealBudgetMisfit",
        expr=_condition("BudgetFits", "False"),
        hold="5m",
        severity="warning",
        summary="The budgets of @namespace@/@resource@ do not fit their limits.",
        about="No new pod is made until they do; running pods stay. The condition's message names "
        "the term, what is missing and edits that help.",
    ),
    Alert(
        name="FovealPodFailing",
        expr=_LONG.total(
            "foveal_inference_pod_failures", "reason", inner="increase(%s[15m])"
        ) + " > 0",
        hold="1m",
        severity="warning",
        summary="Pods of @namespace@/@resource@ fail: {{ $labels.reason }}.",
        about="Containers ended wrongly or pods were evicted; status.lastFailure has the last one.",
    ),
)  # fmt: skip

CACHE_ALERTS = (
    Alert(
        name="FovealStaleHints",
        expr=f"{_STALE_OF} / {_ITEMS} > 0.001",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of media items had left the engine's cache "
        "while a request for them was on its way.",
        about="Each costs a resend and time to the first token, never a wrong answer. The value "
        "pool is too small for what is in flight.",
    ),
    Alert(
        name="FovealHitRatioFell",
        expr=f"{_HITS_NOW} < 0.5 * {_HITS_BEFORE} and on () {_LONG.rate('vllm:mm_cache_queries')}"
        f" > 0.1 and on () time() - {_STARTED} < 1800",
        hold="5m",
        severity="warning",
        summary="The media hit ratio fell to {{ $value | humanizePercentage }}, less than half of "
        "what it was before processes restarted.",
        about="New processes begin cold; if it stays low, keys have changed with the rollout "
        "(revision, processor, salt) or the caches are smaller.",
    ),
    Alert(
        name="FovealMirrorSessionDown",
        expr=_condition("CachesMirrored", "False"),
        hold="5m",
        severity="warning",
        summary="A frontend of @namespace@/@resource@ has no healthy session with an engine.",
        about="Requests go to the other engines, and hits are lost.",
    ),
    Alert(
        name="FovealValuesLate",
        expr=_R.quantile(0.95, "foveal_mirror_waitq_seconds") + " > 1",
        hold="10m",
        severity="warning",
        summary="Requests wait {{ $value | humanizeDuration }} (p95) in engines for media values.",
        about="Values arrive later than the requests that need them: the window is too small, a "
        "frontend is overloaded, or the network is slow.",
    ),
    Alert(
        name="FovealEncoderWait",
        expr=_R.quantile(0.95, "foveal_encoder_wait_seconds") + " > 1",
        hold="10m",
        severity="warning",
        summary="Requests wait {{ $value | humanizeDuration }} (p95) for room in the encoder.",
        about="More media arrive than a step may encode, or the encoder cache holds no more of "
        "what running requests need.",
    ),
    Alert(
        name="FovealValueConflict",
        expr=_HOUR.increase("foveal_mirror_value_conflicts") + " > 0",
        hold="0m",
        severity="critical",
        summary="Two different values came under one hash.",
        about="Identity is broken: frontends of one resource process the same item differently.",
    ),
)

SERVING_ALERTS = (
    Alert(
        name="FovealUnavailable",
        expr=f"{_condition('Available', 'False')} and on () {_MEANT_TO_SERVE}",
        hold="2m",
        severity="critical",
        summary="@namespace@/@resource@ does not serve.",
        about="No frontend or no engine of any revision is ready.",
    ),
    Alert(
        name="FovealStartOverdue",
        expr=_R.total("foveal_inference_starting", how="max") + " == 1",
        hold="1h",
        severity="warning",
        summary="@namespace@/@resource@ has been starting for an hour and does not serve.",
        about="FovealUnavailable is quiet meanwhile: the progress deadline waits for the model, "
        "for queues and for nodes. The condition that is False first says for what.",
    ),
    Alert(
        name="FovealRolloutStalled",
        expr=_R.total("foveal_inference_stalled", how="max") + " == 1",
        hold="1m",
        severity="warning",
        summary="@namespace@/@resource@ cannot reach what its spec asks for.",
        about="The operator waits for a change: the condition Stalled says for which. Pods of the "
        "last good revision keep serving.",
    ),
    Alert(
        name="FovealErrorRate",
        expr=_R.failed() + " > 0.05",
        hold="5m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of requests fail with a server error.",
        about="foveal_request_errors_total counts them by code, streams that broke off among them.",
    ),
    Alert(
        name="FovealFrontendsAtMost",
        expr=f"{_READY_FRONTENDS} >= {_MOST_FRONTENDS} and on () "
        + _R.rate("vllm:admission_rejections", reason="!draining") + " > 0",
        hold="10m",
        severity="warning",
        summary="All {{ $value }} frontends (the maximum) run, and requests are rejected.",
        about="The frontend tier is at its most and its queues are full.",
    ),
    Alert(
        name="FovealEngineStuck",
        expr=_R.total("vllm:num_requests_running", "pod")
        + " > 0 and on (pod) "
        + _R.rate("foveal_engine_steps", "pod")
        + " == 0",
        hold="2m",
        severity="critical",
        summary="Engine {{ $labels.pod }} has requests and makes no step.",
        about="Its probes will restart it; its requests go on elsewhere.",
    ),
    Alert(
        name="FovealMediaWorkersDying",
        expr=_LONG.total("foveal_media_worker_restarts", "pod", inner="increase(%s[15m])")
        + " > 3",
        hold="0m",
        severity="warning",
        summary="Media workers of {{ $labels.pod }} died {{ $value | humanize }} times in 15 "
        "minutes.",
        about="Some input ends the process that decodes it, or memory runs out in it.",
    ),
    Alert(
        name="FovealMetricsAbsent",
        expr=f"absent({_R.series('foveal_inference_condition', type='Available', status='True')})"
        f" or absent({_R.series('foveal_cache_capacity_bytes')}) and on () {_MEANT_TO_SERVE}",
        hold="10m",
        severity="warning",
        summary="No metrics of @namespace@/@resource@ arrive from "
        "{{ if $labels.type }}the operator{{ else }}its pods{{ end }}.",
        about="Nothing is scraped there, or a metric was renamed: the alerts that read it, "
        "FovealUnavailable among them, cannot fire.",
    ),
)  # fmt: skip

_LEADS = _O.series("leader_election_master_status", name="@lease@")
OPERATOR_ALERTS = (
    Alert(
        name="FovealOperatorNoLeader",
        expr=f"(sum ({_LEADS}) or vector(0)) < 1",
        hold="5m",
        severity="critical",
        summary="No operator holds the Lease.",
        about="What runs keeps serving; changes, failures and drift are not acted on.",
    ),
    Alert(
        name="FovealOperatorTwoLeaders",
        # Of each pod once: a second monitor or job may scrape the operator, too.
        expr=f"sum (max by (pod) ({_LEADS})) > 1",
        hold="1m",
        severity="critical",
        summary="{{ $value }} operators believe that they hold the Lease.",
        about="Two may write at once.",
    ),
    Alert(
        name="FovealOperatorReconcileErrors",
        expr=_O.rate("controller_runtime_reconcile_errors") + " > 0.1",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanize }} reconciles fail in a second.",
        about="The operator's log names the resource and the error.",
    ),
    Alert(
        name="FovealOperatorQueueStuck",
        # Of the replica that works: a standby's queue fills and is never drained.
        expr=f"sum ({_O.series('workqueue_depth')} and on (pod) ({_LEADS} == 1)) > 0 and on () "
        + _O.rate("controller_runtime_reconcile") + " == 0",
        hold="10m",
        severity="warning",
        summary="{{ $value }} resources wait and none is reconciled.",
        about="Workers hang on the API server, or the leader has lost its workers.",
    ),
    Alert(
        name="FovealOperatorWatchesDown",
        expr=_O.total("foveal_operator_watch_is_up", "pod", how="min") + " == 0",
        hold="5m",
        severity="warning",
        summary="The watches of operator {{ $labels.pod }} are down.",
        about="Changes are seen only by the regular re-list, minutes late.",
    ),
    Alert(
        name="FovealOperatorApiErrors",
        expr=_O.rate("rest_client_requests", code="~5..|429|<error>") + " / "
        + _O.rate("rest_client_requests") + " > 0.1",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of API calls fail or are rejected.",
        about="The API server is overloaded or restarts; the operator backs off.",
    ),
    Alert(
        name="FovealDriftFight",
        expr=_O.total(
            "foveal_operator_drift_repairs", "kind",
            inner="increase(%s[15m])",
        ) + " > 10",
        hold="15m",
        severity="warning",
        summary="Objects of kind {{ $labels.kind }} are repeatedly changed by another manager.",
        about="Another controller or a GitOps tool writes fields that the operator owns.",
    ),
)  # fmt: skip

RESOURCE_ALERTS = (*MEMORY_ALERTS, *CACHE_ALERTS, *SERVING_ALERTS)
ALERTS = (*RESOURCE_ALERTS, *OPERATOR_ALERTS)
_OF_RESOURCE = {"namespace": "@namespace@", "resource": "@resource@"}


def resource_rule_groups(runbooks: str = RUNBOOKS) -> tuple[dict[str, Any], ...]:
    """Groups with the tokens @namespace@ and @resource@ in expressions, labels and texts."""
    named = {"memory": MEMORY_ALERTS, "caches": CACHE_ALERTS, "serving": SERVING_ALERTS}
    return tuple(
        _group(f"foveal-{name}", alerts, runbooks, _OF_RESOURCE) for name, alerts in named.items()
    )


def operator_rule_groups(runbooks: str = RUNBOOKS) -> tuple[dict[str, Any], ...]:
    """The group with the tokens @installation@ (the release's namespace) and @lease@."""
    return (_group("foveal-operator", OPERATOR_ALERTS, runbooks, {}),)


def _group(
    name: str, alerts: tuple[Alert, ...], runbooks: str, labels: dict[str, str]
) -> dict[str, Any]:
    return {"name": name, "rules": [alert.rule(runbooks, labels) for alert in alerts]}
