"""The GitOps page's commands, word for word: Argo CD itself installs the operator and a model from
a git repository, and takes both away. conftest runs it before the chart is installed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import argo_cd as argo
from tests.support.node import commands
from tests.support.node.pages import follow

pytestmark = pytest.mark.cluster
CHART = "charts/foveal"
MODEL = "examples/gitops/models/tiny.yaml"


def files() -> dict[str, str | Path]:
    """What a user's repository holds: the chart with the registry of the images, and a resource."""
    values = (commands.REPOSITORY / CHART / "values.yaml").read_text(encoding="utf-8")
    resource = (commands.REPOSITORY / "examples/mmi-cluster.yaml").read_text(encoding="utf-8")
    return {
        CHART: commands.REPOSITORY / CHART,
        f"{CHART}/values.yaml": values.replace(
            '  registry: ""', f"  registry: {commands.REGISTRY}"
        ),
        MODEL: resource.replace("REGISTRY", commands.REGISTRY),
    }


def application(name: str) -> tuple[str, str]:
    command = ("get", "applications.argoproj.io", name, "-n", argo.NAMESPACE, "-o", "json")
    return argo.verdict(json.loads(commands.kubectl(*command)))


def take_away(name: str) -> None:
    """As its user would: Argo CD deletes what it has applied."""
    finalizer = {"metadata": {"finalizers": ["resources-finalizer.argocd.argoproj.io"]}}
    names = ("applications.argoproj.io", name, "-n", argo.NAMESPACE)
    if not commands.kubectl("get", *names, "--ignore-not-found", "-o", "name"):
        return  # the page did not come that far
    commands.kubectl("patch", *names, "--type=merge", "-p", json.dumps(finalizer))
    commands.kubectl("delete", *names, "--timeout=180s", seconds=200)


@pytest.fixture
def argo_cd(monitoring: None, tmp_path: Path) -> Iterator[str]:
    """As its own installation leaves a cluster; the address of a git server."""
    if argo.missing():
        pytest.skip(f"{', '.join(argo.missing())} not built: e2e/tools/build.sh argo-cd helm3")
    for file in argo.definitions():
        commands.kubectl("apply", "--server-side", "-f", str(file))  # too large for the other way
    namespace, *rest = argo.configuration()
    commands.apply(namespace)

    def configured() -> bool:
        commands.apply(*rest, namespace=argo.NAMESPACE)
        return True

    commands.until("Argo CD's kinds are served", configured)
    git = argo.make_repository(tmp_path, files())
    own = tmp_path / "argo-cd"
    own.mkdir()
    try:
        with argo.running_argo_cd(commands.KUBECONFIG, own) as programs:
            try:
                yield git
            finally:
                print(programs[-1].tail(10))
                for name in ("models", "foveal"):
                    take_away(name)
    finally:
        # Kept by the chart, with every resource; what is installed next brings its own.
        commands.kubectl("delete", "crd", "multimodalinferences.foveal.dev", "--ignore-not-found")
        gone = ("models", "foveal-system", argo.NAMESPACE)
        commands.kubectl(
            "delete", "namespace", *gone, "--ignore-not-found", "--timeout=120s", seconds=150
        )


@pytest.mark.timeout(900)
def test_gitops_page(argo_cd: str, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    folder.mkdir()
    follow("docs/how-to/gitops.md", folder, GIT=argo_cd)
    assert application("foveal") == ("Synced", "Healthy")
    assert application("models") == ("Synced", "Healthy")
    url = commands.service_url("tiny", "models")
    assert "7" in commands.ask(url, "which digit is this?", "digit-7.png")
    found = commands.get("mmi", "tiny", "models")
    assert found["metadata"]["generation"] == 1
    assert not {"argocd.argoproj.io/tracking-id"} & set(
        commands.get("service", "tiny", "models")["metadata"].get("annotations") or {}
    ), "what the operator makes is not Argo CD's to prune"
