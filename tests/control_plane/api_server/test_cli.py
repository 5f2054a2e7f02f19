"""The `foveal` command against a real API server, with its own kubeconfig handling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.cli import main as cli
from foveal_operator.kube.kinds import FIELD_MANAGER
from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.programs import Cluster, wait_until
from tests.support.cluster_samples import READY_STATUS

EXAMPLES = Path(__file__).parents[3] / "examples"
PROFILE = str(EXAMPLES / "profiles/tiny-vlm.json")
Foveal = Callable[..., int]


@pytest.fixture
def foveal(cluster: Cluster, namespace: str) -> Foveal:
    """Runs a command in the test's namespace; returns its exit code."""
    config = str(cluster.kubeconfig("administrator"))

    def run(*words: str) -> int:
        return cli.main([*words, "--kubeconfig", config, "-n", namespace])

    return run


@pytest.fixture
def resource(api: Api, namespace: str) -> Obj:
    """The laptop example, applied by kubectl's like."""
    body: Obj = yaml.safe_load((EXAMPLES / "mmi-cpu-laptop.yaml").read_text(encoding="utf-8"))
    body["metadata"]["namespace"] = namespace
    api.apply(body).must()
    return body


def test_doctor_finds_the_definition_in_order_and_no_nodes(foveal: Foveal, capsys: Any) -> None:
    assert foveal("doctor", "-o", "json") == 1
    found = {f["area"]: (f["level"], f["text"]) for f in json.loads(capsys.readouterr().out)}
    assert found["definition"] == ("ok", "foveal.dev/v1alpha1 as in this release")
    assert found["clock"][0] == "ok"
    assert found["your rights"][0] == "ok"
    assert found["nodes"] == ("fail", "none of 0 is ready and schedulable")
    assert "restricted" in found["namespace"][1]


def test_status_budget_and_wait_read_what_an_operator_wrote(
    foveal: Foveal, api: Api, resource: Obj, capsys: Any
) -> None:
    assert foveal("status", "tiny") == 0
    assert "no status yet" in capsys.readouterr().out
    assert foveal("wait", "tiny", "--timeout", "0") == 5
    status = {**READY_STATUS, "observedGeneration": 1}
    status["conditions"] = [{**c, "observedGeneration": 1} for c in status["conditions"]]
    body = {key: resource[key] for key in ("apiVersion", "kind", "metadata")}
    api.apply({**body, "status": status}, FIELD_MANAGER, sub="status").must()
    assert foveal("wait", "tiny", "--timeout", "0") == 0
    assert foveal("status") == 0
    assert "tiny  True   Ready" in capsys.readouterr().out
    assert foveal("budget", "tiny") == 0
    assert "-75.0%" in capsys.readouterr().out
    assert foveal("status", "other") == 4
    assert "there is tiny" in capsys.readouterr().err


def test_what_a_plan_prints_changes_nothing_once_it_is_applied(
    foveal: Foveal,
    api: Api,
    controlled_cluster: Cluster,
    resource: Obj,
    namespace: str,
    tmp_path: Path,
    capsys: Any,
) -> None:
    """The server fills in defaults and drops empty values: none of that may look like a change."""
    file = str(EXAMPLES / "mmi-cpu-laptop.yaml")
    options = ("--profile", PROFILE, "--node-memory", "8Gi", "--image", "example/runtime:1")
    assert foveal("plan", "-f", file, "--server", *options, "-o", "yaml") == 1
    documents = [d for d in yaml.safe_load_all(capsys.readouterr().out) if d]
    for body in documents:
        api.apply(body, FIELD_MANAGER, force=True, fieldValidation="Strict").must()
    assert foveal("plan", "-f", file, "--server", *options) == 0, capsys.readouterr().out
    assert "No object changes." in capsys.readouterr().out
    pods = lambda: [pod["metadata"]["name"] for pod in api.list("Pod", namespace)]  # noqa: E731
    wait_until("the controllers have made both pods", lambda: len(pods()) == 2, 120)
    body = yaml.safe_load(Path(file).read_text())
    body["spec"]["engine"]["maxNumSeqs"] = 32
    (tmp_path / "mmi.yaml").write_text(yaml.safe_dump(body))
    assert foveal("plan", "-f", str(tmp_path / "mmi.yaml"), "--server", *options) == 1
    out = capsys.readouterr().out
    assert "~ StatefulSet tiny-engine" in out
    assert "Deployment" not in out
    assert "1 engine pod restarts: tiny-engine-0" in out, out


POD_TEMPLATE = """
metadata: {annotations: {note: ""}}
spec:
  tolerations: [{key: gpu, operator: Exists, value: "", effect: NoSchedule}]
  containers:
    - name: frontend
      env: [{name: HTTP_PROXY, value: ""}]
      resources: {limits: {cpu: 1.5, ephemeral-storage: 1024Mi}}
    - name: agent
      image: registry.example/agent
      env: [{name: LEVEL, value: ""}]
      readinessProbe: {tcpSocket: {port: 80}, initialDelaySeconds: 0}
      resources: {limits: {cpu: 0.5, memory: 1e9, example.com/nic: 1}}
      volumeMounts: [{name: scratch, mountPath: /scratch, subPath: "", readOnly: false}]
      securityContext:
        {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, runAsNonRoot: true}
  volumes: [{name: scratch, emptyDir: {medium: "", sizeLimit: 1000M}}]
"""


def test_a_pod_template_that_is_stored_otherwise_is_no_change(
    foveal: Foveal, api: Api, resource: Obj, tmp_path: Path, capsys: Any
) -> None:
    """Amounts in other units, zeros and empty texts: the server keeps none of them as written."""
    resource["spec"]["frontend"]["podTemplate"] = yaml.safe_load(POD_TEMPLATE)
    file = tmp_path / "mmi.yaml"
    file.write_text(yaml.safe_dump(resource))
    options = ("--profile", PROFILE, "--node-memory", "8Gi", "--image", "example/runtime:1")
    assert foveal("plan", "-f", str(file), "--server", *options, "-o", "yaml") == 1
    for body in filter(None, yaml.safe_load_all(capsys.readouterr().out)):
        api.apply(body, FIELD_MANAGER, force=True, fieldValidation="Strict").must()
    assert foveal("plan", "-f", str(file), "--server", *options) == 0, capsys.readouterr().out


def test_a_server_that_is_not_there_ends_with_4(cluster: Cluster, capsys: Any) -> None:
    config = str(cluster.kubeconfig("nobody", url="https://127.0.0.1:9"))
    assert cli.main(["status", "--kubeconfig", config]) == 4
    assert "https://127.0.0.1:9 does not answer: " in capsys.readouterr().err
    assert cli.main(["status", "--kubeconfig", "/nowhere/config"]) == 4
    assert cli.main(["status", "--kubeconfig", config, "--context", "other"]) == 4


def test_a_user_without_rights_is_told_so(cluster: Cluster, namespace: str, capsys: Any) -> None:
    config = str(cluster.kubeconfig("stranger", token="no-such-token"))
    assert cli.main(["status", "--kubeconfig", config, "-n", namespace]) == 4
    assert "log in again" in capsys.readouterr().err
