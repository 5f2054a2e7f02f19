"""Inventory of the cluster: optional APIs, memory of nodes, devices and the number of free ones.

A resource is planned for the nodes that could take its pods, by selectors, affinity and
tolerations.

One instance per operator, refreshed at start and with every re-list; it only reads. A right that
the operator's Role does not give (nodes, in a namespaced installation) means "not known", never an
error: the resource can then say it (engine.accelerator.memory).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import TypeVar

import msgspec

from foveal_operator.api.workloads import Engine
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import ClusterReader
from foveal_operator.kube.errors import ApiError, Forbidden, NotFound
from foveal_operator.kube.kinds import DEVICE_CLASS, NODE, OPTIONAL, POD, RESOURCE_SLICE, Kind
from foveal_operator.kube.types import Obj, allocatable, amount, device_bytes, phase_of
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.pods.scheduling import awaiting_nodes, could_take, is_closed

log = logging.getLogger(__name__)

FREE_SECONDS = 10.0
RENEW_SECONDS = 55.0
"""All is known for so long before it is asked for again, for a resource that lacks something."""
NODES_SECONDS = 15.0
"""Nodes are known for so long before "no such node is there" is said of a pod that waits."""
MAX_ASKED = 32
"""Nodes that are asked one by one as they are now. The nodes behind them are listed once, and the
answer is kept for as many times FREE_SECONDS as there are MAX_ASKED of them."""
AT_ONCE = 8
"""Pods of so many nodes behind them are listed at a time: half of the calls that may be in flight,
so that others are answered meanwhile."""
MAX_FACTS = 1024
"""Kinds of engine whose nodes are remembered until the nodes are listed again."""
T = TypeVar("T")


class DeviceSlice(msgspec.Struct, frozen=True):
    """Of a ResourceSlice what a plan needs, a small part of it.

    Attributes:
        node: "" for devices that are not bound to one node.
        memory_bytes: the different `memory` capacities of its devices.
    """

    node: str
    driver: str
    memory_bytes: frozenset[int]


class Inventory:
    """The last known facts. What is not a coroutine is effect-free."""

    def __init__(self, cluster: ClusterReader, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._nodes: Sequence[Obj] = ()
        self._nodes_at = self._refreshed_at = 0.0
        self._slices: Sequence[DeviceSlice] = ()
        self._classes: Sequence[Obj] = ()
        self._free: dict[str, tuple[float, int | None]] = {}
        """Until when, and how many."""
        self._facts: dict[bytes, NodeFacts] = {}
        self.apis: frozenset[str] = frozenset()

    async def refresh(self) -> bool:
        """Asks again. True when the set of optional APIs has changed. Raises ApiError."""
        self._refreshed_at = self._clock.monotonic()
        served = [kind.name for kind in OPTIONAL if await self._cluster.serves(kind)]
        await self._list_nodes()
        self._slices = await self._list(RESOURCE_SLICE, _brief_slice)
        self._classes = await self._list(DEVICE_CLASS, lambda one: one)
        self._facts.clear()
        found = frozenset(served)
        changed, self.apis = found != self.apis, found
        return changed

    async def renew(self) -> bool:
        """For who lacks something that the cluster may have by now: asks again, at most once in
        RENEW_SECONDS. True when it did. Raises ApiError."""
        if self._clock.monotonic() - self._refreshed_at < RENEW_SECONDS:
            return False
        await self.refresh()
        return True

    async def _list_nodes(self) -> None:
        self._nodes_at = self._clock.monotonic()
        self._nodes = await self._list(NODE, _brief_node)
        self._facts.clear()

    async def _list(self, kind: Kind, brief: Callable[[Obj], T]) -> list[T]:
        try:
            return await self._read(kind, brief)
        except (Forbidden, NotFound) as error:
            log.info("%s are not known: %s", kind.plural, error.message)
            return []

    async def _read(self, kind: Kind, brief: Callable[[Obj], T], fields: str = "") -> list[T]:
        """Shortens page by page: as they come, the nodes of a large cluster take more memory than
        the operator has. Raises ApiError."""
        found: list[T] = []
        async for page in self._cluster.pages(kind, None, fields=fields):
            found += map(brief, page)
        return found

    def node_facts(self, engine: Engine) -> NodeFacts:
        """Of the nodes that could run such an engine."""
        accelerator = engine.accelerator
        chosen = (accelerator.extended_resource, accelerator.device_class_name)
        key = msgspec.json.encode((chosen, engine_pod_spec(engine)))
        if key not in self._facts:
            if len(self._facts) >= MAX_FACTS:
                self._facts.clear()
            self._facts[key] = self._node_facts(engine)
        return self._facts[key]

    def _node_facts(self, engine: Engine) -> NodeFacts:
        accelerator, nodes = engine.accelerator, self._candidates(engine)
        name = accelerator.extended_resource
        node_bytes = largest_node_bytes(nodes, name)
        if name:
            share = smallest_device_bytes(nodes, name)
            whole = smallest_device_bytes(nodes, name, is_whole=True)
            return NodeFacts(
                node_bytes=node_bytes,
                device_bytes=share,
                # Sharing divides time, not memory: accelerator.memory may give more of it to one.
                largest_device_bytes=whole if whole > share else 0,
            )
        if not accelerator.device_class_name:
            return NodeFacts(node_bytes=node_bytes)
        drivers = drivers_of(self._classes, accelerator.device_class_name)
        slices = slices_of(self._slices, drivers, nodes)
        found = frozenset[int]().union(*(piece.memory_bytes for piece in slices))
        return NodeFacts(
            node_bytes=node_bytes,
            device_bytes=min(found, default=0),
            largest_device_bytes=max(found, default=0),
        )

    def _candidates(self, engine: Engine) -> list[Obj]:
        spec = engine_pod_spec(engine)
        return [node for node in self._nodes if could_take(spec, node)]

    async def awaiting(
        self, engine: Engine, engines: Sequence[Obj], others: Sequence[Obj]
    ) -> frozenset[str]:
        """Names of pods that wait for a node that is not there yet: of a pool without nodes. Looks
        for new nodes and devices first. Raises ApiError."""
        name = engine.accelerator.extended_resource
        needs = {name: engine.num_devices} if name else {}
        found = self._awaiting(engines, others, needs)
        # A node that is known may have gone since: the scheduler's words tell of that.
        is_doubted = found or awaiting_nodes([*engines, *others], (), {})
        if is_doubted and self._clock.monotonic() - self._nodes_at >= NODES_SECONDS:
            await self._list_nodes()
            found = self._awaiting(engines, others, needs)
        return found

    def _awaiting(
        self, engines: Sequence[Obj], others: Sequence[Obj], needs: dict[str, int]
    ) -> frozenset[str]:
        found = awaiting_nodes(engines, self._nodes, needs)
        return found | awaiting_nodes(others, self._nodes, {})

    async def free_devices(self, engine: Engine, num_wanted: int) -> int | None:
        """Devices that no pod has asked for, on nodes that could run such an engine; None when that
        cannot be known. For rollouts only, at most every ten seconds for 32 nodes, and the more
        rarely the more were asked. Lists the pods that wait, then those of one node after the
        other, past 32 nodes eight at a time, until `num_wanted` devices are found free: never
        those of the whole cluster."""
        name = engine.accelerator.extended_resource
        if not name:
            return None
        key = f"{name} {num_wanted} {engine_pod_spec(engine)}"
        now = self._clock.monotonic()
        known = self._free.get(key)
        if known is not None and now < known[0]:
            return known[1]
        free: int | None = None
        num_asked = 0
        try:
            free, num_asked = await self._count_free(engine, name, num_wanted)
        except (Forbidden, NotFound):
            pass
        except ApiError as error:
            log.warning("free devices: %s", error)
        self._free = {k: v for k, v in self._free.items() if now < v[0]}
        self._free[key] = (now + FREE_SECONDS * max(1, ceil(num_asked / MAX_ASKED)), free)
        return free

    async def _count_free(
        self, engine: Engine, name: str, num_wanted: int
    ) -> tuple[int | None, int]:
        """(free devices, nodes that were asked)."""
        if not self._nodes:
            return None, 0
        candidates = [n for n in self._candidates(engine) if allocatable(n, name) > 0]
        waiting = 0
        unbound = "spec.nodeName=,status.phase=Pending"
        async for page in self._cluster.pages(POD, None, fields=unbound):
            waiting += sum(_asked(pod, name) for pod in page if _node_of(pod) == "")
        free, num_asked = -waiting, 0
        nodes: list[Obj] = []
        while num_asked < len(candidates) and free < num_wanted:
            size = 1 if num_asked < MAX_ASKED else AT_ONCE
            names = [n["metadata"]["name"] for n in candidates[num_asked : num_asked + size]]
            if num_asked <= MAX_ASKED:  # as it is now: the last list may be minutes old
                fields = f"metadata.name={names[0]}" if num_asked < MAX_ASKED else ""
                nodes = await self._read(NODE, _brief_node, fields)
            lists = (self._cluster.list_all(POD, None, fields=f"spec.nodeName={n}") for n in names)
            for at, pods in zip(names, await asyncio.gather(*lists), strict=True):
                here = [pod for pod in pods if _node_of(pod) == at]
                named = [node for node in nodes if node["metadata"]["name"] == at]
                free += count_free_devices(named, here, name)
            num_asked += len(names)
        return max(0, free), num_asked


def engine_pod_spec(engine: Engine) -> Obj:
    """What of an engine's pod chooses its node."""
    overlay = (engine.pod_template or {}).get("spec")
    spec: Obj = overlay if isinstance(overlay, dict) else {}
    name, given = engine.accelerator.extended_resource, spec.get("tolerations")
    tolerations = list(given) if isinstance(given, list) else []
    if name:
        tolerations.append({"key": name, "operator": "Exists", "effect": "NoSchedule"})
    found: Obj = {"tolerations": tolerations}
    for key in ("nodeSelector", "affinity"):
        if key in spec:
            found[key] = spec[key]
    return found


