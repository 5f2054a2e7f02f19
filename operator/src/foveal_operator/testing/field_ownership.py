"""Server-side apply in miniature: who owns which field, and what an apply does to an object. Pure.

Used by fake_cluster.py. Knows leaves of mappings and lists of things with a `name` or `type`;
every other list is one value. Good enough to show hand-over, pruning and no-op applies; the real
API server is asked in its own tests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from foveal_operator.kube.types import Obj

Path = tuple[str, ...]
Owners = dict[str, frozenset[Path]]
_KEYS = ("name", "type")
_SERVER = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields",
     "deletionTimestamp", "name", "namespace"}
)  # fmt: skip


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of everything that can be owned."""
    key = list_key(value)
    if isinstance(value, dict) and value:
        for name, item in value.items():
            if path == ("metadata",) and name in _SERVER:
                continue
            if not path and name in ("apiVersion", "kind"):
                continue
            yield from leaves(item, (*path, name))
    elif key:
        for item in value:
            yield from leaves(item, (*path, f"[{item[key]}]"))
    else:
        yield path, value


def list_key(value: Any) -> str:
    """The field by which a list's elements are told apart; "" when the list is one value."""
    if not isinstance(value, list) or not value:
        return ""
    for key in _KEYS:
        if all(isinstance(item, dict) and isinstance(item.get(key), str) for item in value):
            return key
    return ""


def put(target: Obj, path: Path, value: Any) -> None:
    """Sets one leaf, making what leads to it."""
    at: Any = target
    for step, following in zip(path, (*path[1:], ""), strict=True):
        last = following == ""
        if step.startswith("["):
            at = _element(at, step[1:-1], path)
            if last:
                at.clear()
                at.update(value)
        elif last:
            at[step] = copy.deepcopy(value)
        else:
            empty: Any = [] if following.startswith("[") else {}
            if not isinstance(at.get(step), type(empty)):
                at[step] = empty
            at = at[step]


def _element(at: list[Obj], name: str, path: Path) -> Obj:
    for item in at:
        if any(item.get(key) == name for key in _KEYS):
            return item
    key = "type" if "conditions" in path else "name"
    at.append({key: name})
    return at[-1]


def drop(target: Any, path: Path) -> None:
    """Removes one leaf, and what it leaves empty."""
    if not path:
        return
    step, rest = path[0], path[1:]
    if step.startswith("["):
        found = [i for i in target if any(i.get(key) == step[1:-1] for key in _KEYS)]
        for item in found:
            drop(item, rest)
            if not item or not rest:
                target.remove(item)
    elif isinstance(target, dict) and step in target:
        if rest:
            drop(target[step], rest)
        if not rest or target[step] in ({}, []):
            del target[step]


def applied(live: Obj | None, owners: Owners, body: Obj, manager: str) -> tuple[Obj, Owners]:
    """The object and its owners after `manager` applied `body` with force."""
    wanted = dict(leaves(body))
    if live is not None:
        result = copy.deepcopy(live)
    else:
        named = {k: v for k, v in body["metadata"].items() if k in ("name", "namespace")}
        result = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": named}
    current = dict(leaves(result))
    others = {path for name, paths in owners.items() if name != manager for path in paths}
    # What an element is found by goes last.
    gone = owners.get(manager, frozenset()) - wanted.keys()
    for path in sorted(gone, key=lambda path: path[-1] in _KEYS):
        if path not in others and path in current:
            drop(result, path)
    fresh: Owners = {}
    for name, paths in owners.items():
        if name != manager:
            kept = {p for p in paths if p not in wanted or current.get(p) == wanted[p]}
            if kept:
                fresh[name] = frozenset(kept)
    for path, value in wanted.items():
        put(result, path, value)
    fresh[manager] = frozenset(wanted)
    return result, fresh


def edited(before: Obj, after: Obj, owners: Owners, manager: str) -> Owners:
    """Owners after `manager` wrote `after` without apply: what changed is its own now."""
    old, new = dict(leaves(before)), dict(leaves(after))
    changed = {path for path, value in new.items() if old.get(path, object) != value}
    gone = old.keys() - new.keys()
    fresh = {name: paths - changed - gone for name, paths in owners.items()}
    fresh[manager] = frozenset(fresh.get(manager, frozenset()) | changed)
    return {name: paths for name, paths in fresh.items() if paths}


def managed_fields(owners: Owners) -> list[Obj]:
    """metadata.managedFields as far as readers of it look: nested f: keys."""
    found = []
    for manager, paths in sorted(owners.items()):
        tree: Obj = {}
        for path in paths:
            at = tree
            for step in path:
                at = at.setdefault(f"f:{step}", {})
        found.append({"manager": manager, "fieldsV1": tree})
    return found
