"""Panels about devices, asked of Prometheus's own engine with what DCGM's exporter writes.

Without `promtool` these tests are skipped and say so; .ci/run installs it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.observability.boards.overview import OVERVIEW
from foveal_operator.observability.panel import Panel
from foveal_operator.observability.promql import DEVICE_METRICS
from tests.support.observability_files import PROMTOOL, promtool

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

PANELS = [panel for panel in OVERVIEW.panels if "DCGM_" in panel.queries[0].expr]
POD = 'namespace="models",pod="qwen-engine-0"'
KNOWN = {
    f'foveal_build_info{{{POD},resource="qwen",role="engine"}}': "1x9",
    'foveal_build_info{namespace="models",pod="other-engine-0",resource="other"}': "1x9",
}
EXPORTER = 'namespace="gpu-operator",pod="dcgm-exporter-x"'
OWN = {
    f'gpu="0",{POD}': 40,  # honorLabels: true
    f'gpu="1",{EXPORTER},exported_namespace="models",exported_pod="qwen-engine-0"': 60,
}
AGAIN = {key.replace("exporter-x", "exporter-y"): value for key, value in OWN.items()}
"""An exporter that has restarted is another pod with the same devices for five minutes."""
FOREIGN = {
    'gpu="2",namespace="models",pod="training-0"': 90,
    f'gpu="3",{EXPORTER},exported_namespace="models",exported_pod="training-0"': 91,
    'gpu="4",namespace="research",pod="qwen-engine-0"': 92,
    f'gpu="5",{EXPORTER},exported_namespace="research",exported_pod="qwen-engine-0"': 93,
    f'gpu="6",{EXPORTER}': 94,  # nobody has it
    'gpu="7",namespace="models",pod="other-engine-0"': 95,
}


def asked(expr: str, resource: str = "qwen") -> str:
    chosen = {"namespace": "models", "resource": resource, "pod": ".*"}
    for name, value in chosen.items():
        expr = expr.replace(f"${name}", value)
    assert not re.search(r"\$[a-zA-Z_]", expr)
    return expr


def answers(tmp_path: Path, series: dict[str, str], checks: list[dict[str, Any]]) -> None:
    """Fails where Prometheus answers otherwise."""
    suite = tmp_path / "suite.yaml"
    inputs = [{"series": key, "values": value} for key, value in series.items()]
    one = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    suite.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [one]}, width=10_000))
    promtool("test", "rules", str(suite))


def test_there_is_a_panel_for_each_family_of_the_exporter() -> None:
    assert [panel.title for panel in PANELS] == ["Devices", "Device memory"]
    asked_for = " ".join(query.expr for panel in PANELS for query in panel.queries)
    for metric in DEVICE_METRICS:
        assert metric.name in asked_for


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_devices_are_those_of_the_resources_own_pods(panel: Panel, tmp_path: Path) -> None:
    """With the exporter's default scrape each panel showed the exporter's pod or nothing, and with
    honorLabels the devices of every pod of the namespace."""
    series, checks = dict(KNOWN), []
    for query in panel.queries:
        (name,) = set(re.findall(r"DCGM_\w+", query.expr))
        for labels, value in (OWN | AGAIN | FOREIGN).items():
            series[f"{name}{{{labels}}}"] = f"{value}x9"
        factor = {"GPU_UTIL": 0.01, "GPU_TEMP": 1}.get(name.removeprefix("DCGM_FI_DEV_"), 1 << 20)
        expected = [
            {"labels": f'{{gpu="{gpu}",pod="qwen-engine-0"}}', "value": value * factor}
            for gpu, value in enumerate(OWN.values())
        ]
        checks.append({"expr": asked(query.expr), "eval_time": "5m", "exp_samples": expected})
        every = f"count({asked(query.expr, '.*')})"
        checks.append({"expr": every, "eval_time": "5m", "exp_samples": [{"value": 3}]})
    answers(tmp_path, series, checks)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_without_an_exporter_a_panel_is_empty_and_no_error(panel: Panel, tmp_path: Path) -> None:
    checks = [
        {"expr": asked(query.expr), "eval_time": "5m", "exp_samples": []} for query in panel.queries
    ]
    answers(tmp_path, KNOWN, checks)
