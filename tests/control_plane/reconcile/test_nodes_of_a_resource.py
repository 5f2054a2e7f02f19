"""Nodes that a resource can run on: what they say, what is free there, and what to do without."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from foveal_operator.api.workloads import Accelerator, Engine
from foveal_operator.kube.kinds import INFERENCE, NODE
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.pods.scheduling import awaiting_nodes, could_take, has_no_node
from foveal_operator.reconcile.baseline import read_basis
from foveal_operator.reconcile.inventory import AT_ONCE, Inventory
from foveal_operator.rollout import RolloutView, decide
from foveal_operator.rollout.record import Good, Record, record_body
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime
from tests.support.instant_cluster import NAME, NAMESPACE, InstantCluster
from tests.support.operator_rig import Kit, resource
from tests.support.samples import LEGAL
from tests.support.served_resource import add_pod, served
from tests.support.sim_cluster import DEADLINE_SECONDS, START, Wish, desired_of

GPU = "nvidia.com/gpu"
NO_SELECTOR = (
    "0/3 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 1 node(s) had "
    "untolerated taint(s). preemption: 0/3 nodes are available: 3 Preemption is not helpful."
)
STARTS = (
    "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }."
)
STARTS_UNNAMED = "0/1 nodes are available: 1 node(s) had untolerated taint(s)."
"""As schedulers say it that do not name the taint."""
FULL = "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint(s)."


def node(name: str, gpus: int = 0, memory: str = "64Gi", mib: int = 0, **labels: str) -> Obj:
    if mib:
        labels["nvidia.com/gpu.memory"] = str(mib)
    allocatable = {"memory": memory, **({GPU: str(gpus)} if gpus else {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"allocatable": allocatable},
    }


def control_plane() -> Obj:
    body = node("control-plane")
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    body["spec"]["taints"] = [taint]
    return body


def pod(name: str, gpus: int, on: str = "", namespace: str = "default") -> Obj:
    limits = {"resources": {"limits": {GPU: str(gpus)}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [limits], **({"nodeName": on} if on else {})},
        "status": {"phase": "Running" if on else "Pending"},
    }


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
        "unschedulable": True,
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


async def test_a_node_that_came_since_the_last_list_is_there() -> None:
    """Nodes are listed every half hour: a full pool was called one without nodes until then."""
    cluster, time = FakeCluster(), FakeTime()
    cluster.add(node("cpu"))
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    waiting = unschedulable(pod("e", 1), "0/2 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert await inventory.awaiting(Engine(), [waiting], []) == {"e"}
    cluster.add(node("new", 4))
    await time.pass_(16)
    assert await inventory.awaiting(Engine(), [waiting], []) == set()


async def test_a_node_that_has_gone_since_the_last_list_is_there_no_more() -> None:
    cluster, time = FakeCluster(), FakeTime()
    cluster.add(control_plane())
    cluster.add(node("gpu", 4))
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    cluster.remove(NODE, "", "gpu")
    await time.pass_(16)
    waiting = unschedulable(pod("e", 1), STARTS_UNNAMED)
    assert await inventory.awaiting(Engine(), [waiting], []) == {"e"}


# --- a pool without nodes ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "none"),
    [
        (NO_SELECTOR, True),
        ("no nodes available to schedule pods", True),
        (FULL, False),
        (STARTS, False),
        ("0/2 nodes are available: 2 Insufficient memory.", False),
        ("", False),
    ],
)
def test_the_scheduler_says_whether_any_node_is_meant_for_a_pod(text: str, none: bool) -> None:
    assert has_no_node(text) is none


def unschedulable(body: Obj, text: str) -> Obj:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    status = {"phase": "Pending", "conditions": [{**condition, "message": text}]}
    return {**body, "status": status}


def test_a_device_that_no_node_has_is_waited_for_and_a_full_one_is_not() -> None:
    waiting = unschedulable(pod("a", 1), "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert awaiting_nodes([waiting], [node("cpu")], {GPU: 1}) == {"a"}
    assert awaiting_nodes([waiting], [node("gpu", 4)], {GPU: 1}) == frozenset()
    assert awaiting_nodes([waiting], [], {GPU: 1}) == frozenset(), "nodes are not known"
    assert awaiting_nodes([pod("a", 1)], [node("cpu")], {GPU: 1}) == frozenset()


def rollout_view(now: float, conditions: list[Obj], awaiting: frozenset[str]) -> RolloutView:
    inference, found = desired_of(Wish(engines=1, frontends=1))
    (engines,), (frontends,) = found.of_kind("StatefulSet"), found.of_kind("Deployment")
    labels = engines["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": "qwen-engine-0", "uid": "1", "labels": labels}
    metadata["creationTimestamp"] = "2023-11-14T22:13:20Z"  # START
    engine = {"metadata": metadata, "status": {"phase": "Pending", "conditions": conditions}}
    return RolloutView(
        inference=inference,
        stateful_set=engines,
        deployment=frontends,
        live_stateful_set=engines,
        live_deployment=frontends,
        engine_pods=(engine,),
        awaiting=awaiting,
        now=now,
    )


def after(view: RolloutView, now: float, conditions: list[Obj], awaiting: frozenset[str]) -> Any:
    """The next decision, on the record of the one before."""
    record = decide(view).record
    later = rollout_view(now, conditions, awaiting)
    return decide(msgspec.structs.replace(later, record=record))


def test_the_deadline_waits_for_a_node_and_begins_with_it() -> None:
    """A rollout into a pool that was scaled to zero failed while its nodes were being made."""
    none = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x"}]
    begun = rollout_view(START, none, frozenset())
    late = START + 3 * DEADLINE_SECONDS
    assert after(begun, late, none, frozenset()).deadline_exceeded, "nodes are there, and full"
    waits = after(begun, late, none, frozenset({"qwen-engine-0"}))
    assert not waits.deadline_exceeded
    came = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2023-11-14T22:43:20Z"}
    ]
    assert not after(begun, late + 30, came, frozenset()).deadline_exceeded, "it loads now"
    assert after(begun, late + 2 * DEADLINE_SECONDS, came, frozenset()).deadline_exceeded


@pytest.mark.parametrize("auto_rollback", [True, False])
def test_with_a_good_revision_the_deadline_waits_for_no_node(auto_rollback: bool) -> None:
    """A mistyped nodeSelector left the resource between two revisions for ever."""
    none = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x"}]
    waiting = frozenset({"qwen-engine-0"})
    begun = rollout_view(START, none, waiting)
    assert begun.stateful_set is not None
    assert begun.deployment is not None
    old = [
        {**body["spec"]["template"], "metadata": {"labels": {REVISION_LABEL: f"old-{index}"}}}
        for index, body in enumerate((begun.stateful_set, begun.deployment))
    ]
    good = Record(good=Good(revision="old-0/old-1", engine=old[0], frontend=old[1]))
    view = msgspec.structs.replace(begun, record=record_body(good, "qwen", begun.stateful_set))
    spec = view.inference.spec
    rollout = msgspec.structs.replace(spec.rollout, auto_rollback=auto_rollback)
    spec = msgspec.structs.replace(spec, rollout=rollout)
    view = msgspec.structs.replace(
        view, inference=msgspec.structs.replace(view.inference, spec=spec)
    )
    record = decide(view).record
    late = START + 3 * DEADLINE_SECONDS
    found = decide(msgspec.structs.replace(view, record=record, now=late))
    assert (found.deadline_exceeded, found.rolled_back) == (auto_rollback, auto_rollback)


async def test_a_pool_without_nodes_is_told_and_goes_on_by_itself() -> None:
    kit = Kit()
    kit.cluster.add(control_plane())
    await served(kit)
    add_pod(kit.cluster, "frontend")
    engine = add_pod(kit.cluster, "engine", ready=False)
    name = engine["metadata"]["name"]
    status = unschedulable(engine, NO_SELECTOR)["status"]
    edit = kit.cluster.edit
    kinds = {kind.name: kind for kind in kit.watched}
    edit(kinds["Pod"], "default", name, lambda body: body.update(status=status), "scheduler")
    await kit.settle()
    assert kit.condition("EnginesReady") == ("False", "NoNodeYet")
    assert kit.condition("Reconciling") == ("True", "NoNodeYet")
    (said,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "EnginesReady"]
    assert "Wait for the cluster autoscaler, add such a node" in said
    kit.time.now += 7200
    await kit.resync()
    assert kit.condition("Stalled") == ("", ""), "two hours later it still waits"
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    edit(kinds["Pod"], "default", name, lambda body: body.update(status=ready), "kubelet")
    await kit.settle()
    assert kit.condition("Ready") == ("True", "Ready")
