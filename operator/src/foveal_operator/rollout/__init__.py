"""Rollout from one revision to the next: one pure decision a reconcile, level-triggered. No I/O.

Called by the reconciler with what it has just read; docs/decisions/rollout.md says why it is so.
The engine revision goes first; frontends that understand it follow when one engine of it is up; a
revision that does not come up in time gives way to the last one that served.
"""

from __future__ import annotations

from typing import Any

import msgspec

from foveal_operator.api import reasons
from foveal_operator.kube.diff import diff
from foveal_operator.kube.errors import denial
from foveal_operator.kube.kinds import CONFIG_MAP
from foveal_operator.kube.types import Obj, ObjectKey
from foveal_operator.manifests.workloads import live_replicas
from foveal_operator.rollout.record import (
    Good,
    Record,
    State,
    advance,
    begin,
    read_record,
    record_body,
    seconds_left,
)
from foveal_operator.rollout.steps import (
    OUTAGE,
    UNSCHEDULABLE_SECONDS,
    choose,
    chooses_by_devices,
    engine_step,
    frontend_body,
    is_held,
)
from foveal_operator.rollout.view import (
    Body,
    Pods,
    RolloutDecision,
    RolloutView,
    objects_in_use,
    read_pods,
    record_name,
    takes_no_more,
    template_revision,
)

__all__ = [
    "RolloutDecision",
    "RolloutView",
    "decide",
    "needs_devices",
    "objects_in_use",
    "read_record",
    "record_name",
]

