"""An API server in memory: what Cluster promises, with field owners, generations and uids.

Used by tests and by tools without a cluster. Ships with the operator because it is the second
implementation of a seam. No admission, no schema, no controllers but the garbage collector.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator, Callable

from foveal_operator.kube.errors import ApiError, Conflict, NotFound, UserError
from foveal_operator.kube.kinds import (
    CLAIM,
    CLAIM_TEMPLATE,
    FIELD_MANAGER,
    INFERENCE,
    KINDS,
    MANAGED_BY,
    POD,
    POD_LABEL,
    Kind,
    kind_of,
)
from foveal_operator.kube.types import Obj
from foveal_operator.testing.field_ownership import Owners, applied, edited, managed_fields
from foveal_runtime.plan.quantity import parse

Place = tuple[str, str, str]
"""(plural name of the kind, namespace, name)"""
Watcher = Callable[[Kind, str, Obj], None]
"""(kind, "ADDED" | "MODIFIED" | "DELETED", object): watches all resources, and of every other kind
what has the operator's label (pods: their workloads'). An object that loses it is told as
deleted."""


class FakeCluster:
    """Args:
    missing: names of kinds whose API this cluster lacks.
    """

    def __init__(self, missing: frozenset[str] = frozenset()) -> None:
        self.missing = missing
        self.objects: dict[Place, Obj] = {}
        self.owners: dict[Place, Owners] = {}
        self.status_owners: dict[Place, Owners] = {}
        self.calls: list[tuple[str, str, str]] = []
        """(verb, kind, name) of every call, in order."""
        self.writes: list[tuple[str, str, str]] = []
        """Of those, the ones that changed something."""
        self.watchers: list[Watcher] = []
        self.failures: list[tuple[Callable[[str, str, str], bool], ApiError]] = []
        self.now_text: Callable[[], str] = lambda: "2026-01-01T00:00:00Z"
        """When objects are created."""
        self.collects = True
        """False: the garbage collector takes its time, until `collect`."""
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    # --- Cluster ----------------------------------------------------------------------------
    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj | None:
        self._called("GET", kind, name)
        found = self.objects.get((kind.name, namespace or "", name))
        return copy.deepcopy(found)

    async def list_all(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        self._called("LIST", kind, "")
        if kind.name in self.missing:
            raise NotFound(f"the server could not find the requested resource {kind.plural}", 404)
        wanted = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        asked = [pair.split("=", 1) for pair in fields.split(",") if pair]
        return [
            copy.deepcopy(body)
            for (name, space, _), body in sorted(self.objects.items())
            if name == kind.name
            and (not namespace or space == namespace)
            and wanted.items() <= body["metadata"].get("labels", {}).items()
            and all((_field(body, path) or "") == value for path, value in asked)
        ]

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Obj]]:
        yield await self.list_all(kind, namespace, selector, fields)

    async def serves(self, kind: Kind) -> bool:
        self._called("GET", kind, "")
        return kind.name not in self.missing

    async def apply(self, body: Obj) -> Obj:
        kind, key = self._target("APPLY", body)
        live = self.objects.get(key)
        self._preconditions(body, live)
        result, owners = applied(live, self.owners.get(key, {}), body, FIELD_MANAGER)
        if kind.name in ("Deployment", "StatefulSet"):
            result["spec"].setdefault("replicas", 1)
        self.owners[key] = owners
        return self._store("APPLY", kind, key, result)

    async def apply_new(self, body: Obj) -> Obj | None:
        kind, key = self._target("APPLY", body)
        if key in self.objects:
            return None
        result, self.owners[key] = applied(None, {}, body, FIELD_MANAGER)
        if kind.name in ("Deployment", "StatefulSet"):
            result["spec"].setdefault("replicas", 1)
        return self._store("APPLY", kind, key, result)

    async def apply_status(self, body: Obj) -> Obj:
        kind, key = self._target("APPLY", body)
        live = self.objects.get(key)
        if live is None:
            raise NotFound(f"{kind.plural} {key[2]} not found", 404)
        self._preconditions(body, live)
        part = {"status": body["status"]}
        result, self.status_owners[key] = applied(
            live, self.status_owners.get(key, {}), part, FIELD_MANAGER
        )
        return self._store("APPLY", kind, key, result)

    async def create(self, body: Obj, *, dry_run: bool = False) -> Obj | None:
        kind, key = self._target("POST", body)
        if key in self.objects:
            return None
        if dry_run:
            return copy.deepcopy(body)
        self.owners[key] = edited({}, body, {}, FIELD_MANAGER)
        return self._store("POST", kind, key, copy.deepcopy(body))

    async def update(self, body: Obj) -> Obj:
        kind, key = self._target("PUT", body)
        live = self.objects.get(key)
        if live is None:
            raise NotFound(f"{kind.plural} {key[2]} not found", 404)
        self._preconditions(body, live)
        return self._store("PUT", kind, key, copy.deepcopy(body))

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, version: str = ""
    ) -> bool:
        self._called("DELETE", kind, name)
        key = (kind.name, namespace, name)
        live = self.objects.get(key)
        if live is None or live["metadata"]["uid"] != uid:
            return False
        if version and live["metadata"]["resourceVersion"] != version:
            return False
        self.remove(kind, namespace, name)
        return True

    async def close(self) -> None:
        """Nothing is open."""

    # --- what tests do as somebody else -----------------------------------------------------
    def add(self, body: Obj, manager: str = "kubectl") -> Obj:
        """Creates an object as another user."""
        kind = kind_of(body)
        key = (kind.name, body["metadata"].get("namespace", ""), body["metadata"]["name"])
        assert key not in self.objects
        self.owners[key] = edited({}, body, {}, manager)
        return self._store("POST", kind, key, copy.deepcopy(body), count=False)

    def edit(
        self, kind: Kind, namespace: str, name: str, change: Callable[[Obj], None],
        manager: str = "kubectl",
    ) -> Obj:  # fmt: skip
        """Changes an object as another user; the fields become that user's."""
        key = (kind.name, namespace, name)
        before = self.objects[key]
        after = copy.deepcopy(before)
        change(after)
        self.owners[key] = edited(before, after, self.owners.get(key, {}), manager)
        return self._store("PUT", kind, key, after, count=False)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """Deletes an object and, as the garbage collector does, all that it owns."""
        key = (kind.name, namespace, name)
        body = self.objects.pop(key)
        self.owners.pop(key, None)
        self.status_owners.pop(key, None)
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self.writes.append(("DELETE", kind.name, name))
        self._tell(kind, body, None)
        if self.collects:
            self.collect(body["metadata"]["uid"])

    def collect(self, uid: str) -> None:
        """The garbage collector takes what an owner that is gone has left."""
        for (other, space, child), found in list(self.objects.items()):
            refs = found["metadata"].get("ownerReferences", ())
            if any(ref.get("uid") == uid for ref in refs):
                self.remove(next(k for k in KINDS if k.name == other), space, child)

    def fail(self, error: ApiError, verb: str = "", kind: str = "", name: str = "") -> None:
        """The next call that matches fails with this error, once."""

        def matches(v: str, k: str, n: str) -> bool:
            return verb in ("", v) and kind in ("", k) and name in ("", n)

        self.failures.append((matches, error))

    def body(self, kind: str, name: str, namespace: str = "default") -> Obj:
        """The live object itself, for assertions. Raises KeyError."""
        return self.objects[kind, namespace, name]

    def names(self, kind: str) -> list[str]:
        return sorted(name for k, _, name in self.objects if k == kind)

    # --- inside -----------------------------------------------------------------------------
    def _called(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind.name, name))
        for index, (matches, error) in enumerate(self.failures):
            if matches(verb, kind.name, name):
                del self.failures[index]
                raise error

    def _target(self, verb: str, body: Obj) -> tuple[Kind, Place]:
        kind = kind_of(body)
        metadata = body["metadata"]
        self._called(verb, kind, metadata["name"])
        if kind.name in self.missing:
            raise NotFound(f"no {kind.plural} here", 404)
        return kind, (kind.name, metadata.get("namespace", ""), metadata["name"])

    @staticmethod
    def _preconditions(body: Obj, live: Obj | None) -> None:
        for field in ("uid", "resourceVersion"):
            wanted = body["metadata"].get(field)
            if wanted and (live is None or live["metadata"][field] != wanted):
                raise Conflict(f"Precondition failed: {field} {wanted}", 409)

    def _store(self, verb: str, kind: Kind, key: Place, body: Obj, *, count: bool = True) -> Obj:
        live = self.objects.get(key)
        metadata = body["metadata"]
        for field in ("uid", "resourceVersion", "generation", "creationTimestamp"):
            metadata.pop(field, None)
            if live is not None and field in live["metadata"]:
                metadata[field] = live["metadata"][field]
        metadata["managedFields"] = managed_fields(self.owners.get(key, {}))
        if live is not None and _content(body) == _content(live):
            live["metadata"]["managedFields"] = metadata["managedFields"]
            return copy.deepcopy(live)
        if live is not None and live.get("immutable") and live.get("data") != body.get("data"):
            raise UserError(f"{kind.plural} {key[2]} is immutable", 422)
        if live is not None and kind is CLAIM:
            _check_claim(body.get("spec", {}), live.get("spec", {}))
        if live is not None and kind is CLAIM_TEMPLATE and live["spec"] != body["spec"]:
            raise UserError("spec: Invalid value: field is immutable", 422)
        if live is None:
            metadata["uid"] = f"uid-{next(self._uids)}"
            metadata["generation"] = 1
            metadata["creationTimestamp"] = self.now_text()
        elif _spec(body) != _spec(live):
            metadata["generation"] += 1
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[key] = body
        if count:
            self.writes.append((verb, kind.name, key[2]))
        self._tell(kind, live, body)
        return copy.deepcopy(body)

    def _tell(self, kind: Kind, before: Obj | None, after: Obj | None) -> None:
        """What a watch with a selector says. DELETED has the last object that it chose, at the
        version of its end."""
        was, is_now = (body is not None and _is_watched(kind, body) for body in (before, after))
        if not was and not is_now:
            return
        body = copy.deepcopy(after if is_now else before) or {}
        if after is not None:
            body["metadata"]["resourceVersion"] = after["metadata"]["resourceVersion"]
        change = "DELETED" if not is_now else "MODIFIED" if was else "ADDED"
        for watcher in self.watchers:
            watcher(kind, change, copy.deepcopy(body))

    def check_integrity(self) -> None:
        """uids are unique and nothing lives whose owner does not."""
        uids = [body["metadata"]["uid"] for body in self.objects.values()]
        assert len(uids) == len(set(uids))
        for key, body in self.objects.items():
            for ref in body["metadata"].get("ownerReferences", ()):
                if ref.get("kind") == INFERENCE.name:
                    assert ref["uid"] in uids, f"{key} outlived its owner"


def _check_claim(spec: Obj, live: Obj) -> None:
    """A claim only grows; what it was made with stays."""
    sizes = [
        part.get("resources", {}).get("requests", {}).get("storage", "0") for part in (spec, live)
    ]
    if parse(sizes[0]) < parse(sizes[1]):
        raise UserError("field can not be less than previous value", 422)
    if any(spec.get(field) != value for field, value in live.items() if field != "resources"):
        raise UserError("spec is immutable after creation except resources.requests", 422)


def _is_watched(kind: Kind, body: Obj) -> bool:
    key, value = POD_LABEL if kind is POD else (MANAGED_BY, FIELD_MANAGER)
    return kind is INFERENCE or (body["metadata"].get("labels") or {}).get(key) == value


def _content(body: Obj) -> Obj:
    metadata = {k: v for k, v in body["metadata"].items() if k not in _VOLATILE}
    return {**body, "metadata": metadata}


def _spec(body: Obj) -> Obj:
    return {k: v for k, v in body.items() if k not in ("metadata", "status")}


_VOLATILE = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp"}
)


def _field(body: Obj, path: str) -> object:
    found: object = body
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
