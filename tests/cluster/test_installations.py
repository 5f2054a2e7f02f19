"""Two installations and a foreign controller beside each other: each keeps to its own objects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
import yaml

from foveal_operator.kube.types import Obj
from tests.support.node import commands

pytestmark = pytest.mark.cluster
TEAMS = ("team-a", "team-b")
IMAGES = f"image.registry={commands.REGISTRY},runtimeImage.registry={commands.REGISTRY}"


class ForeignController(threading.Thread):
    """Keeps a Service by the name of a resource's: applies it as its own again and again, without
    force, so that any other manager of its fields is a conflict. `versions` are those it saw."""

    def __init__(self, namespace: str) -> None:
        super().__init__(name="foreign controller")
        self._stop_asked, self._namespace = threading.Event(), namespace
        self.versions: set[str] = set()
        self.errors: list[str] = []
        commands.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "site"}},
            namespace=namespace,
        )
        uid = commands.get("configmap", "site", namespace)["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "site", "uid": uid}
        self._wanted = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "tiny", "ownerReferences": [{**owner, "controller": True}]},
            "spec": {"selector": {"app": "site"}, "ports": [{"name": "web", "port": 80}]},
        }

    def run(self) -> None:
        command = ("apply", "--server-side", "--field-manager=site-controller", "-o", "json")
        while not self._stop_asked.is_set():
            try:
                said = commands.kubectl(
                    *command, "-n", self._namespace, "-f", "-", stdin=json.dumps(self._wanted)
                )
            except AssertionError as error:
                self.errors.append(str(error))
                return
            self.versions.add(json.loads(said)["metadata"]["resourceVersion"])
            self._stop_asked.wait(2)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(60)


@pytest.fixture
def installations(operator: str) -> Iterator[None]:
    """One for each team, with rights in its namespace only, as docs/how-to/teams.md has it. The
    tests' own, which watches every namespace, is one of them meanwhile."""
    for team in TEAMS:
        commands.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}})
    first, second = (
        f"rbac.scope=namespaced,rbac.watchNamespaces={{{team}}},rbac.readNodes=false"
        for team in TEAMS
    )
    wait = ("--wait", "--timeout=180s")
    upgrade = ("helm", "upgrade", "foveal", "charts/foveal", "-n", operator, "--reuse-values")
    try:
        commands.run(*upgrade, "--set", first, *wait, seconds=200)
        commands.run(
            "helm", "install", "second", "charts/foveal", "-n", "team-b",
            "--set", f"{second},rbac.aggregate=false,crds.enabled=false,{IMAGES}",
            "--set", "resources.requests.cpu=20m", *wait, seconds=200,
        )  # fmt: skip
        yield
    finally:
        for team in TEAMS:
            commands.kubectl("delete", "mmi", "--all", "-n", team, "--timeout=60s")
        commands.run("helm", "uninstall", "second", "-n", "team-b", "--ignore-not-found")
        every = ("--set", "rbac.scope=cluster,rbac.readNodes=true")
        every += ("--set-json", "rbac.watchNamespaces=[]")
        commands.run(*upgrade, *every, *wait, seconds=200)
        commands.kubectl("delete", "namespace", *TEAMS, "--timeout=120s")


def resource() -> Obj:
    """The example of README with one frontend and one engine."""
    text = (commands.REPOSITORY / "examples/mmi-cluster.yaml").read_text(encoding="utf-8")
    found: Obj = yaml.safe_load(text.replace("REGISTRY", commands.REGISTRY))
    found["spec"]["frontend"]["replicas"] = found["spec"]["engine"]["replicas"] = 1
    return found


def told(team: str) -> Obj:
    return commands.condition("tiny", "SpecAccepted", team)


def answers(team: str) -> bool:
    url = commands.service_url("tiny", team)
    return "7" in commands.ask(url, "which digit is this?", "digit-7.png")


def uids(team: str) -> set[str]:
    return {
        uid for role in ("frontend", "engine")
        for uid in commands.uids(commands.pods(role, "tiny", team))
    }  # fmt: skip


def generations(team: str) -> dict[str, int]:
    found = json.loads(commands.kubectl("get", "deploy,sts", "-n", team, "-o", "json"))["items"]
    return {item["metadata"]["name"]: item["metadata"]["generation"] for item in found}


@pytest.mark.timeout(900)
def test_each_keeps_to_its_own(installations: None) -> None:
    foreign = ForeignController("team-b")
    foreign.start()
    try:
        commands.until("the foreign Service is there", lambda: foreign.versions, 30)
        for team in TEAMS:
            commands.apply(resource(), namespace=team)
        commands.kubectl(
            "wait", "mmi/tiny", "-n", "team-a", "--for=condition=Ready", "--timeout=300s",
            seconds=320,
        )  # fmt: skip
        assert answers("team-a")
        commands.until("the other team is told", lambda: "NameTaken" in str(told("team-b")))
        message = told("team-b")["message"]
        assert "Service team-b/tiny" in message
        assert "ConfigMap site" in message
        assert not uids("team-b")
    finally:
        foreign.stop()
    assert not foreign.errors
    assert len(foreign.versions) == 1, "another process wrote to the foreign Service"

    ours, before = uids("team-a"), generations("team-a")
    commands.kubectl("delete", "service", "tiny", "-n", "team-b")
    commands.kubectl(
        "wait", "mmi/tiny", "-n", "team-b", "--for=condition=Ready", "--timeout=300s", seconds=320
    )
    assert answers("team-b")
    holders = {
        str(lease["spec"]["holderIdentity"]).partition("_")[0]
        for namespace in ("foveal-system", "team-b")
        for lease in commands.get("leases", "", namespace)["items"]
    }
    assert len(holders) == 2, "each installation has a leader of its own"

    theirs = uids("team-b")
    commands.run("helm", "uninstall", "second", "-n", "team-b", "--wait", seconds=120)
    assert answers("team-b"), "what serves goes on without its operator"
    assert answers("team-a")
    assert (uids("team-a"), uids("team-b")) == (ours, theirs)
    assert generations("team-a") == before
