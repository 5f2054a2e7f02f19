"""Progress and deadline of a rollout. Pure."""

from __future__ import annotations

import math

import msgspec

from foveal_operator.rollout.pods import Pod
from foveal_operator.rollout.record import State


def begin(state: State, revision: str, generation: int, now: float) -> State:
    """The state of the rollout to `revision`: the present one, or a new one. An edit of the
    resource starts the clock of an unfinished rollout again."""
    if state.revision != revision:
        return State(revision=revision, generation=generation, since_seconds=now)
    if state.generation != generation and not state.done and not state.failed:
        return msgspec.structs.replace(state, generation=generation, since_seconds=now)
    return state


def advance(
    state: State,
    pods: tuple[Pod, ...],
    revisions: tuple[str, str],
    *,
    is_complete: bool,
    now: float,
    deadline_seconds: float,
) -> State:
    """`state` with what has been reached; `failed` once nothing more was for the deadline.

    Args:
        revisions: of engines and frontends, as asked for.
        is_complete: everything asked for serves.
    """
    if is_complete:
        return msgspec.structs.replace(state, done=True, failed=False)
    if state.done or state.failed:
        return state
    mine = [pod for pod in pods if pod.revision in revisions and not pod.is_terminating]
    num_serving = sum(1 for pod in mine if pod.serves)
    if num_serving > state.num_serving:
        state = msgspec.structs.replace(state, num_serving=num_serving, since_seconds=now)
    if seconds_left(state, pods, revisions, now, deadline_seconds) <= 0:
        return msgspec.structs.replace(state, failed=True)
    return state


def seconds_left(
    state: State,
    pods: tuple[Pod, ...],
    revisions: tuple[str, str],
    now: float,
    deadline_seconds: float,
) -> float:
    """Until the rollout has failed if nothing happens."""
    since = state.since_seconds
    waiting = [p for p in pods if p.revision in revisions and not p.serves]
    since = max(since, now - min((p.admitted_seconds for p in waiting), default=math.inf))
    if state.strategy == "OnDelete":
        # The user decides when a pod begins to change: its own age counts.
        since = max(since, now - min((p.age_seconds for p in waiting), default=0.0))
    return since + deadline_seconds - now
