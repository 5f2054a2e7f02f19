"""Reports the state of a resource: its status, Events and gauges, after every reconcile.

Used by the reconciler. Writes the status only when it says something new; never touches anything
else.
"""

from __future__ import annotations

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec, SpecError
from foveal_operator.api.status import Condition
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import Conflict, Denied, NotFound
from foveal_operator.kube.events import EventRecorder
from foveal_operator.kube.kinds import BY_NAME, DEPLOYMENT, ENDPOINT_SLICE, INFERENCE, STATEFUL_SET
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import NamespacedName, Obj, condition
from foveal_operator.manifests import Desired
from foveal_operator.manifests.model_source import image_revision
from foveal_operator.reconcile.apply import NameTaken, ObjectError
from foveal_operator.reconcile.decide import Decision
from foveal_operator.reconcile.rivals import Rivals
from foveal_operator.status import gauges
from foveal_operator.status.conditions import (
    Verdict,
    noteworthy,
    previous_conditions,
    reachable,
    route_state,
    scaling_state,
    steady,
    summary,
    to_conditions,
    verdict,
)
from foveal_operator.status.gauges import ColdStarts
from foveal_operator.status.report import plain, report
from foveal_operator.status.verdicts import Observed
from foveal_operator.telemetry.series import Telemetry
from foveal_runtime.plan.budget.types import BudgetPlan

Pods = tuple[Obj, ...]


def _refusal(error: ObjectError | None) -> Verdict | None:
    if error is None:
        return None
    if isinstance(error.cause, NameTaken):
        return verdict("SpecAccepted", False, error.cause.reason, error.cause.message)
    reason = error.cause.reason if isinstance(error.cause, Denied) else reasons.REFUSED
    return verdict("SpecAccepted", False, reason, f"the API server refuses {error}")


def _creation_failure(deployment: Obj | None) -> dict[str, str]:
    """Why a Deployment's pods cannot be created; StatefulSets and Jobs have no such condition."""
    found = condition(deployment or {}, "ReplicaFailure")
    if not deployment or found.get("status") != "True":
        return {}
    return {f"Deployment/{deployment['metadata']['name']}": str(found.get("message") or "")}


