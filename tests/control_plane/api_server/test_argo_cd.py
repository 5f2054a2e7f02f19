"""Argo CD's own programs sync the examples from a git repository into an empty cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.foreign import definition
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import (
    Cluster,
    Program,
    missing_programs,
    program,
    running_cluster,
    start_controllers,
)
from tests.support.api_server.sandbox import KIND
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.argo_cd import (
    EXAMPLES,
    NAMESPACE,
    SETTING,
    configuration,
    definitions,
    make_repository,
    missing,
    running_argo_cd,
    verdict,
    wait_alive,
)
from tests.support.gitops_states import states
from tests.support.markdown import runnables

ROOT = EXAMPLES.parents[2]
APPLICATION = "argoproj.io/v1alpha1"
SYNC_SECONDS = 180.0


class Synced:
    """An empty cluster and Argo CD, which has been given the example's applications."""

    def __init__(self, cluster: Cluster, api: Api, programs: list[Program]) -> None:
        self.cluster, self.api, self._programs = cluster, api, programs

    def application(self, name: str) -> Obj:
        path = self.api.path("Application", NAMESPACE, name, version=APPLICATION)
        return self.api.request("GET", path).must()

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        wait_alive(self._programs, what, condition, SYNC_SECONDS)

    def wait_verdict(self, name: str, sync: str, health: str) -> None:
        try:
            self.wait(
                f"{name} is {sync} and {health}",
                lambda: verdict(self.application(name)) == (sync, health),
            )
        except TimeoutError as error:
            status = self.application(name).get("status", {})
            raise TimeoutError(f"{error}\n{yaml.safe_dump(status)}") from None


def kubectl(config: Path, command: str, **variables: str) -> None:
    """A shell command with kubectl in its path, in the repository."""
    path = f"{program('kubectl').parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(config), **variables}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synced]:
    servers = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
    programs = missing_programs(*servers) + missing()
    if programs:
        pytest.skip(f"{', '.join(programs)} not built: e2e/tools/build.sh argo-cd helm3")
    folder = tmp_path_factory.mktemp("argo")
    with running_cluster(folder) as cluster, Api(cluster) as api:
        start_controllers(cluster)
        for kind in ("PodMonitor", "PrometheusRule"):
            api.install(definition(kind))
        for file in definitions():
            api.install(yaml.safe_load(file.read_text(encoding="utf-8")))
        config = cluster.kubeconfig("kubectl")
        installed = folder / "installed.yaml"
        installed.write_text(yaml.safe_dump_all(configuration()), encoding="utf-8")
        kubectl(config, f"kubectl apply -f {installed}")
        git = make_repository(
            folder,
            {"charts/foveal": ROOT / "charts/foveal",
             "examples/gitops/models": ROOT / "examples/gitops/models"},
        )  # fmt: skip
        (page,) = runnables(ROOT / "docs/how-to/gitops.md", "cluster")
        until_waits = page.script.partition("kubectl wait")[0]
        kubectl(config, until_waits, GIT=git)
        argo = folder / "argo-cd"
        argo.mkdir()
        with running_argo_cd(cluster.kubeconfig("argo"), argo) as running:
            yield Synced(cluster, api, running)


@pytest.mark.timeout(900, func_only=True)
def test_the_examples_are_synced_into_an_empty_cluster(synced: Synced) -> None:
    """Both applications at once: the models come again once the chart has brought their kind."""
    synced.wait_verdict("foveal", "Synced", "Progressing")  # no node runs its pods here
    assert synced.api.get("Deployment", "foveal-system", "foveal-operator") is not None
    synced.wait_verdict("models", "Synced", "Progressing")
    resource = synced.api.get(KIND, "models", "qwen")
    assert resource is not None
    wanted = yaml.safe_load((ROOT / "examples/gitops/models/qwen.yaml").read_text("utf-8"))
    assert resource["spec"] == wanted["spec"]


@pytest.mark.timeout(600, func_only=True)
def test_the_page_takes_no_setting_away(synced: Synced) -> None:
    """Argo CD finds its ConfigMap by a label, which with the settings is its installation's."""
    config = synced.api.get("ConfigMap", NAMESPACE, "argocd-cm")
    assert config is not None
    assert config["metadata"]["labels"] == {"app.kubernetes.io/part-of": "argocd"}
    assert config["data"].items() >= SETTING.items()
    assert "resource.customizations.health.foveal.dev_MultiModalInference" in config["data"]


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize("state", ["ready", "misfit", "rolling"])
def test_health_is_what_the_page_says(synced: Synced, state: str) -> None:
    """Each state as the operator writes it, judged by Argo CD with the page's configuration."""
    synced.wait_verdict("models", "Synced", "Progressing")
    live = synced.api.get(KIND, "models", "qwen")
    assert live is not None
    observed = {"observedGeneration": live["metadata"]["generation"]}
    try:
        for name in dict.fromkeys(("ready", state)):  # each must be seen to change to the next
            found, _, health = states()[name]
            conditions = [{**one, **observed} for one in found["status"]["conditions"]]
            change = {"status": {**found["status"], **observed, "conditions": conditions}}
            synced.api.merge(KIND, "models", "qwen", change, "status").must()
            synced.wait_verdict("models", "Synced", health)
    finally:
        synced.api.merge(KIND, "models", "qwen", {"status": None}, "status").must()


@pytest.mark.timeout(600, func_only=True)
def test_an_operator_at_work_leaves_nothing_out_of_sync(synced: Synced) -> None:
    """What it makes carries no tracking label, and it writes nothing that Git holds."""
    synced.wait_verdict("models", "Synced", "Progressing")
    config = synced.cluster.kubeconfig("operator")
    operator = OperatorProcess("a", config, "models", NO_LEASE)
    before = synced.application("models")["status"]
    operator.start()
    try:
        operator.wait_ready()
        children = lambda: synced.api.list("Job", "models")  # noqa: E731
        synced.wait("the operator has begun", children)
        checked = synced.application("models")["status"]["reconciledAt"]
        synced.wait(
            "Argo CD has looked again",
            lambda: synced.application("models")["status"]["reconciledAt"] > checked,
        )
        after = synced.application("models")["status"]
        assert verdict({"status": after}) == ("Synced", "Progressing")
        assert after["history"] == before["history"], "nothing was synced again"
        assert [one["kind"] for one in after["resources"]] == [KIND]
        live = synced.api.get(KIND, "models", "qwen")
        assert live is not None
        assert live["metadata"]["generation"] == 1
    finally:
        operator.stop()


@pytest.mark.timeout(600, func_only=True)
def test_a_deleted_resource_comes_back(synced: Synced) -> None:
    synced.wait_verdict("models", "Synced", "Progressing")
    before = synced.api.get(KIND, "models", "qwen")
    assert before is not None
    synced.api.delete(KIND, "models", "qwen").must()

    def is_back() -> bool:
        live = synced.api.get(KIND, "models", "qwen")
        return live is not None and live["metadata"]["uid"] != before["metadata"]["uid"]

    synced.wait("the resource is there again", is_back)
