"""Single objects: whose each is, and how it is brought to what is wanted: apply or skip, delete.

Used by the reconciler. Writes and deletes only what is the resource's own: its controller is this
very resource, by uid. The claim for fetched weights has no owner, so that it outlives the resource:
labels name the resource, and the API server's own record of field managers says that the operator
made it.

Remembers, in memory only, what each apply returned: an object that is wanted as before and lies
there as it was left costs no request. After a restart everything is applied once more, which
changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.crd import GROUP, KIND
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.diff import diff
from foveal_operator.kube.errors import ApiError, Conflict, Denied, Transient, UserError
from foveal_operator.kube.kinds import FIELD_MANAGER, INSTANCE, MANAGED_BY, Kind, kind_of
from foveal_operator.kube.store import Caches, brief
from foveal_operator.kube.types import Obj, ObjectKey
from foveal_operator.manifests.context import content_hash
from foveal_operator.telemetry.series import Telemetry

log = logging.getLogger(__name__)

ADOPT = f"{GROUP}/adopt"
"""Annotation by which its owner hands an object over to the resource that it names."""
NO_SECRET = "No Secret can be handed over: remove it, or rename the resource."
LEAVING_SECONDS = 1.0
MAX_CORRECTIONS = 20
"""Of one object at once. Whoever writes it back as often is no accident but a controller, maybe
another operator, and each would answer the other without a pause."""
CORRECTION_SECONDS = 30.0
"""After which there may be another."""
_DELETED = "deleted "
"""Before the kind: that an object is made again is counted apart, so that changes delay it not."""
CORRECTED_SECONDS = 300.0
"""For so long it counts as lately."""
Standing = Literal["Ours", "Leaving", "Offered", "Foreign"]
"""Ours: write it. Leaving: it is being deleted, or its owner is gone and the garbage collector is
about to delete it. Offered: handed over by annotation. Foreign: never write or delete it."""


class Owner(msgspec.Struct, frozen=True, gc=False):
    """The resource on whose behalf objects are written: names repeat, uids do not."""

    name: str
    uid: str


class NameTaken(UserError):
    """An object of the name that the operator needs belongs to another client."""

    def __init__(self, live: Obj) -> None:
        metadata = live["metadata"]
        self.reason = reasons.NAME_TAKEN
        if live["kind"] == "Secret":
            self.reason = msgspec.structs.replace(self.reason, action=NO_SECRET)
        super().__init__(
            f"{live['kind']} {metadata.get('namespace', '')}/{metadata['name']} {_holder(live)}, "
            "not to this resource. It is left as it is"
        )


class StillLeaving(Transient):
    """An object of the name that the operator needs is on its way out: wait for it."""

    def __init__(self, live: Obj, why: str = "is being deleted") -> None:
        metadata = live["metadata"]
        text = (
            f"{live['kind']} {metadata.get('namespace', '')}/{metadata['name']} "
            f"{_holder(live)} and {why}; waiting until it is gone"
        )
        super().__init__(text, 409, LEAVING_SECONDS)


def standing(live: Obj, owner: Owner, *, is_retained: bool) -> Standing:
    """Whose a live object is.

    Args:
        owner: the resource that asks.
        is_retained: the object carries no owner on purpose; `live` must then hold managedFields.
    """
    metadata = live["metadata"]
    found, name = controller_of(live), owner.name
    if found.get("uid") == owner.uid or (is_retained and not found and _is_kept(metadata, name)):
        return "Ours"
    # Two resources of one name never live at the same time: another uid is an earlier one's.
    is_namesakes = found.get("kind") == KIND and found.get("name") == name
    is_namesakes &= str(found.get("apiVersion", "")).partition("/")[0] == GROUP
    if is_namesakes or metadata.get("deletionTimestamp"):
        return "Leaving"
    is_offered = (metadata.get("annotations") or {}).get(ADOPT) == name
    return "Offered" if is_offered and not found else "Foreign"


def controller_of(live: Obj) -> Mapping[str, Any]:
    """The owner reference of the controller; {} without one."""
    for reference in live["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Mapping[str, Any] = reference
            return found
    return {}


def is_controlled_by(live: Obj, uid: str) -> bool:
    """Whether the controller has this uid; never for an empty one."""
    return bool(uid) and controller_of(live).get("uid") == uid


def _is_kept(metadata: Mapping[str, Any], name: str) -> bool:
    labels = metadata.get("labels") or {}
    managers = {entry.get("manager") for entry in metadata.get("managedFields") or ()}
    return (
        labels.get(MANAGED_BY) == FIELD_MANAGER
        and labels.get(INSTANCE) == name
        and FIELD_MANAGER in managers
    )


def _holder(live: Obj) -> str:
    """To whom it belongs, as far as it tells."""
    metadata = live["metadata"]
    owner = controller_of(live)
    if owner:
        return f"belongs to {owner.get('kind')} {owner.get('name')}"
    manager = (metadata.get("labels") or {}).get(MANAGED_BY)
    if manager and manager != FIELD_MANAGER:
        return f"belongs to {manager} (label {MANAGED_BY})"
    made = [str(entry.get("manager")) for entry in metadata.get("managedFields") or ()]
    return f"belongs to {made[0]} (its field manager)" if made else "belongs to another client"


class ObjectError(Exception):
    """An object could not be written; `cause` says what the API server answered."""

    def __init__(self, kind: str, name: str, cause: ApiError) -> None:
        self.cause = cause
        super().__init__(f"{kind} {name}: {cause.message}")


class _Applied(msgspec.Struct, frozen=True, gc=False):
    digest: str
    uid: str
    version: str
    generation: int


class Applier:
    """One for all resources; `forget` when a resource is gone."""

    def __init__(
        self, cluster: Cluster, caches: Caches, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._telemetry = telemetry
        self._clock = clock
        self._applied: dict[str, dict[ObjectKey, _Applied]] = {}
        self._corrections: dict[str, dict[ObjectKey, tuple[float, float]]] = {}
        """Of objects that were corrected: how many more may be at once, and when that was so."""

    async def ensure(
        self, owner: Owner, body: Obj, digest: str = "", *, is_retained: bool = False
    ) -> bool:
        """Server-side apply, unless that could change nothing. True when something changed.

        A resourceVersion in the body is a condition, not a wish: it is sent along when an apply is
        needed at all. With a uid the object is never created: Conflict when it is gone. Raises
        ObjectError; its cause is NameTaken for an object that is not the resource's own.

        Args:
            digest: the body's content hash, where it is known.
            is_retained: the object carries no owner, so that it outlives the resource.
        """
        kind, metadata = kind_of(body), dict(body["metadata"])
        on_version = metadata.pop("resourceVersion", "")
        body = {**body, "metadata": metadata}
        key = (kind.name, metadata["name"])
        at = (metadata["namespace"], metadata["name"])
        digest = digest or content_hash(body)
        memory = self._applied.setdefault(owner.uid, {})
        known = memory.get(key)
        same = known if known and known.digest == digest else None
        if same and (same.uid, same.version) == self._caches.identity(kind, *at):
            return False
        live = self._caches.get(kind, *at)
        fought = key if live else (f"{_DELETED}{kind.name}", metadata["name"])
        if same and ((live and _is_as_left(same, body, live)) or self._wait(owner.uid, fought)):
            return False
        if on_version:
            body = {**body, "metadata": {**metadata, "resourceVersion": on_version}}
        mark = self._caches.mark
        try:
            if is_retained and known is None:
                live = await self._live(kind, *at)  # what is cached lacks its field managers
            stored = await self._write(owner, kind, body, live, is_retained)
        except ApiError as error:
            memory.pop(key, None)
            raise ObjectError(kind.name, metadata["name"], error) from error
        self._caches.put(kind, stored, mark)
        after = stored["metadata"]
        memory[key] = _Applied(
            digest, after["uid"], after["resourceVersion"], after.get("generation", 0)
        )
        changed = live is None or live["metadata"]["resourceVersion"] != after["resourceVersion"]
        if changed and same and not _is_same(metadata, live, after):
            self._corrected(owner.uid, fought, metadata["namespace"])
        return changed

    def _left(self, owner_uid: str, key: ObjectKey) -> float:
        """How many corrections of the object there may be now."""
        now = self._clock.monotonic()
        left, then = self._corrections.get(owner_uid, {}).get(key, (MAX_CORRECTIONS, now))
        return min(MAX_CORRECTIONS, left + (now - then) / CORRECTION_SECONDS)

    def _wait(self, owner_uid: str, key: ObjectKey) -> float:
        """Seconds until the object may be corrected; 0 for now."""
        return max(0.0, 1.0 - self._left(owner_uid, key)) * CORRECTION_SECONDS

    def _corrected(self, owner_uid: str, key: ObjectKey, namespace: str) -> None:
        kind = key[0].removeprefix(_DELETED)
        log.info("corrected drift: %s %s/%s", kind, namespace, key[1])
        self._telemetry.count("foveal_operator_drift_repairs", kind=kind)
        left = self._left(owner_uid, key) - 1.0
        kept = self._corrections.setdefault(owner_uid, {})
        kept[key] = (left, self._clock.monotonic())
        if left < 1.0:
            log.warning(
                "%s %s/%s is %s as often as it is corrected: now only every %.0f s; does "
                "another operator watch this namespace, or an autoscaler of yours scale it?",
                kind, namespace, key[1], "changed back" if kind == key[0] else "deleted",
                CORRECTION_SECONDS,
            )  # fmt: skip

    def was_corrected(self, owner_uid: str, key: ObjectKey) -> bool:
        """Lately."""
        then = self._corrections.get(owner_uid, {}).get(key, (0.0, float("-inf")))[1]
        return self._clock.monotonic() - then < CORRECTED_SECONDS

    def wait_seconds(self, owner_uid: str) -> float | None:
        """Until an object may be corrected that may not be now; None where there is none."""
        waits = (self._wait(owner_uid, key) for key in self._corrections.get(owner_uid, ()))
        return min((wait for wait in waits if wait), default=None)

    async def _write(
        self, owner: Owner, kind: Kind, body: Obj, live: Obj | None, is_retained: bool
    ) -> Obj:
        """The first write only creates; a later one names the very object. Raises ApiError."""
        metadata = body["metadata"]
        at = (metadata["namespace"], metadata["name"])
        if "uid" in metadata and (live is None or live["metadata"]["uid"] != metadata["uid"]):
            raise Conflict(f"{at[1]} is gone", 409)
        if live is None or standing(live, owner, is_retained=is_retained) != "Ours":
            if (stored := await self._cluster.apply_new(body)) is not None:
                return stored
            live = await self._live(kind, *at)
            if live is None:
                raise Conflict(f"{at[1]} was there a moment ago", 409)
            found = standing(live, owner, is_retained=is_retained)
            if found == "Leaving":
                raise StillLeaving(live)
            if found == "Foreign":
                raise NameTaken(live)
            if found == "Offered":
                log.warning("adopting %s %s/%s, as its annotation asks", kind.name, *at)
                version = live["metadata"]["resourceVersion"]
                metadata = {**metadata, "resourceVersion": version}
        uid = live["metadata"]["uid"]
        try:
            return await self._apply(kind, {**body, "metadata": {**metadata, "uid": uid}}, live)
        except Conflict:
            present = await self._live(kind, *at)
            if present is None or present["metadata"]["uid"] != uid:
                self._caches.drop(kind, *at, uid)  # the next pass sees that it is gone
            raise

    async def _live(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        """A live read by the right to list, which the watches need anyway."""
        found = await self._cluster.list_all(kind, namespace, fields=f"metadata.name={name}")
        return next(iter(found), None)

    async def _apply(self, kind: Kind, body: Obj, live: Obj) -> Obj:
        """Apply; a Service whose ports somebody has changed is replaced, and a disruption budget of
        the other kind deleted, to be made again by the next pass. Raises ApiError.

        Ports are merged by number: a foreign number stays beside ours under the same name, which
        the API server refuses. Then once more: what is wanted beside the spec is not in that.
        """
        try:
            return await self._cluster.apply(body)
        except UserError as error:
            metadata = live["metadata"]
            if kind.name == "PodDisruptionBudget" and not isinstance(error, Denied):
                # Somebody's minAvailable excludes our maxUnavailable, and no apply takes it away.
                at = (metadata["namespace"], metadata["name"])
                await self._cluster.delete(kind, *at, metadata["uid"], metadata["resourceVersion"])
                raise Conflict(f"{error.message}: it is made again", 409) from error
            if kind.name != "Service":
                raise
        await self._cluster.update({**live, "spec": {**live["spec"], **body["spec"]}})
        return await self._cluster.apply(body)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, controller_uid: str
    ) -> bool:
        """Deletes this very object, after a live read has shown that it is still the controller's,
        and unless it changes meanwhile."""
        live = await self._cluster.get(kind, namespace, name)
        if live is None or live["metadata"]["uid"] != uid:
            self._caches.drop(kind, namespace, name, uid)
            return False
        metadata = live["metadata"]
        if not is_controlled_by(live, controller_uid) or metadata.get("deletionTimestamp"):
            return False
        # What is made again one day is no drift.
        self._applied.get(controller_uid, {}).pop((kind.name, name), None)
        return await self._cluster.delete(kind, namespace, name, uid, metadata["resourceVersion"])

    def forget(self, owner_uid: str) -> None:
        self._applied.pop(owner_uid, None)
        self._corrections.pop(owner_uid, None)


def _is_same(metadata: Mapping[str, Any], live: Obj | None, after: Mapping[str, Any]) -> bool:
    """The apply took nothing back: others have changed their own (`kubectl rollout restart`)."""
    generation = after.get("generation")
    if live is None or not generation or live["metadata"].get("generation") != generation:
        return False
    return not diff({"metadata": metadata}, live)


def _is_as_left(known: _Applied, body: Obj, live: Obj) -> bool:
    """Nobody has touched what we own since our last apply."""
    metadata: dict[str, Any] = live["metadata"]
    if metadata["uid"] != known.uid:
        return False
    # Newer, perhaps only its status. Labels and owners do not count in the generation, and
    # objects without a generation (ConfigMaps, Services) are compared whole.
    if metadata.get("generation", 0) != known.generation:
        return False
    if metadata.get("generation"):
        return not diff({"metadata": body["metadata"]}, live)
    return not diff(brief(kind_of(body), body), live)
