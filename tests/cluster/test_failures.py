"""What goes wrong on a real kubelet, and that the resource says so: one reason each."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.node import commands, devices
from tests.support.node.volumes import forget_claim, make_memory_claim

pytestmark = pytest.mark.cluster

HOLD = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, {15}); s.sigwait({15})"
"""Until SIGTERM, which a first process gets only when it has asked for it."""


class Broken:
    """One frontend and one engine of a resource that cannot work; called with the parts of its spec
    that are replaced, it applies them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._body = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text("utf-8"))
        self._body["metadata"]["name"] = name
        for role in ("frontend", "engine"):
            self._body["spec"][role]["replicas"] = 1

    def __call__(self, **parts: Any) -> None:
        changed = copy.deepcopy(self._body)
        for name, value in parts.items():
            old = changed["spec"].get(name)
            changed["spec"][name] = {**old, **value} if isinstance(old, dict) else value
        commands.apply(changed)

    def says(self, kind: str, reason: str, seconds: float = 120.0) -> str:
        """The message of a condition once it has this reason, and how long that took."""
        started = time.monotonic()

        def seen() -> commands.Obj:
            found = commands.get("mmi", self.name).get("status", {}).get("conditions", [])
            condition = next((c for c in found if (c["type"], c["reason"]) == (kind, reason)), None)
            assert condition, [f"{c['type']}: {c['reason']}: {c['message']}" for c in found]
            return dict(condition)

        message = str(commands.until(f"{kind} says {reason}", seen, seconds)["message"])
        print(f"{kind} {reason} after {time.monotonic() - started:.1f} s: {message}")
        return message


@pytest.fixture(scope="module")
def names(cluster: None) -> Iterator[list[str]]:
    """Those of the resources made here. After the last test what is left of them goes, with what
    they were provoked with."""
    used: list[str] = []
    yield used
    commands.kubectl("delete", "secret/empty", "--ignore-not-found")
    forget_claim("shared")
    selector = f"app.kubernetes.io/instance in ({','.join(used)})"
    commands.until(
        "pods are gone", lambda: not commands.get("pods", "", selector=selector)["items"], 180
    )


@pytest.fixture
def broken(
    operator: str, models: str, names: list[str], request: pytest.FixtureRequest
) -> Iterator[Broken]:
    """Each test has a name of its own, and does not wait for the end of the one before."""
    names.append(request.node.name.removeprefix("test_").replace("_", "-")[:30].strip("-"))
    yield Broken(names[-1])
    commands.kubectl("delete", "mmi", names[-1], "--ignore-not-found", "--wait=false")


def test_an_image_that_no_registry_has(broken: Broken) -> None:
    broken(image="localhost/nowhere:1")
    assert "localhost/nowhere:1" in broken.says("ModelReady", "ImagePull")


def test_a_claim_that_does_not_exist(broken: Broken) -> None:
    broken(model={"uri": "pvc://nowhere/tiny-vlm"})
    assert "nowhere" in broken.says("ModelReady", "ClaimPending")


def test_a_checkpoint_that_the_runtime_does_not_know(broken: Broken, models: str) -> None:
    folder = commands.ROOT / "run/models/unknown"
    folder.mkdir(exist_ok=True)
    folder.joinpath("config.json").write_text('{"model_type": "nothing-we-know"}')
    broken(model={"uri": "pvc://models/unknown"})
    assert "nothing-we-know" in broken.says("ModelReady", "UnsupportedModel")


def test_a_secret_that_does_not_exist(broken: Broken) -> None:
    broken(security={"apiKeySecretRef": {"name": "nowhere", "key": "keys"}})
    assert "nowhere" in broken.says("FrontendsReady", "ConfigError", 240)


def test_a_file_of_keys_without_a_key(broken: Broken) -> None:
    """The runtime refuses to start, and says why in a line."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "empty"}}
    commands.apply({**secret, "stringData": {"keys": "# none yet\n"}})
    broken(security={"apiKeySecretRef": {"name": "empty", "key": "keys"}})
    assert "holds no key" in broken.says("FrontendsReady", "InvalidArgument", 240)
    failure = commands.get("mmi", broken.name)["status"]["lastFailure"]
    assert failure["exitCode"] == 2


def test_shared_memory_that_is_too_small(broken: Broken) -> None:
    """A tmpfs of 16 MiB behind the claim, and values of 256 MiB planned in it."""
    make_memory_claim("shared", 16)
    ipc = {"type": "SharedMemory", "claimName": "shared", "size": "256Mi"}
    broken(caches={"processor": {"size": "64Mi"}, "ipc": ipc}, frontend={"hostMemory": "2Gi"})
    assert "holds only" in broken.says("FrontendsReady", "ShmFull", 300)


def test_a_budget_that_does_not_fit(broken: Broken) -> None:
    """Nothing is started that the kernel would kill."""
    broken(engine={"hostMemory": "512Mi"})
    broken.says("BudgetFits", "BudgetMisfit")
    assert commands.pods("engine", broken.name) == {}


def test_a_third_engine_finds_no_device(broken: Broken) -> None:
    """Two are placed (an init container holds them there: these devices cannot compute)."""
    hold = {
        "name": "hold",
        "image": commands.OPERATOR_IMAGE,
        "command": ["python3", "-c", HOLD],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"limits": {"memory": "64Mi"}},
    }
    with devices.advertised(2):
        broken(
            engine={
                "replicas": 3,
                "accelerator": {"type": "GPU", "memory": "24Gi"},
                "dtype": "bfloat16",
                "hostMemory": "4Gi",
                "podTemplate": {"spec": {"initContainers": [hold]}},
            }
        )
        message = broken.says("EnginesReady", "Unschedulable", 240)
        assert devices.NAME in message
        placed = [
            pod
            for pod in commands.pods("engine", broken.name).values()
            if "nodeName" in pod["spec"]
        ]
        assert len(placed) == 2
