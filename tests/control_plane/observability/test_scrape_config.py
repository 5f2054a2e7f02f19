"""What Prometheus is told to scrape: the PodMonitor through the Prometheus operator's generator.

Skipped where e2e/tools/build.sh has not built scrape-config.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.observability import resource_dashboards, resource_rule_groups
from foveal_operator.observability.promql import TARGET_LABELS
from tests.support import regenerate
from tests.support.samples import LEGAL

TOOLS = os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")
PROGRAM = shutil.which("scrape-config", path=TOOLS)
PROMTOOL = shutil.which("promtool", path=TOOLS)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="scrape-config is not built")


def monitors() -> list[dict[str, Any]]:
    facts = regenerate.ClusterFacts(
        apis=regenerate.ALL_APIS,
        rule_groups=resource_rule_groups(),
        dashboards=resource_dashboards(),
    )
    wanted = regenerate.wanted(LEGAL["gpu"], facts)
    return [*wanted.of_kind("PodMonitor"), *wanted.of_kind("PrometheusRule")]


def run(text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    assert PROGRAM is not None
    return subprocess.run(
        [PROGRAM, *flags], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_pods_are_found_by_their_labels_and_get_those_that_queries_use(tmp_path: Path) -> None:
    flags = ("-kubeconfig", "/a/kubeconfig", "-rules", str(tmp_path))
    done = run(yaml.safe_dump_all(monitors()), *flags)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    [job] = config["scrape_configs"]
    assert job["kubernetes_sd_configs"] == [
        {"role": "pod", "namespaces": {"names": ["models"]}, "kubeconfig_file": "/a/kubeconfig"}
    ]
    assert {rule.get("target_label") for rule in job["relabel_configs"]} >= TARGET_LABELS
    assert "$(" not in done.stdout, "a variable of the sidecar is left"
    [rules] = config["rule_files"]
    assert len(yaml.safe_load(Path(rules).read_text())["groups"]) == 3


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not built")
def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    done = run(yaml.safe_dump_all(monitors()), "-rules", str(tmp_path))
    file = tmp_path / "prometheus.yml"
    # In a pod it would log in as its service account, whose files are not here.
    file.write_text(done.stdout)
    command = [str(PROMTOOL), "check", "config", "--syntax-only", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_list_as_kubectl_prints_it_is_read() -> None:
    done = run(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": monitors()}))
    assert yaml.safe_load(done.stdout)["scrape_configs"]


def test_a_misspelt_field_is_an_error() -> None:
    [monitor, *_] = monitors()
    monitor["spec"]["podMetricsEndpoint"] = []
    assert "podMetricsEndpoint" in run(yaml.safe_dump(monitor)).stderr


def test_a_rule_that_prometheus_refuses_is_an_error(tmp_path: Path) -> None:
    pods, rules = monitors()
    rules["spec"]["groups"][0]["rules"][0]["expr"] = "sum("
    done = run(yaml.safe_dump_all([pods, rules]), "-rules", str(tmp_path))
    assert done.returncode == 1
    assert "parse error" in done.stderr


def test_nothing_to_scrape_is_an_error() -> None:
    assert run("apiVersion: v1\nkind: Pod\n").returncode == 1
