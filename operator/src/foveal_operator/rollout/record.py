"""The rollout's only memory: one ConfigMap per resource, read and written by rollout. Pure.

It holds the pod templates that served last ("good") and the state of the present rollout. Both are
small, both must survive the operator, and neither may hang on annotations, which other tools strip.
A lost or unreadable record means no rollback and a clock that starts again; nothing else. `begin`
and `advance` are that clock: progress and deadline of the rollout.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from foveal_operator.kube.types import Obj
from foveal_operator.rollout.view import Body, Pod, record_name

_GOOD, _STATE = "good.json", "state.json"


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rollout to `revision`.

    Attributes:
        revision: of the engine and frontend templates that are asked for, "ENGINE/FRONTEND".
        generation: of the resource when the clock last started.
        since_seconds: when the rollout last got on, seconds since the epoch.
        num_serving: most pods of the revision that have served at a time.
        asked: the strategy of the resource that `strategy` was chosen for.
        strategy: "Surge", "FreeFirst", "OnDelete"; "" while no engine has to be replaced.
        why: the rest of status.rolloutStrategy.
        num_surge: engines above those asked for.
        done: everything asked for has served at once; a later failure starts no rollout.
        idle: no engine or no frontend is asked for; what is asked for next starts the clock.
        failed: it made no progress in time.
        deadline_seconds: by which it failed; 0 = it has not, or an earlier release has written so.
    """

    revision: str = ""
    generation: int = 0
    since_seconds: float = 0.0
    num_serving: int = 0
    asked: str = ""
    strategy: str = ""
    why: str = ""
    num_surge: int = 0
    done: bool = False
    idle: bool = False
    failed: bool = False
    deadline_seconds: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.strategy}: {self.why}" if self.strategy else ""


class Good(msgspec.Struct, frozen=True, kw_only=True):
    """The templates that last served in full."""

    revision: str
    engine: dict[str, Any]
    frontend: dict[str, Any]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything remembered."""

    state: State = State()
    good: Good | None = None


def read_record(live: Obj | None) -> Record:
    """What a live ConfigMap says; an empty record where it says nothing that can be read."""
    data = (live or {}).get("data") or {}
    state, good = State(), None
    try:
        state = msgspec.json.decode(data.get(_STATE, "{}"), type=State)
        if _GOOD in data:
            good = msgspec.json.decode(data[_GOOD], type=Good)
    except (msgspec.DecodeError, msgspec.ValidationError):
        pass
    return Record(state=state, good=good)


def record_body(record: Record, name: str, owned_like: Obj) -> Body:
    """The ConfigMap, with labels and owner as on `owned_like`, another object of the resource."""
    data = {_STATE: _json(record.state)}
    if record.good is not None:
        data[_GOOD] = _json(record.good)
    model = owned_like["metadata"]
    metadata = {"name": record_name(name), "namespace": model["namespace"]}
    for key in ("labels", "ownerReferences"):
        if key in model:
            metadata[key] = model[key]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def begin(
    state: State, revision: str, generation: int, now: float, deadline_seconds: float
) -> State:
    """The state of the rollout to `revision`: the present one, or a new one. An edit of the
    resource starts the clock of an unfinished rollout again; so does more time that of one that
    has failed."""
    if state.revision != revision:
        return State(revision=revision, generation=generation, since_seconds=now)
    if state.failed:
        if 0 < state.deadline_seconds < deadline_seconds:
            return State(revision=revision, generation=generation, since_seconds=now)
        known = state.deadline_seconds or deadline_seconds
        return msgspec.structs.replace(state, deadline_seconds=known)
    if state.generation != generation and not state.done:
        return msgspec.structs.replace(state, generation=generation, since_seconds=now)
    return state


def advance(
    state: State,
    pods: tuple[Pod, ...],
    revisions: tuple[str, str],
    *,
    is_complete: bool,
    is_off: bool,
    now: float,
    deadline_seconds: float,
) -> State:
    """`state` with what has been reached; `failed` once nothing more was for the deadline.

    Args:
        revisions: of engines and frontends, as asked for.
        is_complete: everything asked for serves.
        is_off: no engine or no frontend is asked for, so that nothing can serve.
    """
    if is_off:
        return msgspec.structs.replace(state, idle=True, done=False, failed=False)
    if state.idle:
        state = msgspec.structs.replace(state, idle=False, num_serving=0, since_seconds=now)
    if is_complete:
        return msgspec.structs.replace(state, done=True, failed=False)
    if state.done or state.failed:
        return state
    mine = [pod for pod in pods if pod.revision in revisions and not pod.is_terminating]
    num_serving = sum(1 for pod in mine if pod.serves)
    if num_serving > state.num_serving:
        state = msgspec.structs.replace(state, num_serving=num_serving, since_seconds=now)
    if seconds_left(state, pods, revisions, now, deadline_seconds) <= 0:
        return msgspec.structs.replace(state, failed=True, deadline_seconds=deadline_seconds)
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
