"""Autoscalers made by hand that set replicas which the operator sets back.

Used by report.py. Looks only after the operator has corrected a workload, so that it costs nothing
at rest, and at the autoscalers themselves: field managers do not tell a HorizontalPodAutoscaler
from `kubectl scale` by a controller. KEDA's are HorizontalPodAutoscalers too. Never writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import ClusterReader
from foveal_operator.kube.errors import ApiError
from foveal_operator.kube.kinds import BY_NAME, DEPLOYMENT, STATEFUL_SET
from foveal_operator.kube.types import Obj, ObjectKey
from foveal_operator.reconcile.apply import controller_of
from foveal_operator.reconcile.decide import Decision

log = logging.getLogger(__name__)

AUTOSCALER = BY_NAME["HorizontalPodAutoscaler"]
ASK_SECONDS = 30.0


class Rivals:
    """One per operator. Args: was_corrected: of a resource (by uid), whether an object of its was
    changed back lately."""

    def __init__(
        self, cluster: ClusterReader, clock: Clock, was_corrected: Callable[[str, ObjectKey], bool]
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._was_corrected = was_corrected
        self._known: dict[str, tuple[float, str]] = {}

    async def find(self, work: Decision) -> str:
        """Names them and what each scales; "" for none. Never raises ApiError."""
        spec, name = work.inference.spec, work.key[1]
        scaled = {
            (kind.name, f"{name}-{role}")
            for kind, role, part in (
                (DEPLOYMENT, "frontend", spec.frontend),
                (STATEFUL_SET, "engine", spec.engine),
            )
            if part.autoscaling is None
        }
        asked_at, text = self._known.get(work.uid, (float("-inf"), ""))
        if not text and not any(self._was_corrected(work.uid, key) for key in scaled):
            self.forget(work.uid)
            return ""
        now = self._clock.monotonic()
        if now - asked_at < ASK_SECONDS:
            return text
        try:
            found = await self._cluster.list_all(AUTOSCALER, work.key[0])
        except ApiError as error:
            log.info("autoscalers of %s: %s", work.key[0], error)
            return text
        text = "; ".join(said for one in found if (said := _said_of(one, scaled)))
        self._known[work.uid] = (now, text)
        return text

    def forget(self, uid: str) -> None:
        """The resource is gone, or nothing of its is corrected."""
        self._known.pop(uid, None)


def _said_of(autoscaler: Obj, scaled: set[ObjectKey]) -> str:
    target = autoscaler.get("spec", {}).get("scaleTargetRef") or {}
    kind, name = str(target.get("kind")), str(target.get("name"))
    if (kind, name) not in scaled:
        return ""
    owner = controller_of(autoscaler)
    whose = f" (of {owner.get('kind')} {owner.get('name')})" if owner else ""
    text = f"HorizontalPodAutoscaler {autoscaler['metadata']['name']}{whose} sets the replicas"
    return f"{text} of {kind} {name}, and the operator sets them back to the resource's"
