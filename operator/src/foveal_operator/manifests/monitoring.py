"""PodMonitor, PrometheusRule and dashboard ConfigMap of one resource.

Rules and dashboards come in as data, generated from the metric registry elsewhere; these builders
only place them. PodMonitor, because several processes stand behind one Service port.
"""

from __future__ import annotations

from foveal_operator.manifests.context import Context, Obj


def is_wanted(toggle: str, api_exists: bool) -> bool:
    """Auto follows the cluster."""
    return toggle == "Enabled" or (toggle == "Auto" and api_exists)


def pod_monitor(context: Context) -> Obj:
    labels = {
        key: value
        for key, value in context.selector("frontend").items()
        if key != "app.kubernetes.io/component"
    }
    spec = {
        "selector": {"matchLabels": labels},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
    }
    return _labelled(
        context, context.object("monitoring.coreos.com/v1", "PodMonitor", "", "frontend", spec=spec)
    )


def prometheus_rule(context: Context) -> Obj:
    spec = {"groups": list(context.facts.rule_groups)}
    return _labelled(
        context,
        context.object("monitoring.coreos.com/v1", "PrometheusRule", "", "frontend", spec=spec),
    )


def dashboard(context: Context) -> Obj:
    body = context.object(
        "v1", "ConfigMap", "dashboard", "frontend", data=dict(context.facts.dashboards)
    )
    return _labelled(context, body, {"grafana_dashboard": "1"})


def _labelled(context: Context, body: Obj, more: dict[str, str] | None = None) -> Obj:
    extra = {**(more or {}), **context.inference.spec.observability.labels}
    labels = {**extra, **body["metadata"]["labels"]}
    return {**body, "metadata": {**body["metadata"], "labels": labels}}