_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")


def drivers_of(classes: Iterable[Obj], name: str) -> set[str]:
    """Drivers that the selectors of the class name; else the one that it is named after. The rest
    of its CEL is the scheduler's to evaluate: a plan is made for the driver's smallest device, or
    for accelerator.memory where the largest has so much."""
    found = set[str]()
    for one in classes:
        if one["metadata"]["name"] == name:
            selectors = one.get("spec", {}).get("selectors") or ()
            words = (str(part.get("cel", {}).get("expression", "")) for part in selectors)
            found |= {driver for text in words for driver in _DRIVER.findall(text)}
    return found or {name}


def slices_of(
    slices: Iterable[DeviceSlice], drivers: set[str], nodes: Iterable[Obj]
) -> list[DeviceSlice]:
    """Of these nodes and drivers; of every driver when none has such a name."""
    names = {"", *(node["metadata"]["name"] for node in nodes)}
    here = [piece for piece in slices if piece.node in names]
    own = [piece for piece in here if piece.driver in drivers]
    return own or here


def _node_of(pod: Obj) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def _brief_node(node: Obj) -> Obj:
    """Without a node's images and addresses, which are most of it."""
    metadata, spec, status = node["metadata"], node.get("spec", {}), node.get("status", {})
    kept = {key: spec[key] for key in ("taints", "unschedulable") if key in spec}
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}},
        "spec": kept,
        "status": {"allocatable": status.get("allocatable") or {}},
    }