class Teller:
    """One per operator. Args: version: the operator's own."""

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        recorder: EventRecorder,
        telemetry: Telemetry,
        clock: Clock,
        rivals: Rivals,
        version: str,
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._recorder = recorder
        self._telemetry = telemetry
        self._clock = clock
        self._rivals = rivals
        self._version = version
        self._cold_starts = ColdStarts()

    async def tell(
        self,
        work: Decision,
        *,
        refused: ObjectError | None = None,
        failure: Verdict | None = None,
    ) -> None:
        """`failure` is what kept the pass from its end; `refused` is an object that the API server
        will not take as long as the resource stays as it is."""
        key = work.key
        route = self._caches.get(BY_NAME["HTTPRoute"], *key)
        route_ready, route_message = route_state(
            route, work.inference.spec.networking.http_route is not None
        )
        scaling, scaling_message = scaling_state(self._autoscalers(work))
        digest, doubt = image_revision(work.inference.spec.model.uri, work.serving_pods)
        deployment = self._caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend")
        observed = Observed(
            now=self._clock.now_text(),
            deployment=deployment,
            stateful_set=self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine"),
            frontend_pods=work.frontend_pods,
            engine_pods=work.engine_pods,
            failed_pods=work.failed_pods,
            reachable=reachable(self._caches.owned(ENDPOINT_SLICE, key), key[1]),
            model=work.model,
            reports=msgspec.structs.replace(
                work.reports,
                measured=steady(work.reports.measured, work.resource),
                refused={**work.reports.refused, **_creation_failure(deployment)},
            ),
            rollout=work.rollout,
            image_digest=digest,
            image_doubt=doubt,
            route_ready=route_ready,
            route_message=route_message,
            scaling=scaling,
            scaling_message=scaling_message,
            rivals=await self._rivals.find(work),
            awaiting=work.awaiting,
            refusal=_refusal(refused),
            failure=failure,
            accepted=self._accepted(*key),
            version=self._version,
        )
        await self._write(work.resource, work.inference, None, work.plan, work.desired, observed)

    def _accepted(self, namespace: str, name: str) -> str:
        """Names another resource whose Service for clients has the name of this one's for engines,
        or the other way round: whichever came first has it, and both are told."""
        text = "the resource is well formed"
        for other in (f"{name}-engine", name.removesuffix("-engine")):
            if other != name and self._caches.identity(INFERENCE, namespace, other):
                text += f"; MultiModalInference {other} needs a Service of the same name"
        return text

    def _autoscalers(self, work: Decision) -> dict[str, Obj | None]:
        """Those that the resource asks for, as they are."""
        return {
            f"{kind} {body['metadata']['name']}": self._caches.get(
                BY_NAME[kind], work.key[0], body["metadata"]["name"]
            )
            for kind in ("HorizontalPodAutoscaler", "ScaledObject")
            for body in work.desired.of_kind(kind)
        }

    async def refuse(self, resource: Obj, error: SpecError, engines: Pods, frontends: Pods) -> None:
        """The spec is wrong: nothing is touched, and what runs is still counted."""
        metadata = resource["metadata"]
        key = (metadata["namespace"], metadata["name"])
        observed = Observed(
            now=self._clock.now_text(),
            deployment=self._caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend"),
            stateful_set=self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine"),
            engine_pods=engines,
            frontend_pods=frontends,
        )
        await self._write(resource, None, error, None, None, observed)

    async def _write(
        self,
        resource: Obj,
        inference: InferenceSpec | None,
        error: SpecError | None,
        plan: BudgetPlan | None,
        desired: Desired | None,
        observed: Observed,
    ) -> None:
        """Status, Events and gauges; the status only when it says something new."""
        metadata = resource["metadata"]
        before = previous_conditions(resource)
        status = report(
            inference, error, plan, desired, observed, metadata.get("generation", 0), before
        )
        gauges.put(self._telemetry, resource, inference, status)
        key = (metadata["namespace"], metadata["name"])
        self._cold_starts.put(self._telemetry, key, "frontend", observed.frontend_pods)
        self._cold_starts.put(self._telemetry, key, "engine", observed.engine_pods)
        await self._store(resource, plain(status))
        await self._announce(resource, status.conditions, before)

    async def fail(self, resource: Obj, failure: Verdict) -> None:
        """Tells what keeps passes from their end; the rest of the status stays as it was."""
        before, now = previous_conditions(resource), self._clock.now_text()
        generation = resource["metadata"].get("generation", 0)
        told = to_conditions(summary([], failure), generation, now, before)
        kept = [c for c in before if c.type not in ("Ready", "Reconciling", "Stalled")]
        gauges.conditions(self._telemetry, resource, (*kept, *told))
        conditions = [plain(one) for one in (*kept, *told)]
        status = resource.get("status", {})
        await self._store(
            resource, {**status, "observedGeneration": generation, "conditions": conditions}
        )
        await self._announce(resource, told, before)

    async def _announce(
        self, resource: Obj, now: tuple[Condition, ...], before: tuple[Condition, ...]
    ) -> None:
        for kind, reason, note in noteworthy(now, before):
            about = note if reasons.BY_NAME[reason].names_object else ""
            await self._recorder.record(resource, kind, reason, note, about)

    async def _store(self, resource: Obj, body: object) -> None:
        metadata = resource["metadata"]
        if body != resource.get("status"):
            try:
                stored = await self._cluster.apply_status(
                    {
                        "apiVersion": INFERENCE.api_version,
                        "kind": INFERENCE.name,
                        # The uid makes this a 409 for a namesake made meanwhile.
                        "metadata": {
                            "name": metadata["name"],
                            "namespace": metadata["namespace"],
                            "uid": metadata["uid"],
                        },
                        "status": body,
                    }
                )
            except NotFound as gone:
                self._caches.drop(
                    INFERENCE, metadata["namespace"], metadata["name"], metadata["uid"]
                )
                raise Conflict(gone.message, gone.status) from gone
            self._caches.put(INFERENCE, stored)

    def forget(self, key: NamespacedName, uid: str) -> None:
        """The resource is gone: so are its series."""
        self._recorder.forget(uid)
        self._rivals.forget(uid)
        self._telemetry.forget_resource(*key)
        self._cold_starts.forget(key)
