"""What goes wrong on a real kubelet, and that the resource says so: one reason each."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import kit

pytestmark = pytest.mark.cluster

Broken = Callable[..., None]
HOLD = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, {15}); s.sigwait({15})"
"""Until SIGTERM, which a first process gets only when it has asked for it."""


@pytest.fixture
def broken(operator: str, models: str) -> Iterator[Broken]:
    """Applies one frontend and one engine named `broken`, with parts of the spec replaced."""
    body = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8"))
    body["metadata"]["name"] = "broken"
    body["spec"]["frontend"]["replicas"] = body["spec"]["engine"]["replicas"] = 1

    def applied(**parts: Any) -> None:
        changed = copy.deepcopy(body)
        for name, value in parts.items():
            old = changed["spec"].get(name)
            changed["spec"][name] = {**old, **value} if isinstance(old, dict) else value
        kit.apply(changed)

    yield applied
    kit.kubectl("delete", "mmi", "broken", "--ignore-not-found", "--timeout=90s")
    kit.until(
        "its pods are gone",
        lambda: not kit.get("pods", "", selector="app.kubernetes.io/instance=broken")["items"],
        120,
    )
    kit.kubectl("delete", "secret/empty", "persistentvolumeclaim/shared", "--ignore-not-found")
    kit.kubectl("delete", "persistentvolume/shared", "--ignore-not-found")


def says(kind: str, reason: str, seconds: float = 120.0) -> str:
    """The message of a condition once it has this reason, and how long that took."""
    started = time.monotonic()

    def found() -> kit.Obj | None:
        condition = kit.condition("broken", kind)
        return condition if condition.get("reason") == reason else None

    def seen() -> kit.Obj:
        condition = found()
        status = kit.get("mmi", "broken").get("status", {}).get("conditions", [])
        assert condition, [f"{c['type']}: {c['reason']}: {c['message']}" for c in status]
        return condition

    message = str(kit.until(f"{kind} says {reason}", seen, seconds)["message"])
    print(f"{kind} {reason} after {time.monotonic() - started:.1f} s: {message}")
    return message


def test_an_image_that_no_registry_has(broken: Broken) -> None:
    broken(image="localhost/nowhere:1")
    assert "localhost/nowhere:1" in says("ModelReady", "ImagePull")


def test_a_claim_that_does_not_exist(broken: Broken) -> None:
    broken(model={"uri": "pvc://nowhere/tiny-vlm"})
    assert "nowhere" in says("ModelReady", "ClaimPending")


def test_a_checkpoint_that_the_runtime_does_not_know(broken: Broken, models: str) -> None:
    folder = kit.ROOT / "run/models/unknown"
    folder.mkdir(exist_ok=True)
    folder.joinpath("config.json").write_text('{"model_type": "nothing-we-know"}')
    broken(model={"uri": "pvc://models/unknown"})
    assert "nothing-we-know" in says("ModelReady", "UnsupportedModel")


def test_a_secret_that_does_not_exist(broken: Broken) -> None:
    broken(security={"apiKeySecretRef": {"name": "nowhere", "key": "keys"}})
    assert "nowhere" in says("FrontendsReady", "ConfigError", 240)


def test_a_file_of_keys_without_a_key(broken: Broken) -> None:
    """The runtime refuses to start, and says why in a line."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "empty"}}
    kit.apply({**secret, "stringData": {"keys": "# none yet\n"}})
    broken(security={"apiKeySecretRef": {"name": "empty", "key": "keys"}})
    assert "holds no key" in says("FrontendsReady", "InvalidArgument", 240)
    failure = kit.get("mmi", "broken")["status"]["lastFailure"]
    assert failure["exitCode"] == 2


def test_shared_memory_that_is_too_small(broken: Broken) -> None:
    """A tmpfs of 16 MiB behind the claim, and values of 256 MiB planned in it."""
    folder = kit.ROOT / "node/shared"
    folder.mkdir(exist_ok=True)
    kit.run("e2e/cluster/node.sh", "run", "mount", "-t", "tmpfs", "-o", "size=16m,mode=1777",
            "tmpfs", str(folder))  # fmt: skip
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "16Mi"}
    kit.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "shared"},
         "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"},
         "spec": {**common, "volumeName": "shared", "resources": {"requests": size}}},
    )  # fmt: skip
    ipc = {"type": "SharedMemory", "claimName": "shared", "size": "256Mi"}
    broken(caches={"processor": {"size": "64Mi"}, "ipc": ipc}, frontend={"hostMemory": "2Gi"})
    assert "holds only" in says("FrontendsReady", "ShmFull", 300)


def test_a_budget_that_does_not_fit(broken: Broken) -> None:
    """Nothing is started that the kernel would kill."""
    broken(engine={"hostMemory": "512Mi"})
    says("BudgetFits", "BudgetMisfit")
    assert kit.pods("engine", "broken") == {}


@pytest.fixture
def two_devices() -> Iterator[None]:
    """The node advertises two GPUs, as a device plugin would; they are names only."""
    path = "/status/{}/nvidia.com~1gpu"
    for operation in ("add", "remove"):
        patches = [
            {"op": operation, "path": path.format(kind), "value": "2"}
            for kind in ("capacity", "allocatable")
        ]
        if operation == "remove":
            yield
        kit.kubectl("patch", "node", "node1", "--subresource=status", "--type=json",
                    "-p", json.dumps(patches))  # fmt: skip


def test_a_third_engine_finds_no_device(broken: Broken, two_devices: None) -> None:
    """Two are placed (an init container holds them there: these devices cannot compute)."""
    hold = {
        "name": "hold",
        "image": kit.OPERATOR_IMAGE,
        "command": ["python3", "-c", HOLD],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"limits": {"memory": "64Mi"}},
    }
    broken(
        engine={
            "replicas": 3,
            "accelerator": {"type": "GPU", "memory": "24Gi"},
            "dtype": "bfloat16",
            "hostMemory": "4Gi",
            "podTemplate": {"spec": {"initContainers": [hold]}},
        }
    )
    message = says("EnginesReady", "Unschedulable", 240)
    assert "nvidia.com/gpu" in message
    placed = [pod for pod in kit.pods("engine", "broken").values() if "nodeName" in pod["spec"]]
    assert len(placed) == 2
