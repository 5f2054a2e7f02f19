"""Dashboards and alert rules, ready to be placed by manifests/monitoring.py and by the chart.

boards/ and alerts.py define dashboards and alerts, tests/support/grafana.py
draws dashboards/*.json; all three are checked against the metric registry. The operator reads the
drawn files and never imports the drawing library.
"""

from __future__ import annotations

from importlib.resources import files

from foveal_operator.observability.alerts import operator_rule_groups, resource_rule_groups

RESOURCE_FILE = "foveal-resource.json"


def resource_dashboards() -> dict[str, str]:
    """The overview of one resource, with tokens; for ClusterFacts.dashboards."""
    return {RESOURCE_FILE: _read(RESOURCE_FILE)}


def cluster_dashboards() -> dict[str, str]:
    """File name to JSON of the dashboards that a cluster has once."""
    folder = files(__package__).joinpath("dashboards")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    return {name: _read(name) for name in names if name != RESOURCE_FILE}


def _read(name: str) -> str:
    return files(__package__).joinpath("dashboards", name).read_text(encoding="utf-8")


__all__ = [
    "cluster_dashboards",
    "operator_rule_groups",
    "resource_dashboards",
    "resource_rule_groups",
]
