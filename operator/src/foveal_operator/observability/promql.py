"""PromQL made from the metric registry: a name or label that nobody declared fails at once.

Used by boards/ and alerts.py while dashboards and rules are generated, and by `foveal dashboard`,
never by the operator at run time. Besides a family's own labels there are those that scraping adds
(TARGET_LABELS, see the PodMonitors).
"""

from __future__ import annotations

import msgspec

from foveal_operator.telemetry.declared import OPERATOR_METRICS, OWN_LABEL, is_shared
from foveal_runtime.plan.errors import SERVER_FAULTS
from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.plan.metrics.metric import Metric

TARGET_LABELS = frozenset({"namespace", "resource", "pod", "role", "revision"})
"""`resource`, `role` and `revision` come from pod labels by the PodMonitor's relabelings. The
operator's families about a resource carry `namespace` and `name` themselves (honorLabels)."""

_REQUESTS = "!~/(readyz|livez|health|metrics|version)"
"""`handler` of what clients ask for; probes are many."""
_PROCESS = ("process",)
PROCESS_METRICS: tuple[Metric, ...] = (
    Metric(name="process_resident_memory_bytes", kind="gauge", help="Resident memory.",
           roles=("frontend", "engine"), labels=_PROCESS, unit="bytes"),
    Metric(name="process_start_time_seconds", kind="gauge", help="When the process began.",
           roles=("frontend", "engine"), labels=_PROCESS, unit="seconds"),
    Metric(name="process_cpu_seconds", kind="counter", help="CPU time.",
           roles=("frontend", "engine"), labels=_PROCESS, unit="seconds"),
)  # fmt: skip
"""What the client library adds to every process."""

DEVICE_METRICS: tuple[Metric, ...] = tuple(
    Metric(name=f"DCGM_FI_DEV_{name}", kind="gauge", help=text, roles=(),
           labels=("gpu", "exported_namespace", "exported_pod"))
    for name, text in (
        ("GPU_UTIL", "Busy, in percent."), ("GPU_TEMP", "In degrees Celsius."),
        ("FB_USED", "Memory in MiB."), ("FB_FREE", "Memory in MiB."),
    )
)  # fmt: skip
"""NVIDIA's exporter's own names; it knows pods, and no resource: ask by Scope.device."""

KNOWN: dict[str, Metric] = {
    metric.name: metric
    for metric in (*METRICS, *OPERATOR_METRICS, *PROCESS_METRICS, *DEVICE_METRICS)
}


