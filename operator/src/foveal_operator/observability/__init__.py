"""Dashboards and alert rules, ready to be placed by manifests/monitoring.py and by the chart.

boards/ and alerts.py define dashboards and alerts, tests/support/grafana.py draws the dashboards
of the chart and the one of a resource, foveal-resource.json; all are checked against the metric
registry. The operator reads the drawn file and never imports the drawing library.
"""

from __future__ import annotations

from importlib.resources import files

from foveal_operator.observability.alerts import operator_rule_groups, resource_rule_groups

RESOURCE_FILE = "foveal-resource.json"


def resource_dashboards() -> dict[str, str]:
    """The overview of one resource, with tokens; for ClusterFacts.dashboards."""
    return {RESOURCE_FILE: files(__package__).joinpath(RESOURCE_FILE).read_text(encoding="utf-8")}


__all__ = [
    "operator_rule_groups",
    "resource_dashboards",
    "resource_rule_groups",
]