def _brief_slice(piece: Obj) -> DeviceSlice:
    spec = piece.get("spec", {})
    memories = (
        amount(device.get("capacity", {}).get("memory", {}).get("value", 0))
        for device in spec.get("devices") or ()
    )
    return DeviceSlice(
        str(spec.get("nodeName") or ""),
        str(spec.get("driver") or ""),
        frozenset(value for value in memories if value > 0),
    )


def largest_node_bytes(nodes: Iterable[Obj], resource: str) -> int:
    """Allocatable memory of the largest node (with such devices); 0 when there is none."""
    return max(
        (
            allocatable(node, "memory")
            for node in nodes
            if not resource or allocatable(node, resource) > 0
        ),
        default=0,
    )


def smallest_device_bytes(nodes: Iterable[Obj], resource: str, *, is_whole: bool = False) -> int:
    """Memory that every device of the resource has, or every share of one unless `is_whole`, by
    node labels; 0 when no label tells."""
    found = [
        device_bytes(node, resource, is_whole=is_whole)
        for node in nodes
        if allocatable(node, resource) > 0
    ]
    return min((value for value in found if value > 0), default=0)


def count_free_devices(nodes: Iterable[Obj], pods: Iterable[Obj], resource: str) -> int:
    """Allocatable on schedulable nodes less what unfinished pods ask for, bound or waiting."""
    usable = {node["metadata"]["name"]: node for node in nodes if not is_closed(node)}
    free = sum(allocatable(node, resource) for node in usable.values())
    for pod in pods:
        if phase_of(pod) in ("Succeeded", "Failed"):
            continue
        on = pod.get("spec", {}).get("nodeName")
        if on is None or on in usable:
            free -= _asked(pod, resource)
    return max(0, free)


def _asked(pod: Obj, resource: str) -> int:
    spec = pod.get("spec", {})

    def limit(container: Obj) -> int:
        resources = container.get("resources", {})
        asked = resources.get("limits", {}).get(resource)
        return amount(
            asked if asked is not None else resources.get("requests", {}).get(resource, 0)
        )

    plain = sum(limit(container) for container in spec.get("containers", ()))
    first = max((limit(container) for container in spec.get("initContainers") or ()), default=0)
    return max(plain, first)
