"""Memory and steps that the inventory of a large cluster takes."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from foveal_operator.api.workloads import Accelerator, Engine
from foveal_operator.kube.errors import ApiError, classify
from foveal_operator.kube.kinds import NODE, RESOURCE_SLICE, Kind
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.reconcile.inventory import DeviceSlice, Inventory, slices_of
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime

GPU = "nvidia.com/gpu"
NUM_PAGES = 20
DRA = Engine(accelerator=Accelerator(device_class_name="gpu.example.com"))


class Whole(dict[str, Any]):
    """An object as the API server sends it, whose end can be seen."""


class Labels(dict[str, str]):
    """Counts what is asked of it."""

    num_asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        Labels.num_asked += 1
        return super().get(key, default)


class Paged(FakeCluster):
    """Twenty pages of one node, and of one ResourceSlice."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[weakref.ref[Whole]] = []
        self.most_alive = 0
        self.node_gib = 64
        self.expires = False

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Obj]]:
        for index in range(NUM_PAGES if kind in (NODE, RESOURCE_SLICE) else 0):
            body = self.one(f"n{index:02}", kind)
            self.sent.append(weakref.ref(body))
            yield [body]
            if self.expires:
                raise classify(410, {"reason": "Expired", "message": "continue: too old"})
            del body
            self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.sent))

    def one(self, name: str, kind: Kind) -> Whole:
        device = Whole(capacity={"memory": {"value": "80Gi"}}, attributes={"uuid": name})
        self.sent.append(weakref.ref(device))
        spec = {"driver": "gpu.example.com", "nodeName": name, "devices": [device]}
        if kind is NODE:
            spec = {}
        labels = Labels({"pool": "gpu", "nvidia.com/gpu.memory": "81920"})
        status = {"allocatable": {"memory": f"{self.node_gib}Gi", GPU: "8"}}
        return Whole(metadata={"name": name, "labels": labels}, spec=spec, status=status)


class Name(str):
    """Counts how often it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


async def filled(cluster: FakeCluster) -> Inventory:
    inventory = Inventory(cluster, FakeTime().clock)
    await inventory.refresh()
    return inventory


async def test_nodes_and_slices_are_shortened_page_by_page() -> None:
    """All nodes were in memory at once, as they came, and slices stayed there."""
    cluster = Paged()
    inventory = await filled(cluster)
    assert cluster.most_alive <= 4, "a page that is read and its devices, of each kind"
    assert not any(ref() for ref in cluster.sent), "only what a plan needs is kept"
    facts = NodeFacts(node_bytes=64 << 30, device_bytes=80 << 30, largest_device_bytes=80 << 30)
    assert inventory.node_facts(DRA) == facts
    cluster.most_alive = 0
    assert await inventory.free_devices(Engine(), 1000) == 8 * NUM_PAGES
    assert cluster.most_alive <= 4, "nor while free devices are counted"


async def test_facts_of_an_engine_are_found_once_for_each_list_of_nodes() -> None:
    """Every pass over a resource went through all nodes of the cluster."""
    cluster = Paged()
    inventory = await filled(cluster)

    def facts(pool: str) -> NodeFacts:
        return inventory.node_facts(Engine(pod_template={"spec": {"nodeSelector": {"pool": pool}}}))

    Labels.num_asked = 0
    assert facts("gpu").device_bytes == 80 << 30
    once = Labels.num_asked
    assert once >= NUM_PAGES
    assert facts("gpu").device_bytes == 80 << 30
    assert Labels.num_asked == once, "the same engine"
    assert facts("cpu") == NodeFacts(), "an engine for other nodes"
    assert inventory.node_facts(DRA).device_bytes == 80 << 30
    cluster.node_gib = 128
    await inventory.refresh()
    assert facts("gpu").node_bytes == 128 << 30, "nodes of today"


async def test_nodes_stay_known_where_their_list_expires_between_two_pages() -> None:
    """The answer counted as an API that is not there: nodes were unknown until the next list."""
    cluster = Paged()
    inventory = await filled(cluster)
    cluster.expires = True
    with pytest.raises(ApiError, match="too old"):
        await inventory.refresh()
    assert inventory.node_facts(Engine()).device_bytes == 80 << 30


@pytest.mark.parametrize("driver", ["gpu.example.com", "another.example.com"])
def test_slices_are_not_compared_with_every_node(driver: str) -> None:
    """With DRA that took the product of nodes and slices, in each pass."""
    names = [Name(f"n{index}") for index in range(300)]
    nodes = [{"metadata": {"name": name}} for name in names]
    slices = [DeviceSlice(Name(name), driver, frozenset()) for name in names]
    slices.append(DeviceSlice("", driver, frozenset()))
    slices.append(DeviceSlice("elsewhere", driver, frozenset()))
    Name.num_compared = 0
    found = slices_of(slices, {"gpu.example.com"}, nodes)
    assert [piece.node for piece in found] == [*names, ""]
    assert Name.num_compared < 10 * len(names)
