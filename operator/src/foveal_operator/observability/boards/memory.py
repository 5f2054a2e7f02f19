"""Memory: the budget, what is used of it, and what was measured; by pod and by cache."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Row, graph, stat
from foveal_operator.observability.promql import DASHBOARD as D

_LIMIT = f"({D.total('foveal_memory_limit_bytes', 'pod', how='max')} > 0)"
_USED = D.total("foveal_memory_used_bytes", "pod", how="max")
_SLOPE = D.total("foveal_memory_used_bytes", "pod", how="max", inner="deriv(%s[30m])")
_PLANNED = D.total("foveal_inference_budget_bytes", "budget", how="max")
_MEASURED = D.total("foveal_inference_measured_bytes", "budget", how="max")

_PODS = Row("Pods", (
    stat("Least headroom", "Share of the limit that the fullest pod has left.",
         f"1 - max({_USED} / {_LIMIT})", "percentunit", warn=0.1, bad=0.05),
    stat("Time to the limit", "Of the pod that gets there first, if it grows on as in the last "
         "half hour; none when nothing grows.",
         f"min(({_LIMIT} - {_USED}) / ({_SLOPE} > 0)) or vector(31536000)", "s", width=5),
    graph("Measured and limit", "Anonymous, shared and kernel memory of each pod, and its limit. "
          "Page cache is not counted: the kernel takes it back.",
          (_USED, "{{pod}}"), (_LIMIT, "{{pod}} limit"),
          (D.total("foveal_memory_peak_bytes", "pod", how="max"), "{{pod}} peak with page cache"),
          unit="bytes", width=16),
    graph("Used share of the limit", "A pod is killed at 1.",
          (f"{_USED} / {_LIMIT}", "{{pod}}"), unit="percentunit", top=1, warn=0.9, bad=0.95,
          runbooks=("FovealPodMemoryNearLimit",)),
    graph("Page cache", "Files that the kernel keeps while there is room.",
          (D.total("foveal_memory_page_cache_bytes", "pod", how="max"), "{{pod}}"),
          unit="bytes"),
    graph("Processes", "Resident memory of each process.",
          (D.total("process_resident_memory_bytes", "pod,process"), "{{pod}} {{process}}"),
          unit="bytes", stacked=True),
))  # fmt: skip

_CACHES = Row("Caches of each pod", (
    graph("Held", "Bytes held by each cache in host memory.",
          (D.total("foveal_cache_bytes", "pod,cache", tier="!device"), "{{pod}} {{cache}}"),
          unit="bytes", stacked=True, width=12),
    graph("Budget", "Bytes that they may hold.",
          (D.total("foveal_cache_capacity_bytes", "pod,cache", tier="!device"),
           "{{pod}} {{cache}}"), unit="bytes", stacked=True, width=12),
    graph("Device caches", "Held, and the budget, in the memory that the model runs in.",
          (D.total("foveal_cache_bytes", "pod,cache", tier="device"), "{{pod}} {{cache}}"),
          (D.total("foveal_cache_capacity_bytes", "pod,cache", tier="device"),
           "{{pod}} {{cache}} budget"), unit="bytes"),
    graph("In flight", "Request bodies and media, and values that wait for an acknowledgement.",
          (D.total("foveal_media_inflight_bytes", "pod"), "{{pod}} media"),
          (D.total("foveal_mirror_window_inflight_bytes", "pod"), "{{pod}} values"),
          unit="bytes"),
    graph("Shared memory", "Used and allowed; empty where values go over the socket.",
          (D.total("foveal_shm_bytes", "pod"), "{{pod}}"),
          (D.total("foveal_shm_capacity_bytes", "pod"), "{{pod}} allowed"), unit="bytes"),
))  # fmt: skip

_PLAN = Row("Predicted and measured", (
    graph("Parts as pods measure them", "By pod; names as in the resource's status.",
          (D.total("foveal_budget_bytes", "pod,part", how="max", source="measured"),
           "{{pod}} {{part}}"), unit="bytes", width=24),
    graph("Planned budgets", "As in the resource's status.",
          (_PLANNED, "{{budget}}"), unit="bytes"),
    graph("Measured", "What the operator took from them, beside the plan.",
          (_MEASURED, "{{budget}}"), unit="bytes"),
    graph("Measured above plan", "Above zero the plan was too small.",
          (f"{_MEASURED} / {_PLANNED} - 1", "{{budget}}"), unit="percentunit",
          warn=0.05, bad=0.15, runbooks=("FovealBudgetExceeded",)),
))  # fmt: skip

MEMORY = Board(
    uid="foveal-memory",
    title="Foveal / Memory budgets",
    about="The budget, what is used of it, and what was measured; by pod and by cache.",
    rows=(_PODS, _CACHES, _PLAN),
)
