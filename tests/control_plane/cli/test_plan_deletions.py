"""`foveal plan --server` lists what comes and what goes: the operator, run to its end, agrees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from foveal_operator.cli import main as cli
from foveal_operator.cli.plan import server_command as cli_server
from foveal_operator.kube.types import Obj
from tests.support.budget_samples import VLM
from tests.support.cluster_reader import FakeClusterReader
from tests.support.instant_cluster import NAME, NAMESPACE, InstantCluster
from tests.support.samples import put, resource

Keys = set[tuple[str, str]]
# What no plan lists: memories of the operator's, and the keys, which it never reads.
MEMORIES = {("ConfigMap", f"{NAME}-basis"), ("ConfigMap", f"{NAME}-rollout")}
UNREAD = {("Secret", f"{NAME}-curve")}


def there(instant_cluster: InstantCluster) -> Keys:
    """The operator's objects."""
    return {
        (kind, name)
        for (kind, _, name), body in instant_cluster.cluster.objects.items()
        if kind not in ("Pod", "Event")
        and body["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by")
    } - UNREAD


def planned(
    instant_cluster: InstantCluster, tmp_path: Path, spec: Obj, capsys: Any
) -> tuple[Keys, Keys]:
    """(what would be made, what would be deleted), as the command says."""
    body = {**resource(), "spec": spec}
    body["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    (tmp_path / "mmi.yaml").write_text(yaml.safe_dump(body))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(VLM))
    arguments = cli.parser().parse_args(
        ["plan", "-f", str(tmp_path / "mmi.yaml"), "--server", "-o", "json",
         "--profile", str(tmp_path / "profile.json")]
    )  # fmt: skip
    writes = list(instant_cluster.cluster.writes)
    code = cli_server.run(
        arguments, lambda _: FakeClusterReader(instant_cluster.cluster, NAMESPACE)
    )
    assert instant_cluster.cluster.writes == writes, "a plan writes nothing"
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert code == (1 if changes else 0)
    made, gone = (
        {(c["kind"], c["name"]) for c in changes if c["action"] == action}
        for action in ("create", "delete")
    )
    return made, gone


def edits() -> dict[str, list[Obj]]:
    """Specs one after another."""
    base = resource()["spec"]
    base["engine"] = {**base.get("engine", {}), "replicas": 1}

    def seqs(number: int) -> Obj:
        return dict(put(base, "engine.maxNumSeqs", number))

    def pixels(number: int) -> Obj:
        return dict(put(base, "modalities", {"image": {"maxPixels": number}}))

    def model(name: str) -> Obj:
        return dict(put(base, "model.uri", f"hf://org/{name}"))

    return {
        # Three start-up documents of a role are kept, the fourth goes.
        "documents": [base, *(seqs(n) for n in (10, 20, 30))],
        # So are three profiles, and with each a Job comes and goes.
        "profiles": [base, *(pixels(n * 1_000_000) for n in (1, 2, 3))],
        # Another model has another record of its fetch; the first one's profile is still there.
        "models": [base, model("a"), base],
        "switches": [
            base,
            {
                **base,
                "security": {"networkPolicy": "Disabled"},
                "observability": {"podMonitor": "Disabled"},
            },
            base,
        ],
    }


@pytest.mark.parametrize("name", list(edits()))
def test_what_comes_and_goes_is_what_was_said(name: str, tmp_path: Path, capsys: Any) -> None:
    instant_cluster, listed = InstantCluster(), set[str]()
    first, *later = edits()[name]
    asyncio.run(instant_cluster.become(first))
    for number, spec in enumerate(later):
        before = there(instant_cluster)
        made, gone = planned(instant_cluster, tmp_path, spec, capsys)
        asyncio.run(instant_cluster.become(spec))
        after = there(instant_cluster)
        assert gone == before - after, f"edit {number}"
        # Jobs have gone again by now, and nobody plans a ConfigMap that says what a Job did.
        came = {key for key in after - before - MEMORIES if not is_of_a_job(key)}
        assert {key for key in made if not is_of_a_job(key)} == came, f"edit {number}"
        listed |= {kind for kind, _ in gone}
    assert planned(instant_cluster, tmp_path, later[-1], capsys) == (set(), set())
    wanted = {"documents": {"ConfigMap"}, "profiles": {"ConfigMap"}, "models": {"ConfigMap"},
              "switches": {"NetworkPolicy", "PodMonitor"}}  # fmt: skip
    assert wanted[name] <= listed


def is_of_a_job(key: tuple[str, str]) -> bool:
    return "-profile-" in key[1] or "-fetch-" in key[1]
