"""The one recipe: what is wanted of one resource, what is there, and the steps between them.

Called by the workers of process/main.py with a key. Level-triggered: every pass starts from the
present state and a pass that finds all in order writes nothing. Reads come from the caches;
whatever destroys is preceded by a live read and carries a uid. Holds no state that a restart would
miss.
"""

from __future__ import annotations

import logging

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.parse import SpecError
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import (
    MAX_MESSAGE,
    ApiError,
    Forbidden,
    NotLeader,
    UserError,
)
from foveal_operator.kube.events import EventRecorder
from foveal_operator.kube.kinds import (
    BY_NAME,
    CONFIG_MAP,
    INFERENCE,
    INSTANCE,
    POD,
    STATEFUL_SET,
)
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import NamespacedName, Obj, ObjectKey
from foveal_operator.pods.diagnose import NEW_SECONDS, ready_within
from foveal_operator.pods.reports import ObservePods
from foveal_operator.reconcile.apply import (
    Applier,
    NameTaken,
    ObjectError,
    Owner,
    StillLeaving,
    is_controlled_by,
)
from foveal_operator.reconcile.baseline import basis_config_map
from foveal_operator.reconcile.decide import Decider, Decision
from foveal_operator.reconcile.inventory import Inventory
from foveal_operator.reconcile.key_secret import KeySecret
from foveal_operator.reconcile.observe import COMPONENT, Observer, Settings
from foveal_operator.reconcile.prune import unwanted_now
from foveal_operator.reconcile.report import Teller
from foveal_operator.reconcile.rivals import Rivals
from foveal_operator.status.conditions import Verdict, verdict
from foveal_operator.status.verdicts import SETTLE_SECONDS
from foveal_operator.telemetry.series import Telemetry

log = logging.getLogger(__name__)

POLL_SECONDS = 60.0
EAGER_POLL_SECONDS = 15.0
REFUSED_SECONDS = 60.0
SHORT_SECONDS = 3.0
"""Until a workload without pods is looked at again (its Events say why), or new frontends are."""
TOLD_FAILURES = 5
"""So many passes in a row must fail, over some eight seconds, before the status tells."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`again_seconds`: look again then even if nothing changes; None = no need. `is_refused`: the
    resource cannot succeed as it is; retry with growing pauses."""

    again_seconds: float | None = None
    is_refused: bool = False


