"""Dashboards and rules as committed, with their expressions."""

from __future__ import annotations

import json
from collections.abc import Iterator

from foveal_operator.observability import (
    cluster_dashboards,
    operator_rule_groups,
    resource_dashboards,
    resource_rule_groups,
)

FILES = {**cluster_dashboards(), **resource_dashboards()}


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel and rule, as committed."""
    for name, text in FILES.items():
        for panel in json.loads(text)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"]
    for group in (*resource_rule_groups(), *operator_rule_groups()):
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
