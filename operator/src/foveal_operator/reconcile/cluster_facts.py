"""Facts about the cluster: optional APIs, memory of nodes, devices and the number of free ones.

One instance per operator, refreshed at start and with every re-list; it only reads. A right that
the operator's Role does not give (nodes, in a namespaced installation) means "not known", never an
error: the resource can then say it (engine.accelerator.memory).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from foveal_operator.api.workloads import Accelerator
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import ClusterReader
from foveal_operator.kube.errors import ApiError, Forbidden, NotFound
from foveal_operator.kube.kinds import NODE, OPTIONAL, POD, RESOURCE_SLICE, Kind
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.manifests.context import DEFAULT_RESOURCE_NAME
from foveal_runtime.plan.quantity import parse

log = logging.getLogger(__name__)

FREE_SECONDS = 10.0
# Memory of one device in MiB, as feature discovery labels nodes.
_MEMORY_LABELS = {"nvidia.com/gpu": "nvidia.com/gpu.memory", "amd.com/gpu": "amd.com/gpu.vram"}


class Survey:
    """The last known facts. Everything but `refresh` and `free_devices` is effect-free."""

    def __init__(self, cluster: ClusterReader, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._nodes: Sequence[Obj] = ()
        self._slices: Sequence[Obj] = ()
        self._free: dict[str, tuple[float, int | None]] = {}
        self.apis: frozenset[str] = frozenset()

    async def refresh(self) -> bool:
        """Asks again. True when the set of optional APIs has changed. Raises ApiError."""
        served = [kind.name for kind in OPTIONAL if await self._cluster.serves(kind)]
        self._nodes = await self._list(NODE) or []
        self._slices = await self._list(RESOURCE_SLICE) or []
        found = frozenset(served)
        changed, self.apis = found != self.apis, found
        return changed

    async def _list(self, kind: Kind) -> list[dict[str, Any]] | None:
        try:
            return await self._cluster.list_all(kind, None)
        except (Forbidden, NotFound) as error:
            log.info("%s are not known: %s", kind.plural, error.message)
            return None

    def node_facts(self, accelerator: Accelerator) -> NodeFacts:
        """Of the nodes that could run an engine of this kind."""
        if accelerator.type == "CPU":
            return NodeFacts(node_bytes=largest_node_bytes(self._nodes, ""))
        if accelerator.device_class_name:
            return NodeFacts(
                node_bytes=largest_node_bytes(self._nodes, ""),
                device_bytes=smallest_slice_device_bytes(self._slices),
            )
        name = accelerator.resource_name or DEFAULT_RESOURCE_NAME
        return NodeFacts(
            node_bytes=largest_node_bytes(self._nodes, name),
            device_bytes=smallest_device_bytes(self._nodes, name),
        )

    async def free_devices(self, accelerator: Accelerator) -> int | None:
        """Devices that no pod has asked for; None when that cannot be known. For rollouts only:
        it lists all pods of the cluster, at most every ten seconds."""
        if accelerator.type == "CPU":
            return None
        if accelerator.device_class_name:
            return None
        name = accelerator.resource_name or DEFAULT_RESOURCE_NAME
        now = self._clock.monotonic()
        known = self._free.get(name)
        if known is not None and now - known[0] < FREE_SECONDS:
            return known[1]
        try:
            nodes = await self._cluster.list_all(NODE, None)
            pods = await self._cluster.list_all(POD, None)
            free: int | None = count_free_devices(nodes, pods, name)
        except (Forbidden, NotFound):
            free = None
        except ApiError as error:
            log.warning("free devices: %s", error)
            free = None
        self._free[name] = (now, free)
        return free


def _amount(value: object) -> int:
    try:
        return int(parse(str(value)))
    except ValueError:
        return 0


def _allocatable(node: Obj, name: str) -> int:
    return _amount(node.get("status", {}).get("allocatable", {}).get(name, 0))


def _is_usable(node: Obj) -> bool:
    return not node.get("spec", {}).get("unschedulable", False)


def largest_node_bytes(nodes: Iterable[Obj], resource: str) -> int:
    """Allocatable memory of the largest node (with such devices); 0 when there is none."""
    return max(
        (
            _allocatable(node, "memory")
            for node in nodes
            if not resource or _allocatable(node, resource) > 0
        ),
        default=0,
    )


def smallest_device_bytes(nodes: Iterable[Obj], resource: str) -> int:
    """Memory that every device of the resource has, by node labels; 0 when no label tells."""
    label = _MEMORY_LABELS.get(resource)
    found = [
        _amount(node["metadata"].get("labels", {}).get(label, 0)) << 20
        for node in nodes
        if label and _allocatable(node, resource) > 0
    ]
    return min((value for value in found if value > 0), default=0)


def smallest_slice_device_bytes(slices: Iterable[Obj]) -> int:
    """The same from ResourceSlices: the least `memory` capacity of any device."""
    found = [
        _amount(device.get("capacity", {}).get("memory", {}).get("value", 0))
        for piece in slices
        for device in piece.get("spec", {}).get("devices") or ()
    ]
    return min((value for value in found if value > 0), default=0)


def count_free_devices(nodes: Iterable[Obj], pods: Iterable[Obj], resource: str) -> int:
    """Allocatable on schedulable nodes less what unfinished pods ask for, bound or waiting."""
    usable = {node["metadata"]["name"]: node for node in nodes if _is_usable(node)}
    free = sum(_allocatable(node, resource) for node in usable.values())
    for pod in pods:
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
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
        return _amount(
            asked if asked is not None else resources.get("requests", {}).get(resource, 0)
        )

    plain = sum(limit(container) for container in spec.get("containers", ()))
    first = max((limit(container) for container in spec.get("initContainers") or ()), default=0)
    return max(plain, first)
