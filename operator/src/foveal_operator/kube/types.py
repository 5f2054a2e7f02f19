"""Shapes that pass between folders: a Kubernetes object, the names it is found by, and what several
folders ask of one.
"""

from __future__ import annotations

import re
from typing import Any

from foveal_runtime.plan.quantity import parse

Obj = dict[str, Any]
"""A Kubernetes object as JSON; one read from a cache is shared and never changed."""
NamespacedName = tuple[str, str]
"""(namespace, name) of an object of a known kind: the key of the work queue and the caches."""
ObjectKey = tuple[str, str]
"""(kind, name) of an object within one resource's namespace."""
MEMORY_LABELS = {"nvidia.com/gpu": "nvidia.com/gpu.memory", "amd.com/gpu": "amd.com/gpu.vram"}
"""Extended resource -> label of its nodes with the memory of one device."""
SHARES_LABELS = {"nvidia.com/gpu": "nvidia.com/gpu.replicas"}
"""Extended resource -> label with how many of it stand for one device."""
SHARED_SUFFIX = ".shared"
"""Of a resource that NVIDIA's device plugin renames where it is shared (renameByDefault). The
labels keep the name without it."""
_STRATEGY_LABEL = "nvidia.com/gpu.sharing-strategy"
_LABELLED = re.compile(r"(\d{1,9})(G?)")


def label_of(body: Obj, key: str) -> str:
    """The value of an object's label; "" without it."""
    return str(body["metadata"].get("labels", {}).get(key, ""))


def phase_of(pod: Obj) -> str:
    """Pending, Running, Succeeded or Failed; "" when nobody has said yet."""
    return str(pod.get("status", {}).get("phase", ""))


def condition(body: Obj, kind: str) -> Obj:
    """The condition of this type in an object's status; {} when it is not there."""
    for found in body.get("status", {}).get("conditions") or ():
        if found.get("type") == kind:
            return dict(found)
    return {}


def amount(value: object) -> int:
    """Of a quantity; 0 for what is none."""
    try:
        return int(parse(str(value)))
    except ValueError:
        return 0


def device_bytes(node: Obj, resource: str, *, is_whole: bool = False) -> int:
    """Memory of one device of an extended resource, by the node's labels; 0 when they do not tell.
    Where several of the resource stand for one device, a share of it, unless `is_whole` and one
    may take more than its share: time slicing divides no memory, MPS gives each an equal part.

    NVIDIA's feature discovery (github.com/NVIDIA/k8s-device-plugin, internal/lm/resource.go) writes
    MiB, of the whole device even where time slicing shares it, and then `replicas` above 1. AMD's
    node labeller (github.com/ROCm/k8s-device-plugin, cmd/k8s-node-labeller/main.go) writes rounded
    GiB with a G.
    """
    labels = node["metadata"].get("labels") or {}
    label = MEMORY_LABELS.get(resource.removesuffix(SHARED_SUFFIX), "")
    found = _LABELLED.fullmatch(str(labels.get(label, "")))
    if found is None:
        return 0
    whole = int(found[1]) << (30 if found[2] else 20)
    if is_whole and labels.get(_STRATEGY_LABEL) != "mps":
        return whole
    return whole // num_shares(node, resource)


def num_shares(node: Obj, resource: str) -> int:
    """How many of an extended resource stand for one device; at least 1."""
    labels = node["metadata"].get("labels") or {}
    label = SHARES_LABELS.get(resource.removesuffix(SHARED_SUFFIX), "")
    return max(1, amount(labels.get(label, 1)))


def allocatable(node: Obj, name: str) -> int:
    """Bytes of memory, or whole devices of an extended resource."""
    return amount(node.get("status", {}).get("allocatable", {}).get(name, 0))
