"""A resource in a user's own chart: installed, upgraded and reported on, it stays what it was."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.programs import Cluster, program, running_cluster
from tests.support.chart_files import CHART
from tests.support.samples import LEGAL

KIND = "MultiModalInference"
Helm = Callable[..., subprocess.CompletedProcess[str]]
HELM_3 = Path(os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")) / "helm3"
# Helm 4 applies on the server by default, Helm 3 knows only a merge of its own.
MODES = {
    "server side": ["--server-side=true"],
    "client side": ["--server-side=false"],
    "Helm 3": [],
}


@pytest.fixture
def helm(cluster: Cluster, tmp_path: Path, mode: str) -> Helm:
    return helm_at(cluster, tmp_path, mode)


def helm_at(cluster: Cluster, tmp_path: Path, mode: str) -> Helm:
    file = HELM_3 if mode == "Helm 3" else program("helm")
    if not file.exists():
        pytest.skip(f"no {file}: e2e/cluster/build.sh helm and e2e/tools/build.sh helm3 build them")
    config = cluster.kubeconfig("helm")
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(file), *words, f"--kubeconfig={config}"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=90, env={**os.environ, **homes}
        )

    return run


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """Every legal sample, each under its own name; the image is a value."""
    folder = tmp_path / "chart"
    (folder / "templates").mkdir(parents=True)
    about = {"apiVersion": "v2", "name": "models", "version": "0.1.0"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about))
    (folder / "values.yaml").write_text(yaml.safe_dump({"image": "registry.example/runtime:1"}))
    for name, obj in LEGAL.items():
        body = {**obj, "metadata": {"name": name, "labels": {"team": "vision"}}}
        body["spec"] = {**obj["spec"], "image": "{{ .Values.image }}"}
        (folder / "templates" / f"{name}.yaml").write_text(yaml.safe_dump(body))
    return folder


def report(api: Api, namespace: str, name: str, generation: int = 1, **states: str) -> None:
    """What the operator writes: the status, and nothing else."""
    conditions = [
        {"type": kind, "status": status, "reason": "Waiting", "message": "",
         "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind, status in (states or {"Ready": "False"}).items()
    ]  # fmt: skip
    body: Obj = {"apiVersion": "foveal.dev/v1alpha1", "kind": KIND}
    body["metadata"] = {"name": name, "namespace": namespace}
    body["status"] = {"observedGeneration": generation, "conditions": conditions}
    api.apply(body, "foveal-operator", sub="status").must()


def live(api: Api, namespace: str) -> dict[str, Obj]:
    """All of the chart's resources; managedFields hold times."""
    found = {}
    for name in LEGAL:
        obj = api.get(KIND, namespace, name)
        assert obj is not None
        obj["metadata"].pop("managedFields", None)
        found[name] = obj
    return found


@pytest.mark.parametrize("mode", MODES)
def test_installed_and_upgraded_nothing_moves(
    api: Api, helm: Helm, chart: Path, namespace: str, mode: str
) -> None:
    """Not even a resourceVersion; a value that changes is one generation, and back another."""
    words = ["upgrade", "--install", "release", str(chart), "-n", namespace, *MODES[mode]]

    def upgrade(*more: str) -> dict[str, Obj]:
        done = helm(*words, *more)
        assert done.returncode == 0, done.stderr
        return live(api, namespace)

    first = upgrade()
    for name, obj in first.items():
        assert obj["metadata"]["generation"] == 1
        assert obj["spec"] == {**LEGAL[name]["spec"], "image": "registry.example/runtime:1"}
        report(api, namespace, name)
    before = live(api, namespace)
    assert upgrade() == before
    assert upgrade() == before
    changed = upgrade("--set", "image=registry.example/runtime:2")
    assert {obj["metadata"]["generation"] for obj in changed.values()} == {2}
    assert {obj["spec"]["image"] for obj in changed.values()} == {"registry.example/runtime:2"}
    for name, obj in changed.items():
        assert obj["status"] == before[name]["status"]
        assert json.dumps(obj["metadata"]["labels"]) == json.dumps(
            before[name]["metadata"]["labels"]
        )


@pytest.mark.parametrize("mode", ["server side", "Helm 3"])
def test_a_first_install_says_how_to_bring_the_sample(tmp_path: Path, mode: str) -> None:
    """On a server without the definition it ended with "no matches for kind"."""
    chart, system = str(CHART), ["-n", "foveal-system", "--create-namespace"]
    sample = ["--set", "sample.enabled=true", "--set", "sample.spec.model.uri=pvc://models/tiny"]
    (tmp_path / "bare").mkdir()
    with running_cluster(tmp_path / "bare") as bare, Api(bare) as api:
        helm = helm_at(bare, tmp_path, mode)
        refused = helm("install", "foveal", chart, *system, *sample)
        assert refused.returncode != 0
        assert "Install without the sample, then add it: helm upgrade foveal" in refused.stderr
        done = helm("install", "foveal", chart, *system)
        assert done.returncode == 0, done.stderr
        done = helm("upgrade", "foveal", chart, *system[:2], "--reuse-values", *sample)
        assert done.returncode == 0, done.stderr
        assert api.get(KIND, "foveal-system", "sample") is not None


WAITS = {
    "ready": ({"Ready": "True"}, True),
    "reconciling": ({"Ready": "False", "Reconciling": "True"}, False),
    "stalled": ({"Ready": "False", "Stalled": "True"}, False),
}


@pytest.mark.parametrize("mode", ["server side"])
@pytest.mark.parametrize("state", WAITS)
def test_wait_believes_the_status(
    api: Api, cluster: Cluster, helm: Helm, tmp_path: Path, namespace: str, state: str
) -> None:
    """Helm 4's --wait judges by kstatus: success once the new spec is Ready, never while it is not.
    Of an upgrade: a resource without any status counts as healthy, so that an install may be over
    before the operator has said a word."""
    folder = tmp_path / "one"
    (folder / "templates").mkdir(parents=True)
    about = {"apiVersion": "v2", "name": "one", "version": "0.1.0"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about))
    (folder / "values.yaml").write_text(yaml.safe_dump({"image": "registry.example/runtime:1"}))
    body = {**LEGAL["cpu"], "metadata": {"name": "one"}}
    body["spec"] = {**body["spec"], "image": "{{ .Values.image }}"}
    (folder / "templates" / "one.yaml").write_text(yaml.safe_dump(body))
    words = ["upgrade", "--install", "one", str(folder), "-n", namespace]
    assert helm(*words).returncode == 0
    report(api, namespace, "one", Ready="True")
    states, succeeds = WAITS[state]

    def report_in_time() -> None:
        with Api(cluster) as operator:
            operator.wait(KIND, namespace, "one", lambda o: o and o["metadata"]["generation"] == 2)
            report(operator, namespace, "one", generation=2, **states)

    reporter = threading.Thread(target=report_in_time)
    reporter.start()
    patience = "60s" if succeeds else "4s"
    image = "image=registry.example/runtime:2"
    done = helm(*words, "--set", image, "--wait", f"--timeout={patience}")
    reporter.join(90)
    assert (done.returncode == 0) is succeeds, done.stderr
