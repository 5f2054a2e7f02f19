"""Devices claimed from a DeviceClass: claims are made and devices allocated by Kubernetes itself.

The resource claim controller and the scheduler are the real ones; no driver prepares anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.programs import (
    Cluster,
    missing_programs,
    start_scheduler,
    wait_until,
)
from tests.support.api_server.sandbox import Sandbox, claim_in, running_sandbox
from tests.support.api_server.scenarios import NO_LEASE

DRIVER = "gpu.example.com"
HOPPER = f"device.attributes['{DRIVER}'].family == 'Hopper'"


def device_class(name: str = DRIVER) -> Obj:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    }


def resource_slice(node: str) -> Obj:
    """Two devices of 80 GiB of one family, and one of another between them."""
    devices = [
        {
            "name": f"gpu-{index}",
            "attributes": {"family": {"string": family}},
            "capacity": {"memory": {"value": "80Gi"}},
        }
        for index, family in enumerate(("Hopper", "Ada", "Hopper"))
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": node},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
    }


def bound_claim(namespace: str) -> list[Obj]:
    """The model's claim as the scheduler wants it; nobody here binds volumes."""
    claim, name = claim_in(namespace), f"{namespace}-models"
    claim["metadata"]["annotations"] = {"pv.kubernetes.io/bind-completed": "yes"}
    claim["spec"] |= {"volumeName": name, "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": "/models"},
        },
    }
    return [volume, claim]


@pytest.fixture
def devices(controlled_cluster: Cluster, api: Api, namespace: str) -> Iterator[Sandbox]:
    """A node with three devices of a driver, and pods that the real scheduler binds."""
    if missing_programs("kube-scheduler"):
        pytest.skip("kube-scheduler not built: e2e/cluster/build.sh kube-scheduler")
    with running_sandbox(controlled_cluster, namespace, devices=0, binds=False) as made:
        api.apply(device_class()).must()
        for body in bound_claim(namespace):
            api.create(body).must()
        one = resource_slice(f"{namespace}-node-0")
        api.create(one).must()
        scheduler = start_scheduler(controlled_cluster)
        try:
            yield made
        finally:
            scheduler.stop()
            api.delete("ResourceSlice", "", one["metadata"]["name"])
            api.delete("DeviceClass", "", DRIVER)


def claims(sandbox: Sandbox) -> list[Obj]:
    return sandbox.api.list("ResourceClaim", sandbox.namespace)


def allocated(claim: Obj) -> list[str]:
    """Names of the devices that the scheduler has given to a claim."""
    results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
    return sorted(one["device"] for one in results)


def claiming(sandbox: Sandbox, count: int, name: str = DRIVER, **engine: object) -> Obj:
    accelerator = {"deviceClassName": name, "deviceSelectors": [HOPPER], "count": count}
    changes = {f"engine__{name}": value for name, value in engine.items()}
    model = {"uri": "pvc://models/tiny"}
    return sandbox.sample("minimal", model=model, engine__accelerator=accelerator, **changes)


@pytest.mark.timeout(300, func_only=True)
def test_an_engine_gets_the_devices_that_its_selectors_name(devices: Sandbox) -> None:
    devices.operator("a", NO_LEASE).start()
    stored = devices.apply(claiming(devices, 2))
    devices.wait_condition("Ready", timeout_seconds=90)
    (claim,) = claims(devices)
    assert allocated(claim) == ["gpu-0", "gpu-2"], "not the one of the other family"
    (pod,) = devices.nodes.pods("engine")
    assert [one["name"] for one in claim["status"]["reservedFor"]] == [pod["metadata"]["name"]]
    status = (devices.resource() or {})["status"]
    planned = status["budgets"]["deviceMemory"]["display"]
    assert planned.startswith("80"), "the plan is made for the memory that the slice tells"

    devices.api.delete("MultiModalInference", devices.namespace, stored["metadata"]["name"]).must()
    wait_until("the claims have gone with the pods", lambda: not claims(devices), 60)


@pytest.mark.timeout(300, func_only=True)
def test_a_class_is_planned_for_the_driver_that_it_names(devices: Sandbox) -> None:
    """Smaller devices of another driver, in the same cluster, counted for a class that has another
    name than its driver."""
    api, node = devices.api, f"{devices.namespace}-node-0"
    made = [device_class("large-gpus"), resource_slice(node)]
    made[1]["metadata"]["name"] = f"{node}-small"
    made[1]["spec"] |= {"driver": "small.example.com"}
    for one in made[1]["spec"]["devices"]:
        one["capacity"] = {"memory": {"value": "8Gi"}}
        one["attributes"] = {}
    for body in made:
        api.create(body).must()
    try:
        devices.operator("a", NO_LEASE).start()
        devices.apply(claiming(devices, 2, "large-gpus"))
        devices.wait_condition("Ready", timeout_seconds=90)
        (claim,) = claims(devices)
        assert allocated(claim) == ["gpu-0", "gpu-2"]
        planned = (devices.resource() or {})["status"]["budgets"]["deviceMemory"]["display"]
        assert planned.startswith("80")
    finally:
        for body in made:
            api.delete(body["kind"], "", body["metadata"]["name"])


@pytest.mark.timeout(300, func_only=True)
def test_memory_is_taken_at_its_word_where_selectors_pick_devices(devices: Sandbox) -> None:
    """A smaller device of the same driver, which no selector picks, refused the resource."""
    api, name = devices.api, f"{devices.namespace}-node-0"
    live = api.get("ResourceSlice", "", name) or {}
    live["spec"]["devices"][1]["capacity"] = {"memory": {"value": "8Gi"}}
    live["spec"]["pool"]["generation"] = 2
    api.replace(live).must()
    devices.operator("a", NO_LEASE).start()
    stated = claiming(devices, 2)
    stated["spec"]["engine"]["accelerator"]["memory"] = "80Gi"
    devices.apply(stated)
    devices.wait_condition("Ready", timeout_seconds=90)
    (claim,) = claims(devices)
    assert allocated(claim) == ["gpu-0", "gpu-2"]


@pytest.mark.timeout(300, func_only=True)
def test_an_engine_that_finds_no_device_is_told_and_the_other_serves(devices: Sandbox) -> None:
    devices.operator("a", NO_LEASE).start()
    devices.apply(claiming(devices, 2, replicas=2))
    wait_until(
        "the scheduler's words are told",
        lambda: "cannot allocate all claims" in devices.condition_text("EnginesReady"),
        90,
    )
    assert sorted(map(allocated, claims(devices))) == [[], ["gpu-0", "gpu-2"]]
    devices.apply(claiming(devices, 2, replicas=1))
    devices.wait_condition("Ready")
    wait_until("the second claim has gone", lambda: len(claims(devices)) == 1, 60)


@pytest.mark.timeout(300, func_only=True)
def test_a_change_of_the_number_reaches_the_engine(devices: Sandbox) -> None:
    """Kubernetes changes no claim template: the new engine got one device as before."""
    devices.operator("a", NO_LEASE).start()
    devices.apply(claiming(devices, 1))
    devices.wait_condition("Ready", timeout_seconds=90)
    assert [len(allocated(one)) for one in claims(devices)] == [1]
    devices.apply(claiming(devices, 2))
    wait_until(
        "the engine has both devices",
        lambda: list(map(allocated, claims(devices))) == [["gpu-0", "gpu-2"]],
        90,
    )
    devices.wait_condition("Ready", timeout_seconds=90)
    wait_until(
        "the template of the old engine has gone",
        lambda: len(devices.api.list("ResourceClaimTemplate", devices.namespace)) == 1,
        60,
    )
