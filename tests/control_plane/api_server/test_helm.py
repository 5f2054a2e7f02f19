"""A resource in a user's own chart: installed, upgraded and reported on, it stays what it was."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.control_plane.api_server.api import Api
from tests.control_plane.api_server.programs import Cluster, program
from tests.control_plane.samples import LEGAL, Obj

KIND = "MultiModalInference"
Helm = Callable[..., subprocess.CompletedProcess[str]]
HELM_3 = Path(os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")) / "helm3"
# Helm 4 applies on the server by default, Helm 3 knows only a merge of its own.
MODES = {"server side": ["--server-side=true"], "client side": ["--server-side=false"], "Helm 3": []}


@pytest.fixture
def helm(cluster: Cluster, tmp_path: Path, mode: str) -> Helm:
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


def report(api: Api, namespace: str, name: str) -> None:
    """What the operator writes: the status, and nothing else."""
    condition = {"type": "Ready", "status": "False", "reason": "Waiting", "message": "",
                 "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    body = {"apiVersion": "foveal.dev/v1alpha1", "kind": KIND}
    body |= {"metadata": {"name": name, "namespace": namespace}}  # type: ignore[dict-item]
    body |= {"status": {"observedGeneration": 1, "conditions": [condition]}}  # type: ignore[dict-item]
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
