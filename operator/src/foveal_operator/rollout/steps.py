"""The next step of a rollout: engine pods to delete, and the frontend Deployment to apply. Pure.

Engines: the strategy is chosen once per rollout, from devices and settings. The StatefulSet is
OnDelete: it makes pods from the template it has, and only a deleted pod changes. So a rollout is a
choice of pods to delete, and a rollback is the same with another template.

Frontends talk only to engines of their session group. When the group changes, old ones are needed
as long as old engines serve, and new ones are of no use before a new engine is up. One Deployment
can hold both: with minReadySeconds beyond any rollout new pods never count as available, so
maxUnavailable says exactly how many old pods go and maxSurge how many new ones come.
"""

from __future__ import annotations

from typing import Any

import msgspec

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.kube.types import Obj
from foveal_operator.rollout.record import State
from foveal_operator.rollout.view import Body, Pod, Pods, template_group

UNSCHEDULABLE_SECONDS = 60.0
"""An extra engine that nothing takes for so long shows that the spare device is not to be had."""
OUTAGE = "nothing serves until the new engine has loaded"


class EngineStep(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with engines."""

    replicas: int
    delete: tuple[Pod, ...] = ()


def engine_step(
    engines: tuple[Pod, ...],
    revision: str,
    *,
    num_engines: int,
    num_applied: int,
    strategy: str,
    num_surge: int,
    max_unavailable: int,
) -> EngineStep:
    """The next step towards `num_engines` serving engines of `revision`.

    Args:
        num_applied: spec.replicas of the live StatefulSet.
    """
    live = [pod for pod in engines if not pod.is_terminating and pod.ordinal < num_applied]
    old = [pod for pod in live if pod.revision != revision]
    new = [pod for pod in live if pod.revision == revision and pod.serves]
    replicas = num_engines
    if strategy == "Surge" and num_engines > 0:
        has_old = any(pod.ordinal < num_engines for pod in old)
        num_new = sum(1 for pod in new if pod.ordinal < num_engines)
        surged = num_applied > num_engines and num_new < num_engines
        if has_old or surged:
            replicas = num_engines + num_surge
    if strategy in ("", "OnDelete") or not old:
        return EngineStep(replicas=replicas)
    # Neither an untouched old engine nor a serving new one: on its way, or stuck.
    num_in_flight = num_applied - len(old) - len(new)
    num_serving = len(new) + sum(1 for pod in old if pod.serves)
    if num_serving == 0 and any(pod.is_hopeless for pod in old):
        # No service to protect: what can never serve need not go one by one.
        hopeless = tuple(pod for pod in old if pod.is_hopeless)
        return EngineStep(replicas=replicas, delete=hopeless)
    if strategy == "Surge":
        slots, floor = num_surge - num_in_flight, num_engines
    else:
        slots, floor = max_unavailable - num_in_flight, num_engines - max_unavailable
    chosen: list[Pod] = []
    for pod in _order(old, num_engines):
        if len(chosen) >= slots:
            break
        if pod.serves:
            if num_serving - 1 < floor:
                break
            num_serving -= 1
        chosen.append(pod)
    return EngineStep(replicas=replicas, delete=tuple(chosen))


def _order(old: list[Pod], num_engines: int) -> list[Pod]:
    """Those that serve nothing first, then idle ones. An extra engine that serves goes last, by
    the number of replicas."""
    found = [pod for pod in old if pod.ordinal < num_engines or not pod.serves]
    return sorted(found, key=lambda pod: (pod.serves, pod.load, -pod.ordinal))


def asked(inference: InferenceSpec) -> str:
    """What of the resource the choice rests on, apart from devices."""
    rollout = inference.spec.rollout
    scaled = "autoscaled" if inference.spec.engine.autoscaling else ""
    return f"{rollout.strategy} {rollout.max_surge} {rollout.max_unavailable} {scaled}".strip()


def chooses_by_devices(
    state: State, inference: InferenceSpec, pods: Pods, engine_revision: str
) -> bool:
    """Whether `choose` goes by the number of free devices."""
    spec = inference.spec
    if spec.rollout.strategy != "Auto" or spec.engine.autoscaling:
        return False
    is_chosen = state.strategy and state.asked == asked(inference)
    return not is_chosen and any(pod.revision != engine_revision for pod in pods.engines)


def choose(
    state: State,
    inference: InferenceSpec,
    pods: Pods,
    engine_revision: str,
    num_engines: int,
    free_devices: int | None,
    *,
    has_no_room: bool = False,
) -> State:
    """`state` with a strategy, once an engine of another revision is there to be replaced.

    A choice is kept for the whole rollout: the extra engine itself takes the device that spoke for
    it. Only when no node, queue or quota takes that engine, Auto goes on without it.

    Args:
        has_no_room: a quota refuses another engine, and will not refuse one in the place of an old
            one.
    """
    wish = asked(inference)
    if state.strategy and state.asked == wish:
        why = _why_no_surge(state, inference, pods, num_engines, has_no_room)
        if not why:
            return state
        return _chosen(state, inference, wish, "FreeFirst", why, num_engines, 0)
    if all(pod.revision == engine_revision for pod in pods.engines):
        return msgspec.structs.replace(state, asked="", strategy="", why="", num_surge=0)
    kind, why, num_surge = _kind(inference, free_devices)
    return _chosen(state, inference, wish, kind, why, num_engines, num_surge)


def _kind(inference: InferenceSpec, free_devices: int | None) -> tuple[str, str, int]:
    """(strategy, why, extra engines)."""
    rollout, count = inference.spec.rollout, inference.spec.engine.num_devices
    if rollout.strategy == "OnDelete":
        return "OnDelete", "engines are replaced when you delete their pods", 0
    if rollout.strategy == "FreeFirst":
        return "FreeFirst", "as asked for", 0
    if inference.spec.engine.autoscaling:
        return "FreeFirst", "the autoscaler owns the number of engines", 0
    if rollout.strategy == "Surge":
        return "Surge", "as asked for, new engines start before old ones stop", rollout.max_surge
    if free_devices is None:
        return "FreeFirst", "no spare device is known", 0
    if free_devices < count:
        return "FreeFirst", "there is no spare device", 0
    num_surge = min(rollout.max_surge, free_devices // count)
    return "Surge", "a device is free, so new engines start before old ones stop", num_surge


def _chosen(
    state: State,
    inference: InferenceSpec,
    wish: str,
    kind: str,
    why: str,
    num_engines: int,
    num_surge: int,
) -> State:
    limit = inference.spec.rollout.max_unavailable
    if kind == "FreeFirst":
        if num_engines <= limit:
            each = "the only engine stops" if num_engines == 1 else "all engines stop"
            why = f"{why}; {each} first, {OUTAGE}"
        else:
            why = f"{why}; at most {limit} of the engines is down at a time"
    return msgspec.structs.replace(state, asked=wish, strategy=kind, why=why, num_surge=num_surge)


def _why_no_surge(
    state: State, inference: InferenceSpec, pods: Pods, num_engines: int, has_no_room: bool
) -> str:
    """Why Auto does not wait for the extra engine any longer; "" while it does."""
    if state.strategy != "Surge" or inference.spec.rollout.strategy != "Auto":
        return ""
    extra = [pod for pod in pods.engines if pod.ordinal >= num_engines]
    late = [pod for pod in extra if pod.age_seconds > UNSCHEDULABLE_SECONDS]
    if any(pod.is_unschedulable for pod in late):
        return "the spare device was taken"
    if any(pod.is_queued for pod in late):
        return "the queue admits no other engine"
    return "the quota has no room for another engine" if has_no_room and not extra else ""


HOLD_SECONDS = 30 * 24 * 3600


def is_held(deployment: Obj | None) -> bool:
    """Old and new pods stand side by side on purpose."""
    spec = (deployment or {}).get("spec", {})
    return int(spec.get("minReadySeconds", 0)) >= HOLD_SECONDS


def frontend_body(
    body: Body, live: Obj | None, pods: Pods, num_frontends: int, num_engines: int
) -> Body | None:
    """The Deployment to apply now; None = leave the live one as it is. What is held back follows
    from the live one and its pods, and is applied only if that is still the live one: a replica
    that took over with an old view brought the old template back, and restarted every frontend.

    Args:
        body: the Deployment with the template that is aimed at.
        num_engines: asked for. With none, no engine of the new group will ever come up to wait for.
    """
    group = template_group(body)
    strangers = any(pod.group != group for pod in (*pods.engines, *pods.frontends))
    if live is None or num_frontends == 0 or not strangers:
        return body
    # An engine that drains still streams: its frontends stay.
    old = sum(1 for e in pods.engines if e.group != group and (e.serves or e.is_terminating))
    new = sum(1 for e in pods.engines if e.group == group and e.is_ready)
    if new and old:
        return _on_live(_held(body, pods, num_frontends, new, old), live)
    if new or (not old and (template_group(live) == group or not num_engines)):
        return body
    if is_held(live) or template_group(live) == group:
        return None
    held = {**body, "spec": {**body["spec"], "template": live["spec"]["template"]}}
    return _on_live(held, live)


def _on_live(body: Body, live: Obj) -> Body:
    """Refused with a conflict unless the live one is the one that was looked at."""
    version = live["metadata"].get("resourceVersion")
    if not version:
        return body
    return {**body, "metadata": {**body["metadata"], "resourceVersion": version}}


def _held(body: Body, pods: Pods, num_frontends: int, new: int, old: int) -> Body:
    """Frontends of both groups in the ratio of their engines; none goes before its successor."""
    num_new = -(-num_frontends * new // (new + old))
    group = template_group(body)
    ready = sum(1 for pod in pods.frontends if pod.group == group and pod.is_ready)
    num_old = max(-(-num_frontends * old // (new + old)), num_frontends - ready)
    rolling: dict[str, Any] = {
        "maxSurge": num_new + num_old - num_frontends,
        "maxUnavailable": num_frontends - num_old,
    }
    spec = {
        **body["spec"],
        "minReadySeconds": HOLD_SECONDS,
        "progressDeadlineSeconds": HOLD_SECONDS + body["spec"]["progressDeadlineSeconds"],
        "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
    }
    return {**body, "spec": spec}
