"""Nodes that a resource can run on: what they say, what is free there, and what to do without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from foveal_operator.api.workloads import Accelerator, Engine
from foveal_operator.kube.kinds import INFERENCE
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.pods.scheduling import could_take
from foveal_operator.reconcile.baseline import read_basis
from foveal_operator.reconcile.inventory import AT_ONCE, Inventory
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime
from tests.support.instant_cluster import NAME, NAMESPACE, InstantCluster
from tests.support.nodes import GPU, STARTS, STARTS_UNNAMED, node, pod, unschedulable
from tests.support.operator_rig import Kit, resource
from tests.support.samples import LEGAL
from tests.support.served_resource import served


def devices(driver: str, *memories: str) -> Obj:
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    found = [{"name": f"d{i}", "capacity": {"memory": {"value": value}}}
             for i, value in enumerate(memories)]  # fmt: skip
    return {**body, "metadata": {"name": driver}, "spec": {"driver": driver, "devices": found}}


def affine(**expression: Any) -> Obj:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, True),
        ({"nodeSelector": {"pool": "gpu"}}, True),
        ({"nodeSelector": {"pool": "cpu"}}, False),
        (affine(key="pool", operator="In", values=["gpu", "x"]), True),
        (affine(key="pool", operator="NotIn", values=["gpu"]), False),
        (affine(key="pool", operator="Exists"), True),
        (affine(key="pool", operator="DoesNotExist"), False),
        (affine(key="cards", operator="Gt", values=["7"]), True),
        (affine(key="cards", operator="Lt", values=["8"]), False),
    ],
)
def test_a_pod_goes_where_its_selectors_say(spec: Obj, fits: bool) -> None:
    assert could_take(spec, node("a", pool="gpu", cards="8")) is fits


def test_a_taint_keeps_out_who_does_not_tolerate_it() -> None:
    tainted = node("a")
    tainted["spec"]["taints"] = [{"key": GPU, "value": "x", "effect": "NoSchedule"}]
    assert not could_take({}, tainted)
    assert could_take({"tolerations": [{"key": GPU, "operator": "Exists"}]}, tainted)
    assert not could_take({"tolerations": [{"key": GPU, "value": "y"}]}, tainted)
    assert could_take({"tolerations": [{"operator": "Exists"}]}, tainted)


PASSING = [
    "node.kubernetes.io/not-ready", "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/disk-pressure", "node.cilium.io/agent-not-ready",
    "ebs.csi.aws.com/agent-not-ready", "karpenter.sh/disrupted", "karpenter.sh/unregistered",
    "readiness.k8s.io/network", "ToBeDeletedByClusterAutoscaler",
    "startup-taint.cluster-autoscaler.kubernetes.io/cache",
]  # fmt: skip


@pytest.mark.parametrize("key", PASSING)
async def test_a_node_that_starts_or_is_cordoned_counts_for_what_it_has(key: str) -> None:
    """Facts recorded without it stayed wrong; nothing is free on it meanwhile."""
    cluster, busy = FakeCluster(), node("a", 4, "512Gi", 81_920)
    busy["spec"] = {
        "unschedulable": key == "node.kubernetes.io/unschedulable",
        "taints": [{"key": key, "effect": "NoSchedule"}],
    }
    cluster.add(busy)
    inventory = Inventory(cluster, FakeTime().clock)
    await inventory.refresh()
    assert inventory.node_facts(Engine()) == NodeFacts(node_bytes=512 << 30, device_bytes=80 << 30)
    assert await inventory.free_devices(Engine(), 1) == 0
    for text in (STARTS.replace("node.kubernetes.io/not-ready", key), STARTS_UNNAMED):
        waiting = unschedulable(pod("e", 1), text)
        assert await inventory.awaiting(Engine(), [waiting], []) == set(), (
            "one that is meant for it is there"
        )


MALFORMED = [
    {"tolerations": ["x"]}, {"tolerations": 5}, {"nodeSelector": ["x"]}, {"affinity": "x"},
    *({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": one}}}
      for one in (5, {"nodeSelectorTerms": ["x"]}, {"nodeSelectorTerms": {"a": 1}},
                  {"nodeSelectorTerms": 5}, {"nodeSelectorTerms": [{"matchExpressions": ["a"]}]},
                  {"nodeSelectorTerms": [{"matchFields": 5}]})),
]  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        *MALFORMED,
        affine(key="pool", operator="In", values=5),
        affine(key="pool", operator="Gt", values={"a": 1}),
        affine(key=["a"], operator="In", values=["x"]),
    ],
)
def test_a_malformed_pod_is_left_to_the_api_servers_words(spec: Obj) -> None:
    """It raised before anything was applied."""
    tainted = node("a", pool="gpu")
    tainted["spec"]["taints"] = [{"key": GPU, "value": "x", "effect": "NoSchedule"}]
    assert could_take(spec, node("a", pool="gpu")) in (True, False)
    assert could_take(spec, tainted) is False


async def test_facts_are_those_of_the_nodes_that_the_pods_may_use() -> None:
    """A resource for the large nodes was planned for the smallest device of the cluster."""
    cluster = FakeCluster()
    cluster.add(node("small", 4, "64Gi", 24_576, pool="l4"))
    cluster.add(node("large", 8, "512Gi", 81_920, pool="h100"))
    inventory = Inventory(cluster, FakeTime().clock)
    await inventory.refresh()
    large = Engine(pod_template={"spec": {"nodeSelector": {"pool": "h100"}}})
    assert inventory.node_facts(Engine()).device_bytes == 24 << 30
    assert inventory.node_facts(large) == NodeFacts(node_bytes=512 << 30, device_bytes=80 << 30)


@pytest.mark.parametrize(
    ("name", "expression", "gib"),
    [
        ("gpu.nvidia.com", "", 80),  # named after its driver
        ("large", "device.driver == 'gpu.nvidia.com' && device.attributes['x'].y == 'z'", 80),
        ("large", 'device.driver=="gpu.nvidia.com"', 80),
        ("other", "device.driver == 'tpu.example.com'", 16),
        ("unknown", "true", 16),  # any driver's: what every device has
    ],
)
async def test_devices_of_a_class_are_those_of_its_driver(
    name: str, expression: str, gib: int
) -> None:
    """A class of another name than its driver's got the smallest device of any driver."""
    cluster = FakeCluster()
    cluster.add(devices("gpu.nvidia.com", "80Gi"))
    cluster.add(devices("tpu.example.com", "16Gi"))
    cluster.add(node("a"))
    if expression:
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
        selectors = [{"cel": {"expression": expression}}]
        cluster.add({**body, "metadata": {"name": name}, "spec": {"selectors": selectors}})
    inventory = Inventory(cluster, FakeTime().clock)
    await inventory.refresh()
    engine = Engine(accelerator=Accelerator(device_class_name=name))
    assert inventory.node_facts(engine).device_bytes == gib << 30