class Reconciler:
    """All collaborators come in; one per operator."""

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        inventory: Inventory,
        recorder: EventRecorder,
        telemetry: Telemetry,
        *,
        clock: Clock,
        settings: Settings,
        observe_pods: ObservePods,
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._recorder = recorder
        self._keys = KeySecret(cluster, clock)
        self._observer = Observer(
            cluster,
            caches,
            inventory,
            clock=clock,
            settings=settings,
            observe_pods=observe_pods,
        )
        self._decider = Decider(caches, inventory)
        self.applier = Applier(cluster, caches, telemetry, clock)
        rivals = Rivals(cluster, clock, self.applier.was_corrected)
        self._teller = Teller(cluster, caches, recorder, telemetry, clock, rivals, settings.version)
        self._uids: dict[NamespacedName, str] = {}

    async def reconcile(self, key: NamespacedName, num_failures: int = 0) -> Outcome:
        """One pass. Raises ApiError for what may work later, and tells it in the status when it
        lasts; what only an edit can help is only told.

        Args:
            num_failures: passes over this resource that have failed in a row.
        """
        resource = self._caches.get(INFERENCE, *key)
        uid = resource["metadata"]["uid"] if resource else ""
        if self._uids.get(key, uid) != uid:
            self._forget(key)
        if resource is None or resource["metadata"].get("deletionTimestamp"):
            # The garbage collector takes what we own; there is nothing of ours outside.
            return Outcome()
        self._uids[key] = uid
        work: Decision | None = None
        try:
            work = await self._decider.decide(await self._observer.observe(key, resource))
            try:
                work, again, refused = await self._act(work)
            except ObjectError as error:
                if not isinstance(error.cause, UserError):
                    raise
                again, refused = None, error
            await self._teller.tell(work, refused=refused)
        except SpecError as error:
            await self._refuse(key, resource, error)
            return Outcome()
        except Exception as error:
            cause = error.cause if isinstance(error, ObjectError) else error
            failure = _failure(error, cause, num_failures)
            if not isinstance(cause, NotLeader) and (failure or cause is not error):
                if cause is not error:  # which object; whoever called logs the cause
                    log.warning("%s/%s: %s", *key, error)
                await self._tell_failure(key, work, failure)
            raise cause  # noqa: B904
        if refused is None:
            return Outcome(again_seconds=again)
        # Only an edit can help, or whoever set the quota or the policy: no hurry.
        return Outcome(
            again_seconds=min(again or REFUSED_SECONDS, REFUSED_SECONDS), is_refused=True
        )

    async def _tell_failure(
        self, key: NamespacedName, work: Decision | None, failure: Verdict | None
    ) -> None:
        """A resource without a status counts as healthy, so tell even when a pass has failed. Never
        raises: what ended the pass counts."""
        if work is not None:
            try:
                return await self._teller.tell(work, failure=failure)
            except Exception as error:
                log.warning("%s/%s: status: %s", *key, error)
        resource = self._caches.get(INFERENCE, *key)
        if failure is not None and resource is not None:
            try:
                await self._teller.fail(resource, failure)
            except Exception as error:
                log.warning("%s/%s: status: %s", *key, error)

    async def _act(self, work: Decision) -> tuple[Decision, float | None, ObjectError | None]:
        """Applies, deletes, prunes. Returns what to report; in how many seconds to observe again,
        or None; and the first object that the API server refuses and that pods do without."""
        again = [s for s in (work.rollout.next_check_seconds, work.model.next_check_seconds) if s]
        if work.serving_pods:
            again.append(_poll_seconds(work))
        if work.waits_for_cluster:
            again.append(POLL_SECONDS)
        if work.short:
            explained = len(work.reports.refused) >= len(work.short)
            again.append(EAGER_POLL_SECONDS if explained else SHORT_SECONDS)
        if work.inference.spec.paused:
            return work, min(again, default=None), None
        if work.desired.complete and await self._keys.is_lost(work):
            await self._replace_keys(work)
            return work, 0.0, None
        refused = await self._apply_all(work)
        if (wait := self.applier.wait_seconds(work.uid)) is not None:
            again.append(wait)
        for kind, name, uid in work.model.delete:
            await self.applier.delete(BY_NAME[kind], work.key[0], name, uid, work.uid)
        if work.rollout.delete_pods:
            work = await self._delete_pods(work)
        if work.desired.complete:
            await self._prune(work)
        return work, min(again, default=None), refused

    async def _apply_all(self, work: Decision) -> ObjectError | None:
        """Applies what is wanted, in order. A refused object ends the pass, unless the pods do
        without it: then the first of those is returned."""
        owner = _owner(work)
        refused: ObjectError | None = None
        wanted: set[ObjectKey] = set()
        for owned in work.model.objects:
            wanted.add(_key(owned.body))
            if owned.policy != "Keep":
                retained = owned.policy == "Retain"
                try:
                    await self.applier.ensure(owner, owned.body, is_retained=retained)
                except ObjectError as error:
                    # Pods serve from the claim as it is, even if it cannot grow.
                    is_there = retained and work.desired.complete
                    if not is_there or not _is_refused(error):
                        raise
                    log.warning("%s/%s: %s", *work.key, error)
                    refused = error
        if not work.desired.complete:
            return None
        basis = basis_config_map(work.context, work.basis)
        if not self._has_begun(work, basis["metadata"]["name"]):
            await self._keys.claim(work)
        wanted.add(_key(basis))
        await self.applier.ensure(owner, basis)
        if work.rollout.record is not None:
            await self.applier.ensure(owner, work.rollout.record)
        for owned in work.desired.objects:
            key = _key(owned.body)
            if key in wanted:
                continue
            wanted.add(key)
            if owned.policy == "CreateOnly":
                await self._keys.ensure(work)
            elif key[0] != "Job":
                try:
                    await self._apply_one(work, owned.body)
                except ObjectError as error:
                    are_there = ("Deployment", f"{work.key[1]}-frontend") in wanted
                    is_workload = key[0] == "Deployment"
                    if is_workload or not are_there or not isinstance(error.cause, UserError):
                        raise
                    log.warning("%s/%s: %s", *work.key, error)
                    refused = refused or error
        return refused

    def _has_begun(self, work: Decision, basis: str) -> bool:
        """The basis comes before the keys, the engines after them; either may have been deleted."""
        found = (
            self._caches.get(CONFIG_MAP, work.key[0], basis),
            self._caches.get(STATEFUL_SET, work.key[0], f"{work.key[1]}-engine"),
        )
        return any(body is not None and is_controlled_by(body, work.uid) for body in found)

    async def _apply_one(self, work: Decision, body: Obj) -> None:
        """A workload goes as the rollout says; anything else as it is."""
        chosen: Obj | None = body
        if body["kind"] == "StatefulSet":
            chosen = work.rollout.stateful_set
        elif body["kind"] == "Deployment":
            chosen = work.rollout.deployment
        if chosen is not None:
            digest = work.digests.get(_key(body), "") if chosen is body else ""
            await self.applier.ensure(_owner(work), chosen, digest)

    async def _replace_keys(self, work: Decision) -> None:
        """Notes that pods need other keys; the next pass makes them and asks for other pods. In
        this order, so that an operator that dies in between never mixes two sets."""
        generation = self._keys.new_generation()
        basis = msgspec.structs.replace(work.basis, key_generation=generation)
        await self.applier.ensure(_owner(work), basis_config_map(work.context, basis))
        note = "The Secret with the CURVE keys was deleted: all pods are replaced by new ones."
        log.warning("%s/%s: %s", *work.key, note)
        await self._recorder.record(work.resource, "Warning", "KeysReplaced", note)

    async def _delete_pods(self, work: Decision) -> Decision:
        """Decides once more on a live list: what a stale cache suggested must still hold."""
        key = work.key
        before = self._caches.uids(POD)
        selector = f"{INSTANCE}={key[1]},{COMPONENT}=engine"
        pods = await self._cluster.list_all(POD, key[0], selector)
        for pod in pods:
            self._caches.put(POD, pod)
        listed = {pod["metadata"]["uid"] for pod in pods}
        for pod in work.engine_pods:
            metadata = pod["metadata"]
            if metadata["uid"] in before and metadata["uid"] not in listed:
                self._caches.drop(POD, key[0], metadata["name"], metadata["uid"])
        work = msgspec.structs.replace(work, engine_pods=self._observer.pods(key, "engine"))
        again = await self._decider.rollout(work, work.desired)
        engines = self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine")
        if engines is None or not is_controlled_by(engines, work.uid):
            return work
        for name, uid in set(again.delete_pods) & set(work.rollout.delete_pods):
            log.info("replacing pod %s/%s: %s", key[0], name, again.message)
            await self.applier.delete(POD, key[0], name, uid, engines["metadata"]["uid"])
        return work

    async def _prune(self, work: Decision) -> None:
        """Deletes owned objects that nothing wants or uses any more."""
        key = work.key
        for kind, body in unwanted_now(work, self._caches):
            metadata = body["metadata"]
            log.info("pruning %s %s/%s", kind.name, key[0], metadata["name"])
            await self.applier.delete(kind, key[0], metadata["name"], metadata["uid"], work.uid)

    async def _refuse(self, key: NamespacedName, resource: Obj, error: SpecError) -> None:
        pods = (self._observer.pods(key, "engine"), self._observer.pods(key, "frontend"))
        await self._teller.refuse(resource, error, *pods)

    def doubt(self) -> None:
        """Called now and then: no watch tells of a key Secret that somebody has deleted."""
        self._keys.doubt()

    def check_integrity(self) -> None:
        self._decider.check_integrity()

    def _forget(self, key: NamespacedName) -> None:
        """The resource that had this name is gone: so is all that was kept for it."""
        uid = self._uids.pop(key)
        self.applier.forget(uid)
        self._keys.forget(uid)
        self._teller.forget(key, uid)


