"""Strategy of engine replacement, chosen once per rollout from devices and settings. Pure."""

from __future__ import annotations

import msgspec

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.rollout.pods import Pods
from foveal_operator.rollout.record import State

UNSCHEDULABLE_SECONDS = 60.0
"""An extra engine that no node takes for so long shows that the spare device is gone."""
OUTAGE = "nothing serves until the new engine has loaded"


def asked(inference: InferenceSpec) -> str:
    """What of the resource the choice rests on, apart from devices."""
    rollout = inference.spec.rollout
    scaled = "autoscaled" if inference.spec.engine.autoscaling else ""
    return f"{rollout.strategy} {rollout.max_surge} {rollout.max_unavailable} {scaled}".strip()


def choose(
    state: State,
    inference: InferenceSpec,
    pods: Pods,
    engine_revision: str,
    num_engines: int,
    free_devices: int | None,
) -> State:
    """`state` with a strategy, once an engine of another revision is there to be replaced.

    A choice is kept for the whole rollout: the extra engine itself takes the device that spoke for
    it. Only when no node takes that engine, Auto goes on without it.
    """
    wish = asked(inference)
    if state.strategy and state.asked == wish:
        if not _is_surge_stuck(state, inference, pods, num_engines):
            return state
        kind, why = "FreeFirst", "the spare device was taken"
        return _chosen(state, inference, wish, kind, why, num_engines, 0)
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


def _is_surge_stuck(state: State, inference: InferenceSpec, pods: Pods, num_engines: int) -> bool:
    if state.strategy != "Surge" or inference.spec.rollout.strategy != "Auto":
        return False
    return any(
        pod.ordinal >= num_engines
        and pod.is_unschedulable
        and pod.age_seconds > UNSCHEDULABLE_SECONDS
        for pod in pods.engines
    )
