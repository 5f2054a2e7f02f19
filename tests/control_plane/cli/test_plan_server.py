"""`foveal plan --server` says what the operator then does: the operator itself is the oracle."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.cli import main as cli
from foveal_operator.cli.plan import server_command as cli_server
from foveal_operator.cli.plan.render import yaml_documents
from foveal_operator.common.errors import ClusterAnswerError, UsageError
from foveal_operator.kube.kinds import BY_NAME, INFERENCE
from foveal_operator.kube.types import Obj
from tests.support.cluster_reader import FakeClusterReader
from tests.support.operator_rig import EXAMPLES, Kit, resource
from tests.support.served_resource import add_pod, finish_profile, served

PROFILE = EXAMPLES / "profiles/tiny-vlm.json"


@pytest.fixture
def kit() -> Kit:
    """The laptop example, deployed, with a pod of each role."""
    found = Kit()

    async def deploy() -> None:
        found.cluster.add(resource())
        await found.start()
        await found.settle()
        finish_profile(found.cluster)
        await found.resync()
        add_pod(found.cluster, "engine")
        add_pod(found.cluster, "frontend")
        await found.resync()

    asyncio.run(deploy())
    return found


def plan(kit: Kit, tmp_path: Path, body: Obj, *more: str) -> int:
    file = tmp_path / "mmi.yaml"
    file.write_text(yaml.safe_dump(body))
    arguments = cli.parser().parse_args(["plan", "-f", str(file), "--server", *more])
    before = list(kit.cluster.writes)
    try:
        return cli_server.run(arguments, lambda _: FakeClusterReader(kit.cluster))
    finally:
        assert kit.cluster.writes == before, "a plan writes nothing"


def edited(**spec: Any) -> Obj:
    body = resource()
    for part, change in spec.items():
        body["spec"][part] = {**body["spec"].get(part, {}), **change}
    return body


def test_what_is_there_already_changes_nothing(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    assert plan(kit, tmp_path, resource()) == 0
    out, err = capsys.readouterr()
    assert (
        out == "tiny in default, against https://fake\n\nNo object changes.\n\nNo pod restarts.\n"
    )
    assert err == ""


def test_an_expanded_claim_is_no_change(tmp_path: Path, capsys: Any) -> None:
    """The operator leaves it its size."""
    body = resource(model={"uri": "hf://org/model", "cache": {"size": "1Gi"}})
    kit = asyncio.run(served(Kit(), body))

    def expand(claim: Obj) -> None:
        claim["spec"]["resources"]["requests"]["storage"] = "3Gi"

    kit.cluster.edit(BY_NAME["PersistentVolumeClaim"], "default", "tiny-model", expand)
    assert plan(kit, tmp_path, body) == 0
    assert "No object changes." in capsys.readouterr().out


def test_an_engine_change_names_pods_and_the_field_that_is_why(
    kit: Kit, tmp_path: Path, capsys: Any
) -> None:
    assert plan(kit, tmp_path, edited(engine={"maxNumSeqs": 32})) == 1
    out = capsys.readouterr().out
    assert "+ ConfigMap tiny-engine-" in out
    assert "~ StatefulSet tiny-engine\n" in out
    assert "1 engine pod restarts: tiny-engine-0\n" in out
    assert "    engine.json scheduler.max_num_seqs: 128 -> 32\n" in out
    assert "frontend pod" not in out
    assert "\x1b" not in out


def test_a_frontend_change_restarts_no_engine(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    assert plan(kit, tmp_path, edited(frontend={"cpu": "3"}), "-o", "json") == 1
    body = json.loads(capsys.readouterr().out)
    assert [restart["role"] for restart in body["restarts"]] == ["frontend"]
    reasons = body["restarts"][0]["reasons"]
    path = "spec.template.spec.containers[frontend].resources.requests.cpu"
    assert {"path": path, "before": "1", "after": "3"} in reasons
    assert {change["kind"] for change in body["changes"]} == {"Deployment"}


def test_more_replicas_restart_nothing(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    assert plan(kit, tmp_path, edited(engine={"replicas": 2})) == 1
    out = capsys.readouterr().out
    assert "spec.replicas: 1 -> 2" in out
    assert "+ PodDisruptionBudget tiny-engine" in out
    assert "engine pod restarts" not in out


def test_what_is_no_longer_asked_for_would_go(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    assert plan(kit, tmp_path, edited(security={"networkPolicy": "Disabled"})) == 1
    out = capsys.readouterr().out
    assert "- NetworkPolicy tiny-engine\n- NetworkPolicy tiny-frontend\n" in out


def test_yaml_is_byte_for_byte_what_the_operator_then_applies(
    kit: Kit, tmp_path: Path, capsys: Any
) -> None:
    """Runs the plan, then lets the operator act on the same resource, and compares."""
    body = edited(engine={"maxNumSeqs": 32}, frontend={"cpu": "3"})
    assert plan(kit, tmp_path, body, "-o", "yaml") == 1
    printed = capsys.readouterr().out
    applied: dict[tuple[str, str], Obj] = {}
    apply, apply_new = kit.cluster.apply, kit.cluster.apply_new

    def note(wanted: Obj) -> Obj:
        applied.setdefault((wanted["kind"], wanted["metadata"]["name"]), copy.deepcopy(wanted))
        return wanted

    kit.cluster.apply = lambda wanted: apply(note(wanted))  # type: ignore[method-assign]
    kit.cluster.apply_new = lambda wanted: apply_new(note(wanted))  # type: ignore[method-assign]
    kit.cluster.edit(INFERENCE, "default", "tiny", lambda live: live.update(spec=body["spec"]))
    again = Kit(kit.cluster)  # a fresh operator applies every object once
    asyncio.run(again.start())
    asyncio.run(again.settle())
    asked = [(d["kind"], d["metadata"]["name"]) for d in yaml.safe_load_all(printed)]
    assert len(asked) == len(set(asked))
    # New frontends wait for their first engine of the new revision: that apply comes later.
    held = set(asked) - applied.keys()
    assert held <= {("Deployment", "tiny-frontend")}
    for key in set(asked) - held:
        for condition in ("uid", "resourceVersion"):
            applied[key]["metadata"].pop(condition, None)
        assert yaml_documents([applied[key]]) in printed, key


def test_a_new_resource_needs_a_profile(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    body = resource()
    body["metadata"]["name"] = "other"
    with pytest.raises(UsageError, match="other has no profile in the cluster yet"):
        plan(kit, tmp_path, body)
    capsys.readouterr()
    assert plan(kit, tmp_path, body, "--profile", str(PROFILE), "--node-memory", "8Gi") == 1
    out, err = capsys.readouterr()
    assert "+ StatefulSet other-engine" in out
    assert "No pod restarts." in out
    assert "give --image" in err


def test_a_misfit_says_so(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    assert plan(kit, tmp_path, edited(engine={"hostMemory": "512Mi"})) == 3
    assert "set spec.engine.hostMemory to" in capsys.readouterr().err


def test_what_the_api_server_would_refuse_is_refused(kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"spec\.engine\.maxNumSeqs"):
        plan(kit, tmp_path, edited(engine={"maxNumSeqs": 0}))


def test_objects_that_may_not_be_read_end_the_plan(kit: Kit, tmp_path: Path) -> None:
    """A difference against unknown objects would be a lie."""
    over = FakeClusterReader(kit.cluster)
    over.forbidden = {"StatefulSet"}
    file = tmp_path / "mmi.yaml"
    file.write_text(yaml.safe_dump(resource()))
    arguments = cli.parser().parse_args(["plan", "-f", str(file), "--server"])
    with pytest.raises(ClusterAnswerError, match="statefulsets is forbidden"):
        cli_server.run(arguments, lambda _: over)


def test_the_operators_own_flags_are_found(kit: Kit, tmp_path: Path, capsys: Any) -> None:
    over = FakeClusterReader(kit.cluster)
    container = {
        "command": ["foveal-operator"],
        "args": ["--runtime-image=example/runtime:9"],
        "env": [{"name": "FOVEAL_OPERATOR_CLUSTER_DOMAIN", "value": "here.local"}],
    }
    template = {"spec": {"containers": [container]}}
    over.answers["/apis/apps/v1/deployments"] = {
        "items": [{"metadata": {"namespace": "foveal-system"}, "spec": {"template": template}}]
    }
    body = resource()
    body["metadata"]["name"] = "other"
    file = tmp_path / "mmi.yaml"
    file.write_text(yaml.safe_dump(body))
    arguments = cli.parser().parse_args(
        ["plan", "-f", str(file), "--server", "--profile", str(PROFILE), "-o", "yaml",
         "--node-memory", "8Gi"]
    )  # fmt: skip
    assert cli_server.run(arguments, lambda _: over) == 1
    out = capsys.readouterr().out
    assert "image: example/runtime:9" in out
    assert "kubernetes.io/metadata.name: foveal-system" in out, "where probes come from"
    assert "other-engine.default.svc.here.local" in out


@pytest.mark.parametrize(("kind", "name"), [("Service", "tiny"), ("Secret", "tiny-curve")])
def test_a_taken_name_is_foretold(tmp_path: Path, capsys: Any, kind: str, name: str) -> None:
    """It was listed as an object that would be made."""
    kit = Kit()
    kit.cluster.add(
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {"name": name, "namespace": "default"},
            "type": "Opaque",
        }
    )
    assert plan(kit, tmp_path, resource(), "--profile", str(PROFILE)) == 1
    out = capsys.readouterr().out
    assert f"! NameTaken: {kind} default/{name} belongs to kubectl" in out
    assert f"+ {kind} {name}\n" not in out
    assert ("No Secret can be handed over" in out) == (kind == "Secret")
    assert ("foveal.dev/adopt" in out) == (kind != "Secret")
    assert "+ Deployment tiny-frontend" in out
    assert plan(kit, tmp_path, resource(), "--profile", str(PROFILE), "-o", "json") == 1
    assert kind in json.loads(capsys.readouterr().out)["taken"][0]