def _failure(error: Exception, cause: Exception, num_failures: int) -> Verdict | None:
    """What to tell of a pass that has failed; None for what may have passed by the next. A lacking
    right, what is waited for and a defect are told at once: their texts do not change."""
    if isinstance(cause, Forbidden):
        return verdict("Ready", False, reasons.MISSING_RIGHT, str(error))
    if isinstance(cause, StillLeaving):
        return verdict("Ready", False, reasons.WAITING, str(error))
    if not isinstance(cause, ApiError):
        text = f"a defect of the operator: {type(cause).__name__}: {cause}"
        return verdict("Ready", False, reasons.RECONCILE_FAILED, text[:MAX_MESSAGE])
    if num_failures + 1 < TOLD_FAILURES:
        return None
    return verdict("Ready", False, reasons.RECONCILE_FAILED, str(error))


def _is_refused(error: ObjectError) -> bool:
    """The object is the resource's own, and the API server refuses what it should become."""
    return isinstance(error.cause, UserError) and not isinstance(error.cause, NameTaken)


def _poll_seconds(work: Decision) -> float:
    """Ready waits for what new frontends say, and for nodes to be told of them."""
    reports = work.reports
    mirrored = 0 <= reports.sessions_wanted <= reports.sessions_up and not reports.silent
    period = SETTLE_SECONDS if mirrored else NEW_SECONDS
    if any(ready_within(pod, period, work.now) for pod in work.frontend_pods):
        return SHORT_SECONDS
    return POLL_SECONDS if mirrored else EAGER_POLL_SECONDS


def _owner(work: Decision) -> Owner:
    return Owner(work.key[1], work.uid)


def _key(body: Obj) -> ObjectKey:
    return body["kind"], body["metadata"]["name"]