CHECK_SECONDS = 5.0
"""Sessions are asked for, not watched: while a rollout runs, look again so often."""
ANNOUNCE_SECONDS = 1.0
IDLE_SECONDS = 300.0


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass aims at: the wanted revision, or the last good one."""

    stateful_set: Body
    deployment: Body
    num_engines: int
    num_frontends: int
    rolled_back: bool

    @property
    def engine_revision(self) -> str:
        return template_revision(self.stateful_set)

    @property
    def frontend_revision(self) -> str:
        return template_revision(self.deployment)


def needs_devices(view: RolloutView) -> bool:
    """Whether `decide` goes by the number of free devices in this pass: counting them is dear."""
    if view.stateful_set is None or view.deployment is None or view.inference.spec.paused:
        return False
    record = read_record(view.record)
    state = _begun(view, record)
    target = _target(view, view.stateful_set, view.deployment, state, record.good)
    pods = read_pods(view, target.num_frontends)
    return chooses_by_devices(state, view.inference, pods, target.engine_revision)


def decide(view: RolloutView) -> RolloutDecision:
    """The next step of a rollout; the same view gives the same decision."""
    record = read_record(view.record)
    wanted_engines, wanted_frontends = view.stateful_set, view.deployment
    if wanted_engines is None or wanted_frontends is None or view.inference.spec.paused:
        return RolloutDecision(
            strategy=record.state.text,
            message="paused: every object stays as it is" if view.inference.spec.paused else "",
            deadline_exceeded=record.state.failed,
            keep=_kept(view, record, ()),
        )
    state = _begun(view, record)
    if _can_roll_back(view, state, record.good):
        # Its deadline waits for no node: a mistyped selector would leave the resource between two
        # revisions forever, and there is one to go back to.
        view = msgspec.structs.replace(view, awaiting=frozenset())
    target = _target(view, wanted_engines, wanted_frontends, state, record.good)
    pods = read_pods(view, target.num_frontends)
    is_complete = _is_complete(view, target, pods)
    state = _next_state(view, state, target, pods, is_complete)
    if not target.rolled_back and state.failed:
        # The deadline has just passed: turn round in this very pass.
        target = _target(view, wanted_engines, wanted_frontends, state, record.good)
        is_complete = _is_complete(view, target, pods)
    good = record.good
    if is_complete and not target.rolled_back and target.num_engines and target.num_frontends:
        good = _remembered(good, state.revision, target)
    return _decision(view, target, pods, Record(state=state, good=good), record, is_complete)


def _begun(view: RolloutView, record: Record) -> State:
    revision = f"{template_revision(view.stateful_set)}/{template_revision(view.deployment)}"
    inference = view.inference
    deadline = inference.spec.rollout.progress_deadline_seconds
    return begin(record.state, revision, inference.generation, view.now, deadline)


def _can_roll_back(view: RolloutView, state: State, good: Good | None) -> bool:
    allowed = view.inference.spec.rollout.auto_rollback
    return allowed and good is not None and good.revision != state.revision


def _target(
    view: RolloutView, engines: Obj, frontends: Obj, state: State, good: Good | None
) -> _Target:
    stateful_set, num_engines = _with_replicas(
        engines, view.live_stateful_set, view.inference.spec.engine.autoscaling is not None
    )
    deployment, num_frontends = _with_replicas(
        frontends, view.live_deployment, view.inference.spec.frontend.autoscaling is not None
    )
    rolled_back = state.failed and _can_roll_back(view, state, good)
    if rolled_back:
        assert good is not None
        stateful_set["spec"]["template"] = good.engine
        deployment["spec"]["template"] = good.frontend
    return _Target(
        stateful_set=stateful_set,
        deployment=deployment,
        num_engines=num_engines,
        num_frontends=num_frontends,
        rolled_back=rolled_back,
    )


def _with_replicas(wanted: Obj, live: Obj | None, is_scaled: bool) -> tuple[Body, int]:
    """A copy of the body, and its replicas. Until an autoscaler owns them the live value is applied
    on condition that it still is the live value, so that no scaling is ever undone. But none at all
    stay that way forever: an autoscaler takes 0 as switched off. It begins with what is wanted."""
    body: Body = {**wanted, "spec": {**wanted["spec"]}}
    found = live_replicas(live)
    if "replicas" not in body["spec"]:
        return body, found or 0
    if is_scaled and live is not None and found:
        body["spec"]["replicas"] = found
        version = live["metadata"].get("resourceVersion")
        if version:
            body["metadata"] = {**body["metadata"], "resourceVersion": version}
    return body, body["spec"]["replicas"]


def _next_state(
    view: RolloutView, state: State, target: _Target, pods: Pods, is_complete: bool
) -> State:
    state = choose(
        state,
        view.inference,
        pods,
        target.engine_revision,
        target.num_engines,
        view.free_devices,
        has_no_room=_has_no_room(view, state, target),
    )
    if target.rolled_back:
        return state
    return advance(
        state,
        (*pods.engines, *pods.frontends),
        (target.engine_revision, target.frontend_revision),
        is_complete=is_complete,
        is_off=not (target.num_engines and target.num_frontends),
        now=view.now,
        deadline_seconds=view.inference.spec.rollout.progress_deadline_seconds,
    )


def _has_no_room(view: RolloutView, state: State, target: _Target) -> bool:
    """For a minute a quota has refused an engine above those asked for, and it has room for one in
    the place of any that is there."""
    live = view.live_stateful_set
    if live is None or template_revision(live) != target.engine_revision:
        return False
    return (
        view.now - state.since_seconds > UNSCHEDULABLE_SECONDS
        and (live_replicas(live) or 0) > target.num_engines
        and "exceeded quota" in view.refused
        and denial(view.refused) is reasons.QUOTA_EXCEEDED
        and all(takes_no_more(live["spec"]["template"], pod) for pod in view.engine_pods)
    )


def _is_complete(view: RolloutView, target: _Target, pods: Pods) -> bool:
    """Every pod that is asked for serves, at the target's revision, and no other is left."""
    engines, frontends = target.engine_revision, target.frontend_revision
    if view.live_stateful_set is None or view.live_deployment is None:
        return False
    serving = [p for p in pods.engines if p.revision == engines and p.serves]
    ready = [p for p in pods.frontends if p.revision == frontends and p.serves]
    return (
        len(serving) == len(pods.engines) == target.num_engines
        and len(ready) >= target.num_frontends
        and all(p.revision == frontends for p in pods.frontends)
        and template_revision(view.live_stateful_set) == engines
        and template_revision(view.live_deployment) == frontends
        and live_replicas(view.live_stateful_set) == target.num_engines
        and not is_held(view.live_deployment)
    )


def _remembered(good: Good | None, revision: str, target: _Target) -> Good:
    if good is not None and good.revision == revision:
        return good
    return Good(
        revision=revision,
        engine=target.stateful_set["spec"]["template"],
        frontend=target.deployment["spec"]["template"],
    )