class Scope(msgspec.Struct, frozen=True):
    """Whose series, and over which time rates are taken.

    Attributes:
        namespace, resource, pod: label matchers, or "" where a family must not be narrowed.
        installation: matcher of the namespace that an operator runs in.
        window: a duration or a dashboard variable that holds one.
    """

    namespace: str = ""
    resource: str = ""
    pod: str = ""
    installation: str = ""
    window: str = "5m"

    def series(self, name: str, part: str = "", /, **labels: str) -> str:
        """A selector. `part` is bucket, sum or count of a histogram. A label's value "~a|b" is a
        pattern, "!a" and "!~a|b" are negations."""
        metric = KNOWN[name]
        assert (metric.kind == "histogram") == bool(part), f"{name}: part {part!r}"
        scope = {"namespace": self.namespace, "resource": self.resource, "pod": self.pod}
        if not metric.roles:
            scope["resource"] = ""
        elif metric.roles == ("operator",):
            # A resource's series say whose they are; the others say which operator's.
            if {"namespace", "name"} <= set(metric.labels):
                scope = {"namespace": self.namespace, "name": self.resource}
            else:
                own = f'="{OWN_LABEL[1]}"' if is_shared(name) else ""
                scope = {OWN_LABEL[0]: own, "namespace": self.installation}
        matchers = [f"{key}{value}" for key, value in scope.items() if value]
        for label, value in labels.items():
            assert label in metric.labels or label in TARGET_LABELS, f"{name} has no {label}"
            matchers.append(_matcher(label, value))
        suffix = {"counter": "_total", "gauge": "", "histogram": f"_{part}"}[metric.kind]
        inside = ",".join(matchers)
        return f"{name}{suffix}{{{inside}}}" if inside else f"{name}{suffix}"

    def rate(self, name: str, by: str = "", part: str = "", /, **labels: str) -> str:
        """Per second, summed; `by` names the labels that are kept, separated by commas."""
        return self.total(name, by, part, inner=f"rate(%s[{self.window}])", **labels)

    def increase(self, name: str, by: str = "", /, **labels: str) -> str:
        return self.total(name, by, inner=f"increase(%s[{self.window}])", **labels)

    def total(
        self, name: str, by: str = "", part: str = "", /, *,
        inner: str = "%s", how: str = "sum", **labels: str,
    ) -> str:  # fmt: skip
        """An aggregate of a family: `how` is sum, max, min, avg or count."""
        _check_labels(name, by)
        over = f" by ({by})" if by else ""
        return f"{how}{over} ({inner % self.series(name, part, **labels)})"

    def ratio(self, top: str, bottom: str, by: str = "", /, **labels: str) -> str:
        """Of two counters' rates; no data before the first event of the lower one."""
        return f"{self.rate(top, by, **labels)} / {self.rate(bottom, by, **labels)}"

    def failed(self) -> str:
        """The share of requests, probes left out, that the server failed; no data while there are
        none. By code, since a stream that broke off began with a 200."""
        top = self.rate("foveal_request_errors", code="~" + "|".join(SERVER_FAULTS))
        return f"{top} / ({self.rate('http_requests', handler=_REQUESTS)} > 0)"

    def mean(self, name: str, by: str = "", /, **labels: str) -> str:
        """The mean of a histogram."""
        top = self.rate(name, by, "sum", **labels)
        return f"{top} / {self.rate(name, by, 'count', **labels)}"

    def buckets(self, name: str, /, **labels: str) -> str:
        """How many observations of the window were at most each bound, by `le`."""
        inner = f"increase({self.series(name, 'bucket', **labels)}[{self.window}])"
        return f"sum by (le) ({inner})"

    def device(self, name: str, /) -> str:
        """The largest value of an exporter's family by `pod` and `gpu`, of this scope's pods alone:
        those that `foveal_build_info` tells. A scraper that does not honour the exporter's labels
        writes the exporter's own pod into `pod`, and the one that has the device into
        `exported_pod`: then an exporter that has restarted shows each device twice, which only an
        aggregate makes one before labels are replaced."""
        metric = KNOWN[name].name
        exported = f'max by (exported_namespace,exported_pod,gpu) ({metric}{{exported_pod!=""}})'
        for label in ("pod", "namespace"):
            exported = f'label_replace({exported}, "{label}", "$1", "exported_{label}", "(.+)")'
        own = f'max by (namespace,pod,gpu) ({metric}{{exported_pod=""}})'
        known = self.series("foveal_build_info")
        return f"max by (pod,gpu) (({exported} or {own}) and on (namespace,pod) {known})"

    def quantile(self, q: float, name: str, by: str = "", /, **labels: str) -> str:
        _check_labels(name, by)
        over = ",".join(filter(None, ("le", by)))
        inner = f"rate({self.series(name, 'bucket', **labels)}[{self.window}])"
        return f"histogram_quantile({q:g}, sum by ({over}) ({inner}))"


def _check_labels(name: str, by: str) -> None:
    for label in filter(None, by.split(",")):
        known = label in KNOWN[name].labels or label in TARGET_LABELS
        assert known, f"{name} has no label {label}"


def _matcher(label: str, value: str) -> str:
    if value.startswith("!~"):
        return f'{label}!~"{value[2:]}"'
    if value.startswith("~"):
        return f'{label}=~"{value[1:]}"'
    if value.startswith("!"):
        return f'{label}!="{value[1:]}"'
    return f'{label}="{value}"'


DASHBOARD = Scope('=~"$namespace"', '=~"$resource"', '=~"$pod"', window="$__rate_interval")
RESOURCE = Scope('="@namespace@"', '="@resource@"')
"""Alert rules of one resource: the tokens are filled in by manifests/monitoring.py."""
OPERATOR = Scope(installation='="@installation@"')
"""Alert rules of one operator: the chart fills in the namespace of its release."""
OPERATOR_DASHBOARD = Scope(installation='=~"$installation"', window="$__rate_interval")
