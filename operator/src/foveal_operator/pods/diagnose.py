"""Diagnosis of pods that do not serve: one reason and the last failure, from raw pods. Pure.

Called by status/verdicts.py and status/report.py. Reads what the kubelet and the scheduler wrote;
never guesses from logs beyond the termination message.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Failure
from foveal_operator.common.clock import seconds
from foveal_operator.kube.types import Obj, condition
from foveal_runtime.plan.quantity import mebibytes

EXIT_STARTUP_ERROR = 2
EXIT_SIGBUS = 128 + 7
_PULL = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
     "RegistryUnavailable", "ImageInspectError"}
)  # fmt: skip
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_DENIED = re.compile(r"\b(401|403|unauthorized|forbidden|denied|authentication)\b", re.IGNORECASE)
_PEAK = re.compile(r"memory_peak=(\S+)")
_SHM = re.compile(r"/dev/shm|shm_bytes|shared memory")
_NO_SPACE = re.compile(r"No space left on device|holds only|cannot allocate")
_DEVICE_FULL = re.compile(r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError")
OWN_CONTAINERS = frozenset({"engine", "frontend", "fetch", "profile"})
"""Those of the operator; others are added by a podTemplate or injected."""
MAX_MESSAGE = 1024
OVERDUE_SECONDS = 60.0
NEW_SECONDS = 30.0
"""A pod that has been Ready for less is new: what it has not said yet is waited for."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The most telling failure of a set of pods."""

    reason: Reason
    message: str
    pod: str


# The first that applies to any pod is reported: what a user can act on comes before symptoms.
_ORDER = (
    reasons.INVALID_ARGUMENT,
    reasons.OOM_KILLED,
    reasons.SHM_FULL,
    reasons.DEVICE_FULL,
    reasons.IMAGE_DENIED,
    reasons.IMAGE_PULL,
    reasons.CONFIG_ERROR,
    reasons.UNSCHEDULABLE,
    reasons.NO_NODE_YET,
    reasons.TERMINATION_STUCK,
    reasons.CRASHED,
    reasons.EVICTED,
    reasons.QUEUED,
)


def is_ready(pod: Obj) -> bool:
    """True for a pod that is Ready and is not going away."""
    is_leaving = pod["metadata"].get("deletionTimestamp")
    return not is_leaving and condition(pod, "Ready").get("status") == "True"


def ready_within(pod: Obj, period: float, now: float) -> bool:
    """It became Ready less than `period` seconds before `now`, which is seconds since the epoch.
    False for one that says no time, or one of a node whose clock is ahead."""
    since = seconds(condition(pod, "Ready").get("lastTransitionTime"))
    return is_ready(pod) and 0 <= now - since < period


def is_made_up_for(ended: Obj, pods: Iterable[Obj]) -> bool:
    """Whether a pod that was created after one that has ended is ready."""

    def created(pod: Obj) -> str:
        return str(pod["metadata"].get("creationTimestamp", ""))

    return any(is_ready(pod) and created(pod) > created(ended) for pod in pods)


def is_overdue(pod: Obj, now: float) -> bool:
    """Whether it should have gone by `now` (seconds since the epoch): its deletionTimestamp is when
    its grace period ends."""
    leaves = seconds(pod["metadata"].get("deletionTimestamp"))
    return 0.0 < leaves < now - OVERDUE_SECONDS


def is_gated(pod: Obj) -> bool:
    """A queue such as Kueue has not admitted it yet."""
    return bool(pod.get("spec", {}).get("schedulingGates"))


def diagnose(
    pods: Iterable[Obj],
    waits: Mapping[str, str] | None = None,
    awaiting: Collection[str] = (),
    now: float = 0.0,
) -> Diagnosis | None:
    """The worst failure of pods that are not ready; None when they are merely starting.

    Args:
        waits: pod -> why its volumes are not there: no field of the pod says that.
        awaiting: pods that no node is meant for yet.
        now: seconds since the epoch where another pod waits until one that leaves has gone.
    """
    starting = [pod for pod in pods if not is_ready(pod)]
    found = [
        _of_node(d, awaiting)
        for pod in starting
        for d in ([_overdue(pod)] if is_overdue(pod, now) else _of_pod(pod))
    ]
    for pod in starting:
        name = pod["metadata"]["name"]
        if waits and name in waits:
            text = f"{name}: {waits[name]}"
            found.append(Diagnosis(reason=reasons.CONFIG_ERROR, message=text, pod=name))
    if not found:
        return None
    return min(found, key=lambda d: (_ORDER.index(d.reason), d.pod))


def _overdue(pod: Obj) -> Diagnosis:
    metadata = pod["metadata"]
    node = pod.get("spec", {}).get("nodeName") or "unknown"
    text = (
        f"{metadata['name']} should have ended at {metadata['deletionTimestamp']}, and node {node} "
        "does not say that it has: no other pod takes its place"
    )
    return Diagnosis(reason=reasons.TERMINATION_STUCK, message=text, pod=metadata["name"])


def _of_node(found: Diagnosis, awaiting: Collection[str]) -> Diagnosis:
    if found.reason is not reasons.UNSCHEDULABLE or found.pod not in awaiting:
        return found
    text = f"{found.message} No such node is there yet"
    return msgspec.structs.replace(found, reason=reasons.NO_NODE_YET, message=text)