def _decision(
    view: RolloutView,
    target: _Target,
    pods: Pods,
    record: Record,
    before: Record,
    is_complete: bool,
) -> RolloutDecision:
    state, rollout = record.state, view.inference.spec.rollout
    live = view.live_stateful_set
    num_applied = live_replicas(live)
    step = engine_step(
        pods.engines,
        target.engine_revision,
        num_engines=target.num_engines,
        num_applied=target.num_engines if num_applied is None else num_applied,
        strategy=state.strategy,
        num_surge=state.num_surge,
        max_unavailable=rollout.max_unavailable,
    )
    if "replicas" in target.stateful_set["spec"]:
        target.stateful_set["spec"]["replicas"] = step.replicas
    is_announced = not state.why.endswith(OUTAGE) or view.announced == state.text
    delete = step.delete if _has_seen_template(live, target.engine_revision) else ()
    if not is_announced:
        delete = tuple(pod for pod in delete if not pod.serves)
    check, everyone = None, (*pods.engines, *pods.frontends)
    if not is_complete:
        # Where there is no pod there is none to ask; that one has come, the watch tells.
        check = CHECK_SECONDS if everyone else IDLE_SECONDS
        if not is_announced:
            check = ANNOUNCE_SECONDS
        if not state.failed and not state.idle:
            revisions = (target.engine_revision, target.frontend_revision)
            left = seconds_left(
                state, everyone, revisions, view.now, rollout.progress_deadline_seconds
            )
            check = max(ANNOUNCE_SECONDS, min(check, left))
    body = record_body(record, view.inference.name, target.stateful_set)
    is_as_left = not diff({**body, "data": {}}, view.record)
    return RolloutDecision(
        record=None if is_as_left and record == before else body,
        stateful_set=target.stateful_set,
        deployment=frontend_body(
            target.deployment,
            view.live_deployment,
            pods,
            target.num_frontends,
            target.num_engines,
        ),
        delete_pods=tuple((pod.name, pod.uid) for pod in delete),
        strategy=state.text,
        message=_message(target, pods, record, is_complete),
        in_progress=not is_complete,
        deadline_exceeded=state.failed,
        rolled_back=target.rolled_back,
        keep=_kept(view, record, (target.stateful_set, target.deployment)),
        next_check_seconds=check,
    )


def _has_seen_template(live: Obj | None, revision: str) -> bool:
    """The StatefulSet's controller knows the template: what it makes now is of that revision."""
    if live is None or template_revision(live) != revision:
        return False
    seen = live.get("status", {}).get("observedGeneration", 0)
    return bool(seen >= live["metadata"].get("generation", 0))


def _message(target: _Target, pods: Pods, record: Record, is_complete: bool) -> str:
    state = record.state
    new = sum(1 for p in pods.engines if p.revision == target.engine_revision and p.serves)
    old = sum(1 for p in pods.engines if p.revision != target.engine_revision)
    engines = f"{new} engines of it serve, {target.num_engines} are asked for"
    if old:
        engines += f", {old} of another revision are left"
    if target.rolled_back:
        where = "done" if is_complete else engines
        return (
            f"revision {state.revision} did not serve in time, so the last good revision is back "
            f"({where}); correct the change, or raise rollout.progressDeadlineSeconds (now "
            f"{state.deadline_seconds:.0f}), to try again"
        )
    if is_complete:
        return ""
    text = f"rolling to revision {state.revision}: {engines}"
    if old and state.strategy == "OnDelete":
        names = [p.name for p in pods.engines if p.revision != target.engine_revision]
        text += f"; delete {', '.join(sorted(names)[:8])} when it suits you"
    elif old and state.why:
        text += f"; {state.why}"
    return text


def _kept(view: RolloutView, record: Record, bodies: tuple[Obj, ...]) -> frozenset[ObjectKey]:
    """What something refers to or may refer to again."""
    templates: list[Any] = [body["spec"]["template"] for body in bodies]
    for live in (view.live_stateful_set, view.live_deployment):
        if live is not None:
            templates.append(live["spec"]["template"])
    if record.good is not None:
        templates += [record.good.engine, record.good.frontend]
    found = objects_in_use((*templates, *view.engine_pods, *view.frontend_pods))
    return frozenset({*found, (CONFIG_MAP.name, record_name(view.inference.name))})
