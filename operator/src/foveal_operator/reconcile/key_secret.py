"""The CURVE key Secret of a resource: made when it is missing, never read.

Used by the reconciler. A Secret that pods already run with has been deleted when it is missing:
other keys under the same revision would let new pods start that old ones refuse. So the reconciler
is told first, notes a new key generation in the basis (which moves the session group, so that all
pods are replaced in the order of any rollout), and only then are keys made.
"""

from __future__ import annotations

import logging
import secrets

from foveal_operator.common.clock import Clock, seconds
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError, UserError
from foveal_operator.kube.kinds import SECRET
from foveal_operator.kube.types import Obj, label_of, phase_of
from foveal_operator.manifests.curve_keys import curve_secret, make_keys
from foveal_operator.manifests.pods import SESSION_GROUP_LABEL, session_group
from foveal_operator.reconcile.apply import NameTaken, ObjectError, StillLeaving
from foveal_operator.reconcile.decide import Decision

log = logging.getLogger(__name__)

# How often to look for it while a pod waits for something.
WAITING_SECONDS = 30.0
YOUNG_SECONDS = 60.0


class KeySecret:
    """One for all resources; `forget` when a resource is gone."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, float] = {}

    async def is_lost(self, work: Decision) -> bool:
        """Pods run with a Secret that is there no more. Asks the API server when that is due: a
        create that is only tried, which needs no right to read. Raises ObjectError."""
        if not self._is_due(work) or not _are_in_use(work):
            return False
        try:
            if await self._create(curve_secret(work.context), dry_run=True) is not None:
                return True
        except ObjectError as error:
            # A full quota refuses even what is there already, before it is looked for.
            if not isinstance(error.cause, UserError):
                raise
            log.info("%s/%s: whether the keys are there is not known: %s", *work.key, error)
        self._known[work.uid] = self._clock.monotonic()
        return False

    async def claim(self, work: Decision) -> None:
        """Asked before anything tells that the resource has keys: a Secret that is there by then is
        not its own. It may be its predecessor's, which the garbage collector is about to delete;
        whose it is cannot be known, for no Secret is ever read. Raises ObjectError."""
        body = curve_secret(work.context)
        if await self._create(body, dry_run=True) is None:
            place = {key: body["metadata"][key] for key in ("name", "namespace")}
            there: Obj = {"kind": body["kind"], "metadata": place}
            cause = (
                StillLeaving(there, "may be an earlier resource's")
                if self._is_young(work)
                else NameTaken(there)
            )
            raise ObjectError(SECRET.name, place["name"], cause)

    async def ensure(self, work: Decision) -> None:
        """Makes it, unless it is there. Raises ObjectError."""
        if self._is_due(work):
            keys = make_keys(secrets.token_bytes)
            await self._create(curve_secret(work.context, keys), dry_run=False)
            self._known[work.uid] = self._clock.monotonic()

    def new_generation(self) -> str:
        """A name that no earlier set of keys had."""
        return secrets.token_hex(4)

    def doubt(self) -> None:
        """Somebody may have deleted any of them meanwhile."""
        self._known.clear()

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)

    def _is_due(self, work: Decision) -> bool:
        known = self._known.get(work.uid)
        if known is None:
            return True
        waits = any(phase_of(pod) == "Pending" for pod in work.serving_pods)
        return waits and self._clock.monotonic() - known >= WAITING_SECONDS

    def _is_young(self, work: Decision) -> bool:
        made = seconds(work.resource["metadata"].get("creationTimestamp"))
        return made > 0 and work.now - made < YOUNG_SECONDS

    async def _create(self, body: Obj, *, dry_run: bool) -> Obj | None:
        try:
            return await self._cluster.create(body, dry_run=dry_run)
        except ApiError as error:
            raise ObjectError(SECRET.name, body["metadata"]["name"], error) from error


def _are_in_use(work: Decision) -> bool:
    """A pod of the present session group has started, which it cannot without the Secret."""
    group = session_group(work.context)
    return any(
        phase_of(pod) == "Running" and label_of(pod, SESSION_GROUP_LABEL) == group
        for pod in work.serving_pods
    )
