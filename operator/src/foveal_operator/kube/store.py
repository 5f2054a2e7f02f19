"""Cache of watched objects: the last known object of each kind, by owner. In memory only.

Filled by watches.py and by the answers of our own writes, read by the reconciler. A version of an
object never replaces a newer one, so our own write is seen at once and late news changes nothing.
Good for deciding what to look at, never for deciding to destroy: deletes are preceded by live
reads. Objects lie packed, as most are not looked at again for hours.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Container

import msgspec

from foveal_operator.kube.kinds import CONFIG_MAP, INFERENCE, INSTANCE, Kind
from foveal_operator.kube.types import NamespacedName, Obj, label_of

MAX_TOMBSTONES = 20_000
MAX_UNPACKED = 128
MAX_TEXT = 4096
READ_BACK = frozenset({"basis.json", "good.json", "profile.json", "state.json"})
"""Documents in ConfigMaps that the operator itself reads: whole, however long."""
_PACKED_BYTES = 512
"""Shorter objects are not worth compressing."""
_KEEP_OWNERS = frozenset({"Deployment", "StatefulSet"})


def owner_of(kind: Kind, body: Obj) -> NamespacedName | None:
    """The resource that an object belongs to: itself, or the instance its labels name."""
    metadata = body["metadata"]
    if kind is INFERENCE:
        return metadata["namespace"], metadata["name"]
    name = label_of(body, INSTANCE)
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


def brief(kind: Kind, body: Obj) -> Obj:
    """Of long texts in a ConfigMap, such as dashboards, only the digest, by which two can be
    compared."""
    if kind is not CONFIG_MAP or not body.get("data"):
        return body
    return {**body, "data": {k: _digest(k, text) for k, text in body["data"].items()}}


def _digest(key: str, text: str) -> str:
    if len(text) <= MAX_TEXT or key in READ_BACK:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def version_of(body: Obj) -> int:
    """resourceVersion as a number: comparable since Kubernetes 1.35, and in fact long before."""
    return _number(str(body["metadata"].get("resourceVersion", "")))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """One object: who it is, and the rest as JSON, compressed when it begins with no brace."""

    uid: str
    version: str
    owner: NamespacedName | None
    packed: bytes


def _pack(body: Obj) -> bytes:
    data = msgspec.json.encode(body)
    return zlib.compress(data, 1) if len(data) > _PACKED_BYTES else data


def _unpack(packed: bytes) -> Obj:
    data = packed if packed[:1] == b"{" else zlib.decompress(packed)
    body: Obj = msgspec.json.decode(data)
    return body


class Caches:
    """All kinds. Objects handed out are shared: read them only.

    Args:
        whole: keep long texts as they are, for who wants to show them.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._is_whole = whole
        self._objects: dict[str, dict[NamespacedName, _Entry]] = {}
        self._owned: dict[NamespacedName, dict[str, set[NamespacedName]]] = {}
        self._gone: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By uid: the number of its removal, and the version at which it went; 0 = not told."""
        self._num_gone = 0
        self._unpacked: OrderedDict[tuple[str, NamespacedName], Obj] = OrderedDict()

    @property
    def mark(self) -> int:
        """The present moment, for `put` of what is listed from now on."""
        return self._num_gone

    def put(self, kind: Kind, body: Obj, listed_since: int = -1) -> bool:
        """Takes an object in. False when what is known is as new or newer.

        Args:
            listed_since: `mark` when the live list was asked for that the object is in. What was
                thought to be gone before that is not: an older list must have been wrong.
        """
        metadata = body["metadata"]
        uid = metadata["uid"]
        count, ended = self._gone.get(uid, (-1, 0))
        # From the version of its end on, it has only left what the watch selects.
        if count > listed_since and not 0 < ended <= version_of(body):
            return False
        self._gone.pop(uid, None)
        key = (metadata.get("namespace", ""), metadata["name"])
        of_kind = self._objects.setdefault(kind.name, {})
        known = of_kind.get(key)
        if known is not None and known.uid == uid and version_of(body) <= _number(known.version):
            return False
        if known is not None:
            self._unlink(kind, key, known)
        owner = owner_of(kind, body)
        version = str(metadata.get("resourceVersion", ""))
        kept = trimmed(kind, body)
        packed = _pack(kept if self._is_whole else brief(kind, kept))
        of_kind[key] = _Entry(uid, version, owner, packed)
        if owner is not None:
            self._owned.setdefault(owner, {}).setdefault(kind.name, set()).add(key)
        return True

    def drop(
        self, kind: Kind, namespace: str, name: str, uid: str, version: str = ""
    ) -> Obj | None:
        """Takes an object out, unless another has its name now. Returns what was known.

        Args:
            version: resourceVersion at which it went, of a watch event. What is known to be newer
                has come back since: a watch also says DELETED of what has lost its label.
        """
        key, ended = (namespace, name), _number(version)
        known = self._objects.get(kind.name, {}).get(key)
        if known is not None and known.uid != uid:
            known = None
        if known is not None and 0 < ended < _number(known.version):
            return None
        self._num_gone += 1
        self._gone[uid] = (self._num_gone, ended)
        while len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        if known is None:
            return None
        del self._objects[kind.name][key]
        self._unlink(kind, key, known)
        return _unpack(known.packed)

    def uids(self, kind: Kind, namespace: str | None = None) -> frozenset[str]:
        """What is known of a kind; ask *before* the list that `keep_only` follows."""
        return frozenset(
            entry.uid
            for (space, _), entry in self._objects.get(kind.name, {}).items()
            if namespace is None or space == namespace
        )

    def keep_only(self, kind: Kind, listed: Container[str], before: frozenset[str]) -> list[Obj]:
        """A complete list, read live, has been put. Drops the ghosts and returns them.

        Args:
            listed: uids in the list.
            before: uids known before the list was asked for. Only these can be ghosts: an object
                made meanwhile is not in the list and lives.
        """
        ghosts = [
            (key, entry.uid)
            for key, entry in self._objects.get(kind.name, {}).items()
            if entry.uid in before and entry.uid not in listed
        ]
        dropped = (self.drop(kind, space, name, uid) for (space, name), uid in ghosts)
        return [body for body in dropped if body is not None]

    def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        key = (namespace, name)
        entry = self._objects.get(kind.name, {}).get(key)
        return None if entry is None else self._body(kind, key, entry)

    def identity(self, kind: Kind, namespace: str, name: str) -> tuple[str, str] | None:
        """(uid, resourceVersion) of an object, without unpacking it."""
        entry = self._objects.get(kind.name, {}).get((namespace, name))
        return None if entry is None else (entry.uid, entry.version)

    def owner(self, kind: Kind, namespace: str, name: str) -> NamespacedName | None:
        """The resource that an object belongs to, as far as it is known."""
        entry = self._objects.get(kind.name, {}).get((namespace, name))
        return None if entry is None else entry.owner

    def owned(self, kind: Kind, owner: NamespacedName) -> list[Obj]:
        """Objects of a kind that belong to a resource, by name."""
        of_kind = self._objects.get(kind.name, {})
        return [self._body(kind, key, of_kind[key]) for key in self._owned_keys(kind, owner)]

    def owned_names(self, kind: Kind, owner: NamespacedName) -> list[str]:
        """Their names, without unpacking them."""
        return [name for _, name in self._owned_keys(kind, owner)]

    def keys(self, kind: Kind) -> list[NamespacedName]:
        return sorted(self._objects.get(kind.name, {}))

    def count(self, kind: Kind) -> int:
        return len(self._objects.get(kind.name, {}))

    def _owned_keys(self, kind: Kind, owner: NamespacedName) -> list[NamespacedName]:
        return sorted(self._owned.get(owner, {}).get(kind.name, ()))

    def _body(self, kind: Kind, key: NamespacedName, entry: _Entry) -> Obj:
        """Unpacked, and kept so for a while: a pass asks for the same few again and again."""
        at = (kind.name, key)
        body = self._unpacked.get(at)
        if body is None:
            body = self._unpacked[at] = _unpack(entry.packed)
            if len(self._unpacked) > MAX_UNPACKED:
                self._unpacked.popitem(last=False)
        return body

    def _unlink(self, kind: Kind, key: NamespacedName, entry: _Entry) -> None:
        self._unpacked.pop((kind.name, key), None)
        if entry.owner is None:
            return
        kinds = self._owned.get(entry.owner, {})
        keys = kinds.get(kind.name, set())
        keys.discard(key)
        if not keys:
            kinds.pop(kind.name, None)
        if not kinds:
            self._owned.pop(entry.owner, None)

    def check_integrity(self) -> None:
        """The index by owner says the same as the objects, no tombstone lives, and what is
        unpacked is what is packed."""
        expected: dict[NamespacedName, dict[str, set[NamespacedName]]] = {}
        for name, of_kind in self._objects.items():
            for key, entry in of_kind.items():
                body = _unpack(entry.packed)
                assert entry.uid == body["metadata"]["uid"] not in self._gone
                assert entry.version == body["metadata"].get("resourceVersion", "")
                assert self._unpacked.get((name, key), body) == body
                kind = INFERENCE if name == INFERENCE.name else None
                labels = body["metadata"].get("labels", {})
                owner = key if kind else (key[0], labels[INSTANCE]) if INSTANCE in labels else None
                assert owner == entry.owner
                if owner is not None:
                    expected.setdefault(owner, {}).setdefault(name, set()).add(key)
        assert expected == self._owned
        assert all(key in self._objects[name] for name, key in self._unpacked)
