"""docs/reference/metrics.md from the declarations.

`python -m tests.support.metrics_page docs/reference/metrics.md` writes it.

A test compares the committed file with what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.plan.metrics.metric import Metric

_HEAD = """# Metrics

Generated from `foveal_runtime.plan.metrics`; do not edit. Every process serves `/metrics`; a
frontend shows the engines' series too when it is told about them (`metrics_peers`, local mode).

Families named `vllm:` keep the names, types, labels and buckets that existing dashboards use. Each
family has one exporter, so sums over processes count nothing twice; frontends leave the label
`engine` empty. Families without the label `process` add up the HTTP processes of a frontend. One
that dies or does not answer leaves in the sum what it showed last, and its successor counts on.

Histograms marked *exemplars* show the trace of a request in each bucket, where requests are traced
and the scraper accepts OpenMetrics
([traces](../how-to/observability.md#from-a-latency-to-its-trace)).
"""


def markdown() -> str:
    parts = [_HEAD]
    by_role = {
        "frontend": "Frontends",
        "engine": "Engines",
        "both": "Frontends and engines",
        "operator": "Operator",
    }
    groups: dict[str, list[Metric]] = {key: [] for key in by_role}
    for metric in METRICS:
        groups[metric.roles[0] if len(metric.roles) == 1 else "both"].append(metric)
    for key, title in by_role.items():
        if not groups[key]:
            continue
        parts.append(f"\n## {title}\n\n{rows(groups[key])}")
    return "".join(parts)


def rows(metrics: Iterable[Metric]) -> str:
    """The table alone."""
    head = "| name | type | labels | meaning |\n|---|---|---|---|\n"
    return head + "".join(_row(metric) for metric in metrics)


def _row(metric: Metric) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    unit = f" Unit: {metric.unit}." if metric.unit else ""
    traced = " Has *exemplars*." if metric.is_traced else ""
    return f"| `{name}` | {metric.kind} | {labels} | {metric.help}{unit}{traced} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
