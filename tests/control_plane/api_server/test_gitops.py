"""A resource applied again and again by several tools stays what it is: no new generation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.programs import Cluster, missing_programs, program
from tests.support.samples import LEGAL, put


@pytest.fixture
def kubectl(cluster: Cluster, tmp_path: Path) -> list[str]:
    if missing_programs("kubectl"):
        pytest.skip("kubectl not built: make control-plane builds what is missing")
    config = cluster.kubeconfig("kubectl")
    return [str(program("kubectl")), f"--kubeconfig={config}", f"--cache-dir={tmp_path}"]


def run(command: list[str], obj: Obj) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=json.dumps(obj), capture_output=True, text=True, timeout=60
    )


def apply_file(kubectl: list[str], obj: Obj, *flags: str) -> str:
    done = run([*kubectl, "apply", "-f", "-", *flags], obj)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LEGAL)
def test_applied_twice_by_several_tools_no_generation_and_no_difference(
    api: Api, kubectl: list[str], namespace: str, name: str
) -> None:
    """Also proves that the server rewrites nothing: no default, no normalised quantity."""
    obj = put(LEGAL[name], "metadata.namespace", namespace)
    assert "created" in apply_file(kubectl, obj)
    assert "unchanged" in apply_file(kubectl, obj)
    for manager in ("argocd-controller", "kustomize-controller"):
        for _ in range(2):
            apply_file(
                kubectl, obj, "--server-side", "--force-conflicts", f"--field-manager={manager}"
            )
    difference = run([*kubectl, "diff", "-f", "-"], obj)
    assert difference.returncode == 0, difference.stdout + difference.stderr
    live = api.get("MultiModalInference", namespace, "qwen")
    assert live is not None
    assert live["metadata"]["generation"] == 1
    assert live["spec"] == obj["spec"]


def test_kubectl_says_what_is_wrong_with_a_misspelt_field(
    kubectl: list[str], namespace: str
) -> None:
    """Client-side apply validates strictly by default since 1.27; nothing is dropped silently."""
    obj = put(LEGAL["minimal"], "metadata.namespace", namespace)
    done = run([*kubectl, "apply", "-f", "-"], put(obj, "spec.engine.gpus", 2))
    assert done.returncode != 0
    assert "spec.engine.gpus" in done.stderr


def test_get_prints_ready_and_reason_in_one_line(kubectl: list[str], namespace: str) -> None:
    apply_file(kubectl, put(LEGAL["minimal"], "metadata.namespace", namespace))
    done = run([*kubectl, "get", "mmi", "-n", namespace], {})
    assert done.returncode == 0, done.stderr
    heads = done.stdout.splitlines()[0].split()
    assert heads == ["NAME", "READY", "REASON", "FRONTENDS", "ENGINES", "MM", "KV", "AGE"]
    explained = run([*kubectl, "explain", "mmi.spec.caches.ipc.size"], {})
    assert "DESCRIPTION" in explained.stdout


EXAMPLES = Path(__file__).parents[3] / "examples/gitops"
DEFINITIONS = Path(os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")) / "crds"


def foreign_examples(tool: str) -> list[Obj]:
    folder = {"argo": "argocd", "flux": "flux"}[tool]
    found = [
        body
        for file in sorted((EXAMPLES / folder).glob("*.yaml"))
        for body in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    ]
    return [body for body in found if body["kind"] != "ConfigMap"]


@pytest.mark.parametrize(
    ("tool", "kinds"),
    [
        ("argo", ["Application", "Application"]),
        ("flux", ["Kustomization", "GitRepository", "HelmRelease"]),
    ],
)
def test_examples_fit_the_definitions_that_argo_cd_and_flux_ship(
    api: Api, namespace: str, tool: str, kinds: list[str]
) -> None:
    """Judged by the API server as those tools' own: no unknown field, no wrong value."""
    files = sorted((DEFINITIONS / tool).glob("*.yaml"))
    if not files:
        pytest.skip(f"no definitions of {tool}: e2e/tools/crds.sh fetches them")
    for file in files:
        api.install(yaml.safe_load(file.read_text(encoding="utf-8")))
    examples = foreign_examples(tool)
    assert [body["kind"] for body in examples] == kinds
    for body in examples:
        obj = put(body, "metadata.namespace", namespace)
        path = api.path_of(obj, with_name=False)
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        api.request("POST", path, obj, **query).must()
        wrong = put(obj, "spec.nonsense", 1)
        assert "nonsense" in api.request("POST", path, wrong, **query).message
