"""Every metric declared once, as data: name, type, labels, unit, help, who exports it.

telemetry/ turns these into live series; dashboards, alert rules and docs/reference/metrics.md are
generated from the same list. No client library here.
"""

from __future__ import annotations

from foveal_runtime.plan.metrics.foveal import FOVEAL_METRICS
from foveal_runtime.plan.metrics.gen_ai import GEN_AI_METRICS
from foveal_runtime.plan.metrics.metric import Metric
from foveal_runtime.plan.metrics.vllm import VLLM_METRICS

METRICS: tuple[Metric, ...] = (*VLLM_METRICS, *FOVEAL_METRICS, *GEN_AI_METRICS)

_BY_NAME = {metric.name: metric for metric in METRICS}
assert len(_BY_NAME) == len(METRICS), "a metric is declared twice"


def by_name(name: str) -> Metric:
    """Raises KeyError for a name nobody declared."""
    return _BY_NAME[name]
