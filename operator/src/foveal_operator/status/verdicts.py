"""The conditions of a resource, each from what was observed.

Called by report.py. A verdict is a pure function of objects, plan and time. `Ready` is True only
when every replica of the *current* revision serves.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec, SpecError
from foveal_operator.api.status import Condition, RoleStatus
from foveal_operator.common.clock import seconds
from foveal_operator.common.versions import is_too_old
from foveal_operator.kube.errors import denial
from foveal_operator.kube.types import Obj, label_of
from foveal_operator.manifests import Desired
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.model.flow import ModelDecision
from foveal_operator.pods.diagnose import (
    NEW_SECONDS,
    diagnose,
    is_made_up_for,
    is_overdue,
    is_ready,
    ready_within,
)
from foveal_operator.pods.metrics import PodReports
from foveal_operator.rollout import RolloutDecision
from foveal_operator.status.conditions import Verdict, selector_text, summary, verdict
from foveal_runtime.plan.budget.types import BudgetPlan

SETTLE_SECONDS = 4.0
"""A frontend counts towards Ready so long after it has become ready, in whole seconds: its address
reaches the EndpointSlices within one, then each node writes its rules, and a connection that is
opened while a node writes them may never be answered."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What the reconciler saw, raw. Absent objects are None or empty.

    Attributes:
        now: RFC 3339 time of this pass.
        failed_pods: engines and frontends that have ended; in no other tuple.
        image_digest, image_doubt: of a model in an image; what is not known of it.
        reachable: frontends that the Service sends requests to; None = the cluster does not say.
        route_ready: None when no route is asked for.
        scaling, scaling_message: True, False or Unknown, and why; "" = nothing is autoscaled.
        rivals: autoscalers made by hand that the operator works against, in words.
        awaiting: pods that no node is meant for yet.
        accepted, refusal: what to say of a good spec; an object that cannot be written, and why.
        failure: what keeps every pass from its end.
        version: the operator's; "" = not known.
    """

    now: str
    deployment: Obj | None = None
    stateful_set: Obj | None = None
    frontend_pods: tuple[Obj, ...] = ()
    engine_pods: tuple[Obj, ...] = ()
    failed_pods: tuple[Obj, ...] = ()
    model: ModelDecision = ModelDecision()
    reports: PodReports = PodReports()
    rollout: RolloutDecision = RolloutDecision()
    image_digest: str = ""
    image_doubt: str = ""
    reachable: int | None = None
    route_ready: bool | None = None
    route_message: str = ""
    scaling: str = ""
    scaling_message: str = ""
    rivals: str = ""
    awaiting: frozenset[str] = frozenset()
    accepted: str = "the resource is well formed"
    refusal: Verdict | None = None
    failure: Verdict | None = None
    version: str = ""


def verdicts(
    inference: InferenceSpec | None,
    error: SpecError | None,
    plan: BudgetPlan | None,
    desired: Desired | None,
    observed: Observed,
    frontend: RoleStatus,
    engine: RoleStatus,
    previous: tuple[Condition, ...],
) -> list[Verdict]:
    """One for each condition, the summary (Ready, Reconciling, Stalled) last."""
    found = [_spec_accepted(error, desired, observed)]
    if inference is not None:
        found += [_budget_fits(plan), _model_ready(observed)]
        found += [
            _role_ready("EnginesReady", engine, observed.engine_pods, desired, observed),
            _role_ready("FrontendsReady", frontend, observed.frontend_pods, desired, observed),
            _mirrored(observed),
        ]
        if observed.route_ready is not None:
            reason = reasons.ROUTED if observed.route_ready else reasons.ROUTE_PENDING
            text = observed.route_message or "the gateway has taken the route"
            found.append(verdict("RouteReady", observed.route_ready, reason, text))
        if observed.scaling or observed.rivals:
            found.append(_scaling_active(observed))
    return [
        *found,
        _available(frontend, engine, previous),
        *summary(
            found,
            observed.failure,
            is_paused=inference is not None and inference.spec.paused,
            deadline_exceeded=observed.rollout.deadline_exceeded,
            rollout_message=observed.rollout.message,
        ),
    ]


def _spec_accepted(error: SpecError | None, desired: Desired | None, observed: Observed) -> Verdict:
    if error is not None:
        return verdict("SpecAccepted", False, reasons.INVALID_SPEC, str(error))
    if observed.refusal is not None:
        return observed.refusal
    if desired is not None and desired.missing_apis:
        names = ", ".join(desired.missing_apis)
        return verdict(
            "SpecAccepted", False, reasons.MISSING_API, f"the cluster does not serve {names}"
        )
    return verdict("SpecAccepted", True, reasons.ACCEPTED, observed.accepted)


def _budget_fits(plan: BudgetPlan | None) -> Verdict:
    if plan is None:
        text = "waiting for the model's profile"
        return Verdict("BudgetFits", "Unknown", reasons.PROFILING, text)
    if not plan.fits:
        text = " ".join(problem.message for problem in plan.problems)
        return verdict("BudgetFits", False, reasons.BUDGET_MISFIT, text)
    if plan.shrunk:
        text = f"onMisfit Shrink reduced caches: {'; '.join(plan.shrunk)}"
        return verdict("BudgetFits", True, reasons.SHRUNK, text)
    return verdict("BudgetFits", True, reasons.FITS, "; ".join(plan.notes) or "every limit holds")


def _model_ready(observed: Observed) -> Verdict:
    model = observed.model
    ok = model.reason is reasons.RESOLVED
    text = model.message or ("the model is in place" if ok else "waiting for the model")
    if ok and observed.image_doubt:
        text = f"{text}; {observed.image_doubt}"
    return verdict("ModelReady", ok, model.reason, text)


def role_status(
    workload: Obj | None, pods: tuple[Obj, ...], desired: Desired | None, kind: str
) -> RoleStatus:
    """Counts from pods, so that they never lag behind them."""
    revision = wanted_revision(desired, kind)
    live = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    ready = [pod for pod in live if is_ready(pod)]
    asked = _applied(workload)
    for body in desired.of_kind(kind) if desired else ():
        asked = body["spec"].get("replicas", asked)
    return RoleStatus(
        workload=f"{kind}/{workload['metadata']['name']}" if workload else "",
        desired=asked,
        replicas=len(live),
        updated=sum(1 for pod in live if label_of(pod, REVISION_LABEL) == revision and revision),
        ready=len(ready),
        available=len(ready),
        draining=len(pods) - len(live),
        selector=selector_text(workload),
    )


def _applied(workload: Obj | None) -> int:
    """Replicas that the workload has now: more than are asked for while a rollout surges."""
    return int(workload.get("spec", {}).get("replicas", 1)) if workload else 0


def wanted_revision(desired: Desired | None, kind: str) -> str:
    for body in desired.of_kind(kind) if desired else ():
        return str(body["spec"]["template"]["metadata"]["labels"][REVISION_LABEL])
    return ""


def _role_ready(
    condition: str,
    role: RoleStatus,
    pods: tuple[Obj, ...],
    desired: Desired | None,
    observed: Observed,
) -> Verdict:
    kind = "StatefulSet" if condition == "EnginesReady" else "Deployment"
    revision = wanted_revision(desired, kind)
    if not revision:
        return verdict(condition, False, reasons.WAITING, "no pods are asked for yet")
    current = [pod for pod in pods if label_of(pod, REVISION_LABEL) == revision]
    ready = sum(1 for pod in current if is_ready(pod))
    if role.desired == 0:
        return verdict(condition, True, reasons.SCALED_TO_ZERO, "no replicas are asked for")
    # An engine above those asked for takes one's place until all are new: that one comes again.
    surges = kind == "StatefulSet" and _applied(observed.stateful_set) > role.desired
    if ready >= role.desired and role.replicas == ready and not surges:
        reached = observed.reachable if kind == "Deployment" else None
        if reached is not None and reached < ready:
            text = f"{ready} of {role.desired} serve, and the Service reaches {reached} of them"
            return verdict(condition, False, reasons.STARTING, text)
        if reached is not None and _num_new(current, SETTLE_SECONDS, observed):
            text = f"{ready} of {role.desired} serve, and nodes are just being told of the last"
            return verdict(condition, False, reasons.STARTING, text)
        text = f"{ready} of {role.desired} serve"
        if old := _too_old(current, observed):
            return verdict(condition, True, reasons.VERSION_SKEW, f"{text}; {old}")
        return verdict(condition, True, reasons.SERVING, text)
    ended = [pod for pod in observed.failed_pods if label_of(pod, REVISION_LABEL) == revision]
    told = [*current, *(pod for pod in ended if not is_made_up_for(pod, current))]
    # An engine's name is free only when the one before has gone, whichever revision it is of.
    now = seconds(observed.now) if kind == "StatefulSet" else 0.0
    told += [pod for pod in pods if is_overdue(pod, now)]
    failure = diagnose(told, observed.reports.waits, observed.awaiting, now)
    if failure:
        return verdict(condition, False, failure.reason, failure.message)
    if refused := observed.reports.refused.get(role.workload):
        return verdict(condition, False, denial(refused), refused)
    paused = _paused(observed.deployment) if kind == "Deployment" else ""
    if surges or role.ready > ready or role.replicas > role.updated:
        text = f"{ready} of {role.desired} of the new revision serve, {role.ready} in all{paused}"
        return verdict(condition, False, reasons.ROLLING, text)
    return verdict(condition, False, reasons.STARTING, f"{ready} of {role.desired} serve{paused}")


def _too_old(pods: Iterable[Obj], observed: Observed) -> str:
    """Names pods that this operator is not tested with; "" where there are none."""
    names = sorted(pod["metadata"]["name"] for pod in pods)
    found = {name: observed.reports.versions.get(name, "") for name in names}
    old = [f"{n} ({v})" for n, v in found.items() if is_too_old(v, observed.version)]
    behind = f"more than one minor release behind the operator ({observed.version})"
    return f"{behind}: {', '.join(old[:8])}" if old else ""


def _paused(deployment: Obj | None) -> str:
    """What `kubectl rollout pause` leaves behind: no pod and no condition of pods tells of it."""
    if deployment is None or not deployment.get("spec", {}).get("paused"):
        return ""
    name = deployment["metadata"]["name"]
    return f"; Deployment {name} is paused: resume it, kubectl rollout resume deployment/{name}"


def _num_new(pods: Iterable[Obj], period: float, observed: Observed) -> int:
    return sum(ready_within(pod, period, seconds(observed.now)) for pod in pods)


def _mirrored(observed: Observed) -> Verdict:
    """The sessions of a new frontend are waited for: Ready would be true, and false again with its
    first answer. Later, what cannot be asked does not hold back Ready."""
    reports = observed.reports
    up, wanted = reports.sessions_up, reports.sessions_wanted
    mute = [pod for pod in observed.frontend_pods if pod["metadata"]["name"] in reports.silent]
    if silent := _num_new(mute, NEW_SECONDS, observed):
        text = f"new frontends that have not reported their sessions yet: {silent}"
        return verdict("CachesMirrored", False, reasons.WAITING, text)
    if wanted < 0:
        text = "no session has been reported yet"
        return Verdict("CachesMirrored", "Unknown", reasons.WAITING, text)
    if up < wanted:
        text = f"{up} of {wanted} sessions between frontends and engines are up"
        return verdict("CachesMirrored", False, reasons.SESSION_DOWN, text)
    if reports.stale_rate > 1e-3:
        text = f"{reports.stale_rate:.4f} of the cache hints are stale"
        return verdict("CachesMirrored", False, reasons.STALE_HINTS, text)
    return verdict("CachesMirrored", True, reasons.MIRRORED, f"all {wanted} sessions are up")


def _scaling_active(observed: Observed) -> Verdict:
    if observed.rivals:
        return verdict("ScalingActive", False, reasons.FOREIGN_AUTOSCALER, observed.rivals)
    found = {
        "True": reasons.SCALING, "False": reasons.AUTOSCALER_INERT, "Unknown": reasons.WAITING,
    }  # fmt: skip
    reason = found[observed.scaling]
    return Verdict("ScalingActive", observed.scaling, reason, observed.scaling_message)


_NOT_YET = (reasons.STARTING.name, reasons.SCALED_TO_ZERO.name)


def _available(
    frontend: RoleStatus, engine: RoleStatus, previous: tuple[Condition, ...]
) -> Verdict:
    """Starting is what has never served, or was scaled to zero: nobody misses it."""
    before = next((one.reason for one in previous if one.type == "Available"), _NOT_YET[0])
    if frontend.ready > 0 and engine.ready > 0:
        reason = reasons.AVAILABLE
    elif any(role.workload and role.desired == 0 for role in (frontend, engine)):
        reason = reasons.SCALED_TO_ZERO
    else:
        reason = reasons.STARTING if before in _NOT_YET else reasons.UNAVAILABLE
    text = f"{_count(frontend.ready, 'frontend')} and {_count(engine.ready, 'engine')} serve"
    return verdict("Available", reason is reasons.AVAILABLE, reason, text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
