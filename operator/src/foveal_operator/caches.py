"""What the watches have told: the last known object of each kind, by owner. In memory only.

Filled by watch.py and by the answers of our own writes, read by the reconciler. A version of an
object never replaces a newer one, so our own write is seen at once and late news changes nothing.
Good for deciding what to look at, never for deciding to destroy: deletes are preceded by live
reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from foveal_operator.kinds import INFERENCE, INSTANCE, Kind

Obj = dict[str, Any]
Key = tuple[str, str]
"""(namespace, name)"""
MAX_TOMBSTONES = 20_000
_KEEP_OWNERS = frozenset({"Deployment", "StatefulSet"})


def owner_of(kind: Kind, body: Obj) -> Key | None:
    """The resource that an object belongs to: itself, or the instance its labels name."""
    metadata = body["metadata"]
    if kind is INFERENCE:
        return metadata["namespace"], metadata["name"]
    name = metadata.get("labels", {}).get(INSTANCE)
    return (metadata["namespace"], name) if name else None


def trimmed(kind: Kind, body: Obj) -> Obj:
    """Without what nobody reads: managedFields are half of an object."""
    metadata = dict(body["metadata"])
    fields = metadata.pop("managedFields", None)
    if fields and kind.name in _KEEP_OWNERS:
        metadata["managedFields"] = [
            {"manager": entry.get("manager", ""), "fieldsV1": {"f:spec": {"f:replicas": {}}}}
            for entry in fields
            if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        ]
    return {**body, "metadata": metadata}


def version_of(body: Obj) -> int:
    """resourceVersion as a number: comparable since Kubernetes 1.35, and in fact long before."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


class Caches:
    """All kinds. Objects handed out are shared: read them only."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, Obj]] = {}
        self._owned: dict[Key, dict[str, set[Key]]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def put(self, kind: Kind, body: Obj) -> bool:
        """Takes an object in. False when what is known is as new or newer."""
        metadata = body["metadata"]
        uid = metadata["uid"]
        if uid in self._gone:
            return False
        key = (metadata.get("namespace", ""), metadata["name"])
        of_kind = self._objects.setdefault(kind.name, {})
        known = of_kind.get(key)
        is_same = known is not None and known["metadata"]["uid"] == uid
        if known is not None and is_same and version_of(body) <= version_of(known):
            return False
        if known is not None:
            self._unlink(kind, key, known)
        of_kind[key] = trimmed(kind, body)
        owner = owner_of(kind, body)
        if owner is not None:
            self._owned.setdefault(owner, {}).setdefault(kind.name, set()).add(key)
        return True

    def drop(self, kind: Kind, namespace: str, name: str, uid: str) -> Obj | None:
        """Takes an object out, unless another has its name now. Returns what was known."""
        self._gone[uid] = None
        while len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        key = (namespace, name)
        known = self._objects.get(kind.name, {}).get(key)
        if known is None or known["metadata"]["uid"] != uid:
            return None
        del self._objects[kind.name][key]
        self._unlink(kind, key, known)
        return known

    def uids(self, kind: Kind, namespace: str | None = None) -> frozenset[str]:
        """What is known of a kind; ask *before* the list that `replace` is given."""
        return frozenset(
            body["metadata"]["uid"]
            for (space, _), body in self._objects.get(kind.name, {}).items()
            if namespace is None or space == namespace
        )

    def replace(self, kind: Kind, bodies: Iterable[Obj], before: frozenset[str]) -> list[Obj]:
        """A complete list, read live. Returns whatever was missing, stale or a ghost.

        Args:
            before: uids known before the list was asked for. Only these can be ghosts: an object
                made meanwhile is not in the list and lives.
        """
        changed: list[Obj] = []
        seen: set[str] = set()
        for body in bodies:
            seen.add(body["metadata"]["uid"])
            if self.put(kind, body):
                changed.append(body)
        for (space, name), known in list(self._objects.get(kind.name, {}).items()):
            uid = known["metadata"]["uid"]
            if uid in before and uid not in seen:
                self.drop(kind, space, name, uid)
                changed.append(known)
        return changed

    def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        return self._objects.get(kind.name, {}).get((namespace, name))

    def owned(self, kind: Kind, owner: Key) -> list[Obj]:
        """Objects of a kind that belong to a resource, by name."""
        keys = self._owned.get(owner, {}).get(kind.name, set())
        return [self._objects[kind.name][key] for key in sorted(keys)]

    def keys(self, kind: Kind) -> list[Key]:
        return sorted(self._objects.get(kind.name, {}))

    def count(self, kind: Kind) -> int:
        return len(self._objects.get(kind.name, {}))

    def _unlink(self, kind: Kind, key: Key, body: Obj) -> None:
        owner = owner_of(kind, body)
        if owner is None:
            return
        kinds = self._owned.get(owner, {})
        keys = kinds.get(kind.name, set())
        keys.discard(key)
        if not keys:
            kinds.pop(kind.name, None)
        if not kinds:
            self._owned.pop(owner, None)

    def check_integrity(self) -> None:
        """The index by owner says the same as the objects, and no tombstone lives."""
        expected: dict[Key, dict[str, set[Key]]] = {}
        for name, of_kind in self._objects.items():
            for key, body in of_kind.items():
                assert body["metadata"]["uid"] not in self._gone
                kind = INFERENCE if name == INFERENCE.name else None
                labels = body["metadata"].get("labels", {})
                owner = key if kind else (key[0], labels[INSTANCE]) if INSTANCE in labels else None
                if owner is not None:
                    expected.setdefault(owner, {}).setdefault(name, set()).add(key)
        assert expected == self._owned
