"""Rollout: which revision serves, what a roll costs, and why it does not go on."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Row, graph
from foveal_operator.observability.promql import DASHBOARD as D

_CONDITION = "foveal_inference_condition"

_STATE = Row("State", (
    graph("Processes by revision", "Frontends and engines that answer a scrape.",
          (D.total("foveal_build_info", "role,revision", how="count"), "{{role}} {{revision}}"),
          stacked=True, width=12),
    graph("Pods", "Desired, ready, of the wanted revision, and draining.",
          (D.total("foveal_inference_pods", "role,state"), "{{role}} {{state}}"), width=12),
    graph("Conditions that are not met", "1 while a condition of the resource is False.",
          (D.total(_CONDITION, "name,type", how="max", status="False"),
           "{{name}} {{type}}"), runbooks=("FovealRolloutStalled", "FovealBudgetMisfit")),
    graph("Reconciling or stalled", "1 while the operator works on it, or cannot.",
          (D.total(_CONDITION, "name,type", how="max", type="~Reconciling|Stalled",
                   status="True"), "{{name}} {{type}}")),
    graph("Ready and available", "1 when every replica of the revision serves; when any does.",
          (D.total("foveal_inference_ready", "name", how="max"), "{{name}} ready"),
          (D.total("foveal_inference_available", "name", how="max"), "{{name}} available"),
          (D.total("foveal_inference_starting", "name", how="max"), "{{name}} starting"),
          (D.total("foveal_inference_stalled", "name", how="max"), "{{name}} stalled")),
    graph("Specs not looked at yet", "Generations that the status is behind the spec.",
          (D.total("foveal_inference_generation", "name", how="max") + " - "
           + D.total("foveal_inference_observed_generation", "name", how="max"), "{{name}}")),
    graph("Pod failures", "Containers that ended wrongly or cannot start, in five minutes.",
          (D.total("foveal_inference_pod_failures", "reason", inner="increase(%s[5m])"),
           "{{reason}}"), runbooks=("FovealPodFailing",)),
))  # fmt: skip

_COST = Row("What a roll costs", (
    graph("Draining", "Processes that take no new requests.",
          (D.total("foveal_draining"), "frontends"),
          (D.total("foveal_engine_draining"), "engines")),
    graph("Sequences sent to another engine", "By reason: none is lost.",
          (D.rate("foveal_request_resubmissions", "reason"), "{{reason}}"), unit="ops"),
    graph("Errors", "By code, during and after.",
          (D.rate("foveal_request_errors", "code"), "{{code}}"), unit="ops"),
    graph("Hit ratio by revision", "A new revision begins cold.",
          (D.ratio("foveal_cache_hits", "foveal_cache_queries", "cache,revision"),
           "{{cache}} {{revision}}"), unit="percentunit", top=1),
    graph("Uptime", "Of each process.",
          ("time() - " + D.total("process_start_time_seconds", "pod,process", how="max"),
           "{{pod}} {{process}}"), unit="s"),
    graph("Clients that went away", "Requests in a second whose client closed the connection.",
          (D.rate("foveal_client_disconnects"), "disconnects"), unit="ops"),
))  # fmt: skip

_COLD = Row("Cold start", (
    graph("A pod's start", "The newest pod that became ready: until it had a node, until its "
          "container ran (image, volumes), until it was ready.",
          (D.total("foveal_inference_cold_start_seconds", "name,role,phase", how="max"),
           "{{name}} {{role}} {{phase}}"), unit="s", width=12),
    graph("A process's start", "Imports, then media workers, or load, first steps and caches.",
          (D.total("foveal_startup_seconds", "role,phase", how="max"), "{{role}} {{phase}}"),
          unit="s", width=12),
))  # fmt: skip

_SCALE = Row("Scaling", (
    graph("Frontend replicas and maximum",
          "At the maximum with a growing queue, requests are rejected.",
          (D.total("foveal_inference_pods", role="frontend", state="ready"), "ready"),
          (D.total("foveal_inference_max_pods", role="frontend"), "maximum"),
          runbooks=("FovealFrontendsAtMost",)),
    graph("Engine replicas and maximum", "",
          (D.total("foveal_inference_pods", role="engine", state="ready"), "ready"),
          (D.total("foveal_inference_max_pods", role="engine"), "maximum")),
    graph("Requests in flight", "By frontend.",
          (D.total("foveal_requests_inflight", "pod"), "{{pod}}"), stacked=True),
))  # fmt: skip

ROLLOUT = Board(
    uid="foveal-rollout",
    title="Foveal / Rollout",
    about="Which revision serves, what a roll costs, and why it does not go on.",
    rows=(_STATE, _COST, _COLD, _SCALE),
)
