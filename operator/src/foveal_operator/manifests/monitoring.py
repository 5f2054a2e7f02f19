"""PodMonitor, PrometheusRule and dashboard ConfigMap of one resource.

Rules and dashboards come in as data, generated from the metric registry by observability/; these
builders place them and fill in whose they are. PodMonitor, because several processes stand behind
one Service port.
"""

from __future__ import annotations

from typing import Any

import msgspec

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context, content_hash
from foveal_operator.manifests.pods import REVISION_LABEL

# Labels of pods that every series carries; dashboards and rules choose by them.
TARGET_LABELS = {
    "resource": "app.kubernetes.io/instance",
    "role": "app.kubernetes.io/component",
    "revision": REVISION_LABEL,
}
FOLDER_ANNOTATION = "grafana_folder"


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
        "podMetricsEndpoints": [
            {"port": "http", "path": "/metrics", "interval": "15s", "relabelings": _relabelings()}
        ],
    }
    return _labelled(
        context, context.object("monitoring.coreos.com/v1", "PodMonitor", "", "frontend", spec=spec)
    )


def prometheus_rule(context: Context) -> Obj:
    spec = {"groups": _pinned(context, list(context.facts.rule_groups))}
    return _labelled(
        context,
        context.object("monitoring.coreos.com/v1", "PrometheusRule", "", "frontend", spec=spec),
    )


def dashboard(context: Context) -> Obj:
    body = context.object(
        "v1",
        "ConfigMap",
        "dashboard",
        "frontend",
        data=_pinned(context, dict(context.facts.dashboards)),
    )
    body = _labelled(context, body, {"grafana_dashboard": "1"})
    annotations = {FOLDER_ANNOTATION: "Foveal"}
    return {**body, "metadata": {**body["metadata"], "annotations": annotations}}


def _relabelings() -> list[Obj]:
    return [
        {
            "sourceLabels": [f"__meta_kubernetes_pod_label_{_as_prometheus_names(label)}"],
            "targetLabel": target,
        }
        for target, label in TARGET_LABELS.items()
    ]


def _as_prometheus_names(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label)


def _pinned(context: Context, value: Any) -> Any:
    """The same with this resource in place of the tokens, in every text inside. Done on JSON,
    where one replacement reaches all texts: names need no quoting."""
    namespace, name = context.inference.namespace, context.name
    data = msgspec.json.encode(value)
    for token, text in (
        (b"@namespace@", namespace),
        (b"@resource@", name),
        (b"@id@", content_hash([namespace, name])),
    ):
        data = data.replace(token, text.encode())
    return msgspec.json.decode(data)


def _labelled(context: Context, body: Obj, more: dict[str, str] | None = None) -> Obj:
    extra = {**(more or {}), **context.inference.spec.observability.labels}
    labels = {**extra, **body["metadata"]["labels"]}
    return {**body, "metadata": {**body["metadata"], "labels": labels}}
