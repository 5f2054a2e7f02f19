"""Shapes that pass between folders: a Kubernetes object and the names it is found by."""

from __future__ import annotations

from typing import Any

Obj = dict[str, Any]
"""A Kubernetes object as JSON; one read from a cache is shared and never changed."""
NamespacedName = tuple[str, str]
"""(namespace, name) of an object of a known kind: the key of the work queue and the caches."""
ObjectKey = tuple[str, str]
"""(kind, name) of an object within one resource's namespace."""