@pytest.mark.parametrize("selectors", [[], ["device.attributes['x'].y"]])
async def test_memory_may_be_that_of_the_largest_device_of_a_class(selectors: list[str]) -> None:
    """A MIG slice of the same driver refused it, though CEL picks whole devices."""
    instant_cluster = InstantCluster()
    instant_cluster.cluster.add(devices("gpu.nvidia.com", "80Gi", "9728Mi"))
    told = []
    accelerator = {"deviceClassName": "gpu.nvidia.com", "deviceSelectors": selectors}
    for memory in ("96Gi", "80Gi", "10Gi"):
        engine = {"accelerator": {**accelerator, "memory": memory}}
        await instant_cluster.become({**LEGAL["minimal"]["spec"], "engine": engine})
        told.append(instant_cluster.condition("BudgetFits")[0])
    assert told == ["False", "True", "False"], "more than any has, enough, too little"
    basis = read_basis(instant_cluster.cluster.body("ConfigMap", f"{NAME}-basis", NAMESPACE))
    assert basis is not None
    assert basis.nodes("").largest_device_bytes == 80 << 30, "as on the first day"


class Counting(FakeCluster):
    """Counts the pods that lists return."""

    num_pods = 0

    async def list_all(
        self, kind: Any, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        found = await super().list_all(kind, namespace, selector, fields)
        self.num_pods += len(found) if kind.name == "Pod" else 0
        return found


async def test_free_devices_are_found_without_a_list_of_all_pods() -> None:
    """It listed every pod of the cluster, every ten seconds of a rollout."""
    cluster = Counting()
    for index in range(40):
        cluster.add(node(f"n{index:02}", 4, pool="gpu" if index < 20 else "other"))
        for number in range(10):
            cluster.add(pod(f"p{index}-{number}", 0, f"n{index:02}"))
    cluster.add(pod("busy", 3, "n00"))
    cluster.add(pod("waits", 2))
    inventory = Inventory(cluster, FakeTime().clock)
    await inventory.refresh()
    engine = Engine(pod_template={"spec": {"nodeSelector": {"pool": "gpu"}}})
    found = await inventory.free_devices(engine, 2)
    assert found == 3, "4 - 3 on the first node, 4 on the second, 2 are asked for by a pod"
    assert cluster.num_pods == 22, "of two nodes, and the one that waits"


async def test_the_last_of_many_full_nodes_is_not_overlooked() -> None:
    """Nor is it found by a list of all pods: every 10 s, as long as the others were full."""
    cluster, time = Counting(), FakeTime()
    for index in range(65):
        cluster.add(node(f"n{index:02}", 8, pool="gpu" if index < 34 else "other"))
        if index != 33:
            cluster.add(pod(f"busy{index}", 8, f"n{index:02}"))
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    engine = Engine(pod_template={"spec": {"nodeSelector": {"pool": "gpu"}}})
    assert await inventory.free_devices(engine, 1) == 8
    assert cluster.num_pods == 33, "those of the pool's nodes alone"
    cluster.add(pod("last", 8, "n33"))
    await time.pass_(21)
    assert await inventory.free_devices(engine, 1) == 0
    assert cluster.num_pods == 33 + 34
    await time.pass_(15)
    assert await inventory.free_devices(engine, 1) == 0
    assert cluster.num_pods == 33 + 34, "34 nodes are asked every 20 s at most"


class Slow(Counting):
    """Answers late, and counts how many lists of pods wait at a time."""

    now = most = 0

    async def list_all(self, kind: Any, *arguments: Any, **options: Any) -> list[Obj]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return await super().list_all(kind, *arguments, **options)


async def test_a_large_full_cluster_is_not_asked_node_by_node() -> None:
    """A thousand full nodes were a thousand answers waited for in turn, inside one pass."""
    cluster = Slow()
    for index in range(99):
        cluster.add(node(f"n{index:02}", 8))
        cluster.add(pod(f"busy{index}", 8 if index < 98 else 7, f"n{index:02}"))
    inventory = Inventory(cluster, FakeTime().clock)
    await inventory.refresh()
    assert await inventory.free_devices(Engine(), 1) == 1
    assert (cluster.num_pods, cluster.most) == (99, AT_ONCE)


@pytest.mark.parametrize(("strategy", "num_asked"), [("Auto", 1), ("FreeFirst", 0)])
async def test_free_devices_are_counted_only_where_the_strategy_rests_on_them(
    strategy: str, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were every ten seconds of every rollout, however its strategy came about."""
    asked: list[int] = []
    monkeypatch.setattr(Inventory, "free_devices", _counting(asked))
    kit = await served(Kit(), resource(rollout={"strategy": strategy}), pods=True)
    assert asked == [], "nothing has to be replaced"

    def change(body: Obj) -> None:
        body["spec"]["engine"]["cpu"] = "3"

    kit.cluster.edit(INFERENCE, "default", "tiny", change)
    await kit.settle()
    for _ in range(5):
        kit.time.now += 15
        await kit.settle()
    assert kit.status()["rolloutStrategy"].startswith("FreeFirst")
    assert len(asked) == num_asked


def _counting(asked: list[int]) -> Any:
    counted = Inventory.free_devices

    async def free_devices(self: Inventory, engine: Engine, num_wanted: int) -> int | None:
        asked.append(num_wanted)
        return await counted(self, engine, num_wanted)

    return free_devices
