"""Dashboards and rules as committed, with their expressions, and Prometheus's own tool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from foveal_operator.observability import (
    operator_rule_groups,
    resource_dashboards,
    resource_rule_groups,
)

CHART_DASHBOARDS = Path(__file__).parents[2] / "charts/foveal/files/dashboards"

_TOOLS = os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=_TOOLS)
FILES = {
    **{file.name: file.read_text(encoding="utf-8") for file in sorted(CHART_DASHBOARDS.iterdir())},
    **resource_dashboards(),
}


def promtool(*arguments: str) -> None:
    """Fails with what it says; only where PROMTOOL is there."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel and rule, as committed."""
    for name, text in FILES.items():
        for panel in json.loads(text)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"]
    for group in (*resource_rule_groups(), *operator_rule_groups()):
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
