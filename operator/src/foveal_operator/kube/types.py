"""Shapes that pass between folders: a Kubernetes object, the names it is found by, and what several
folders ask of one.
"""

from __future__ import annotations

from typing import Any

from foveal_runtime.plan.quantity import parse

Obj = dict[str, Any]
"""A Kubernetes object as JSON; one read from a cache is shared and never changed."""
NamespacedName = tuple[str, str]
"""(namespace, name) of an object of a known kind: the key of the work queue and the caches."""
ObjectKey = tuple[str, str]
"""(kind, name) of an object within one resource's namespace."""
MEMORY_LABELS = {"nvidia.com/gpu": "nvidia.com/gpu.memory", "amd.com/gpu": "amd.com/gpu.vram"}
"""Extended resource -> memory of one device in MiB, as feature discovery labels nodes."""


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


def allocatable(node: Obj, name: str) -> int:
    """Bytes of memory, or whole devices of an extended resource."""
    return amount(node.get("status", {}).get("allocatable", {}).get(name, 0))