def last_failure(pods: Iterable[Obj], peaks: Mapping[str, int] | None = None) -> Failure | None:
    """The container that ended badly last, in any pod.

    Args:
        peaks: pod -> bytes it last reported, for those that left no peak behind.
    """
    known = list(pods)
    failures = [
        _failure(pod, container, ended, peaks or {})
        for pod in known
        if not _eviction(pod)
        for container in _telling(pod)
        if (ended := _ended(container)) and ended.get("exitCode", 0) != 0
    ]
    failures += [_evicted(pod, text) for pod in known if (text := _eviction(pod))]
    return max(failures, key=lambda f: (f.time or "", f.pod), default=None)


def _eviction(pod: Obj) -> str:
    """Why a pod was ended, or not admitted, by its node or the control plane; "" when it was not,
    or has only failed by its own containers."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return ""
    said = status if status.get("reason") else condition(pod, "DisruptionTarget")
    return ": ".join(text for key in ("reason", "message") if (text := said.get(key)))


def _evicted(pod: Obj, text: str) -> Failure:
    metadata, status = pod["metadata"], pod.get("status", {})
    ends = [str((_ended(container) or {}).get("finishedAt") or "") for container in
            _containers(pod)]  # fmt: skip
    disrupted = condition(pod, "DisruptionTarget").get("lastTransitionTime") or ""
    began = status.get("startTime") or metadata.get("creationTimestamp")
    containers = pod.get("spec", {}).get("containers") or [{}]
    return Failure(
        pod=metadata["name"],
        container=str(containers[0].get("name", "")),
        reason=reasons.EVICTED.name,
        message=text[:MAX_MESSAGE],
        time=max([*ends, disrupted]) or began,
    )


def _containers(pod: Obj) -> list[Obj]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _telling(pod: Obj) -> list[Obj]:
    """Containers whose ends tell something: while one of the operator's own is down, having ended
    badly, those alone. Others often end because of it."""
    every = _containers(pod)
    own = [one for one in every if one.get("name") in OWN_CONTAINERS]
    is_down = any(
        "running" not in one.get("state", {}) and (_ended(one) or {}).get("exitCode", 0) != 0
        for one in own
    )
    return own if is_down else every


def _ended(container: Obj) -> Obj | None:
    """How the container ended: now, or before its last restart."""
    for state in ("state", "lastState"):
        terminated: Obj | None = container.get(state, {}).get("terminated")
        if terminated:
            return terminated
    return None


def _last_line(text: str) -> str:
    """Of a termination message: an error if there is one, else what it says of memory."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MAX_MESSAGE] if lines else ""


def _of_exit(ended: Obj) -> Reason | None:
    code, text = ended.get("exitCode", 0), ended.get("message") or ""
    if ended.get("reason") == "OOMKilled":
        return reasons.OOM_KILLED
    if code == EXIT_SIGBUS or (code != 0 and _SHM.search(text) and _NO_SPACE.search(text)):
        return reasons.SHM_FULL
    if code != 0 and _DEVICE_FULL.search(text):
        return reasons.DEVICE_FULL
    if code == EXIT_STARTUP_ERROR:
        return reasons.INVALID_ARGUMENT
    return reasons.CRASHED if code != 0 else None


def _of_pod(pod: Obj) -> Iterable[Diagnosis]:
    name = pod["metadata"]["name"]
    if text := _eviction(pod):
        # How its containers ended follows from that.
        yield Diagnosis(reason=reasons.EVICTED, message=f"{name}: {text}", pod=name)
        return
    scheduled = condition(pod, "PodScheduled")
    if scheduled and is_gated(pod):
        gates = ", ".join(gate.get("name", "") for gate in pod["spec"]["schedulingGates"])
        text = f"{name}: waits until its scheduling gates are lifted: {gates}"
        yield Diagnosis(reason=reasons.QUEUED, message=text, pod=name)
    if scheduled.get("reason") == "Unschedulable":
        text = scheduled.get("message") or "no node fits"
        yield Diagnosis(reason=reasons.UNSCHEDULABLE, message=f"{name}: {text}", pod=name)
    telling = _telling(pod)
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        cause, text = waiting.get("reason", ""), waiting.get("message") or ""
        what = f"{name}: {text or cause}"
        if cause in _PULL:
            denied = _DENIED.search(text)
            reason = reasons.IMAGE_DENIED if denied else reasons.IMAGE_PULL
            yield Diagnosis(reason=reason, message=what, pod=name)
        elif cause in _CONFIG:
            yield Diagnosis(reason=reasons.CONFIG_ERROR, message=what, pod=name)
        ended = _ended(container) if container in telling else None
        exit_reason = _of_exit(ended) if ended else None
        if ended and exit_reason:
            line = _last_line(ended.get("message") or "") or f"exit code {ended.get('exitCode')}"
            what = f"{name} ({container.get('name')}): {line}"
            yield Diagnosis(reason=exit_reason, message=what, pod=name)


def _failure(pod: Obj, container: Obj, ended: Obj, peaks: Mapping[str, int]) -> Failure:
    text, name = ended.get("message") or "", str(container.get("name", ""))
    found = _PEAK.search(text)
    pod_name = pod["metadata"]["name"]
    peak = found[1][:64] if found else ""
    if not peak and pod_name in peaks:
        peak = mebibytes(peaks[pod_name])
    reason = _of_exit(ended) or reasons.CRASHED
    return Failure(
        pod=pod_name,
        container=name,
        reason=reason.name,
        message=_last_line(text),
        exit_code=max(-1, min(255, int(ended.get("exitCode", -1)))),
        memory_peak=peak,
        memory_limit=_memory_limit(pod, name),
        time=ended.get("finishedAt"),
    )


def _memory_limit(pod: Obj, container: str) -> str:
    spec = pod.get("spec", {})
    for one in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        if one.get("name") == container:
            return str(one.get("resources", {}).get("limits", {}).get("memory", ""))[:64]
    return ""
