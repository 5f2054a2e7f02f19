"""The operator by its chart, the bundled model on a volume, and a Prometheus that watches both,
once for all cluster tests.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.observability.server import prometheus as running_prometheus
from tests.support.node import commands

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": "models",
        "resources": {"requests": {"storage": "1Gi"}},
    },
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """No test begins when the time is up: one that is cut off says nothing, and its exit code
    hides what failed before it."""
    until = os.environ.get("FOVEAL_E2E_UNTIL")
    if until and time.time() > float(until):
        pytest.skip("no time was left for it on a node")


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """run.sh starts it; a test never starts or stops a cluster of its own."""
    if not commands.KUBECONFIG.exists():
        pytest.fail("no cluster is up: `make cluster` starts one and runs these tests on it")
    yield
    commands.reader().close()


@pytest.fixture(scope="session")
def monitoring(cluster: None) -> None:
    """The prometheus-operator's own definitions, so that the API server judges what is applied."""
    folder = commands.TOOLS / "crds/prometheus-operator"
    commands.kubectl("apply", "--server-side", "-f", str(folder))  # too large for the other way
    for plural in ("podmonitors", "servicemonitors", "prometheusrules"):
        commands.kubectl(
            "wait", f"crd/{plural}.monitoring.coreos.com", "--for=condition=Established"
        )


@pytest.fixture(scope="session")
def operator(monitoring: None) -> Iterator[str]:
    """The chart, installed as README says, with less CPU asked for: nodes of tests are small."""
    commands.run(
        "helm", "upgrade", "--install", "foveal", "charts/foveal",
        "-n", "foveal-system", "--create-namespace",
        "--set", f"image.registry={commands.REGISTRY},runtimeImage.registry={commands.REGISTRY}",
        "--set", "resources.requests.cpu=20m",
        "--set", "metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true",
        "--wait", "--timeout=120s", seconds=150,
    )  # fmt: skip
    yield "foveal-system"
    commands.run("helm", "uninstall", "foveal", "-n", "foveal-system", "--wait", seconds=120)


@pytest.fixture(scope="session")
def models(cluster: None) -> str:
    """A claim with examples/tiny-vlm/model in folder tiny-vlm."""
    folder = commands.ROOT / "run/models/tiny-vlm"
    shutil.copytree(
        Path(commands.REPOSITORY) / "examples/tiny-vlm/model", folder, dirs_exist_ok=True
    )
    folder.parent.chmod(0o755)
    commands.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "models"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "hostPath": {"path": str(folder.parent)},
            },
        },
        CLAIM,
    )
    return "models"


@pytest.fixture(scope="session")
def tiny(operator: str, models: str) -> Iterator[str]:
    """Two frontends and two engines that are Ready; the service's URL."""
    body = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8"))
    commands.apply(body)
    commands.kubectl("wait", "mmi/tiny", "--for=condition=Ready", "--timeout=300s", seconds=320)
    yield commands.service_url()
    commands.kubectl("delete", "mmi", "tiny", "--ignore-not-found", "--wait", seconds=120)


@pytest.fixture(scope="session")
def prometheus(operator: str, tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes what the applied PodMonitors say and evaluates the rules
    applied; the prometheus-operator's own generator makes its configuration of them."""
    folder = tmp_path_factory.mktemp("prometheus")
    applied = commands.kubectl(
        "get", "podmonitors,servicemonitors,prometheusrules", "-A", "-o", "yaml"
    )
    program, config = str(commands.TOOLS / "scrape-config"), str(commands.KUBECONFIG)
    made = commands.run(program, "-kubeconfig", config, "-rules", str(folder), stdin=applied)
    with running_prometheus(yaml.safe_load(made), folder) as url:
        yield url


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The pages' commands come first: they install the chart, Argo CD's into an empty cluster."""
    first = {"test_gitops.py": 0, "test_pages.py": 1}
    items.sort(key=lambda item: first.get(item.path.name, 2))
