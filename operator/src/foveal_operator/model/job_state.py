"""State of a Job, from the Job and its pods, and its comparison with the one that would be made
today. Pure; used by flow.py.

A Job's template cannot change. One that is made otherwise (by another release of the operator, or
before the resource named another secret or image) is left running, and its result counts; it is
replaced only when it makes no progress.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Failure
from foveal_operator.common.clock import seconds
from foveal_operator.kube.errors import denial
from foveal_operator.kube.types import Obj, label_of
from foveal_operator.manifests.context import Owned
from foveal_operator.manifests.job import SETTINGS, TEMPLATE
from foveal_operator.pods.diagnose import (
    EXIT_STARTUP_ERROR,
    OWN_CONTAINERS,
    diagnose,
    last_failure,
)

_DENIED = re.compile(
    r"\b(401|403|unauthorized|forbidden|denied|gated|AccessDenied|InvalidAccessKeyId"
    r"|SignatureDoesNotMatch|ExpiredToken|InvalidToken|unable to locate credentials)\b",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(
    r"\b(404|RepositoryNotFound|RevisionNotFound|NoSuchBucket|not found|not a model we can load)\b",
    re.IGNORECASE,
)
_ENDED_BADLY = (
    reasons.CRASHED, reasons.OOM_KILLED, reasons.INVALID_ARGUMENT, reasons.SHM_FULL,
    reasons.DEVICE_FULL,
)  # fmt: skip


_NOT_CHOSEN = (
    "app.kubernetes.io/", "foveal.dev/", "batch.kubernetes.io/", "controller-uid", "job-name",
)  # fmt: skip
"""Beginnings of labels that the operator and the cluster set."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """One Job.

    Attributes:
        ended_at: seconds since the epoch; 0 while it runs.
        message: termination message of the pod that succeeded.
        reason, text: what its pods suffer from, and the last line that tells it.
        exit_code: of the container that ended last; 0 = none did.
        newest_pod: name of its latest attempt; "" = none yet.
        failure: how one of its pods ended badly last.
    """

    exists: bool = False
    uid: str = ""
    is_complete: bool = False
    is_failed: bool = False
    ended_at: float = 0.0
    message: str = ""
    reason: Reason | None = None
    text: str = ""
    exit_code: int = 0
    newest_pod: str = ""
    failure: Failure | None = None

    @property
    def has_ended_badly(self) -> bool:
        """Its container ran and failed, which the Job tries again by itself."""
        return self.reason in _ENDED_BADLY

    def profile_reason(self) -> Reason:
        """The runtime refuses a model with its own exit code; all else may pass."""
        if self.exit_code == EXIT_STARTUP_ERROR:
            return reasons.UNSUPPORTED_MODEL
        return reasons.PROFILE_FAILED


def fetch_reason(line: str) -> Reason:
    """Why a download failed, from the one line that the runtime ends with."""
    if _DENIED.search(line):
        return reasons.FETCH_DENIED
    if _NOT_FOUND.search(line):
        return reasons.NOT_FOUND
    return reasons.FETCH_FAILED


def _failure(pods: Iterable[Obj]) -> Failure | None:
    """As of any pod, in the words of Jobs."""
    found = last_failure(pods)
    if found is None or found.reason not in (reasons.CRASHED.name, reasons.INVALID_ARGUMENT.name):
        return found
    if found.container == "fetch":
        reason = fetch_reason(found.message)
    elif found.exit_code == EXIT_STARTUP_ERROR:
        reason = reasons.UNSUPPORTED_MODEL
    else:
        reason = reasons.PROFILE_FAILED
    return msgspec.structs.replace(found, reason=reason.name)


def read_job(
    job: Obj | None,
    name: str,
    pods: Iterable[Obj],
    refused: str = "",
    waits: Mapping[str, str] | None = None,
) -> JobState:
    """The state of the Job called `name`, of which `pods` may hold some pods.

    Args:
        refused: why it can create no pod, in the API server's words.
        waits: as `diagnose` takes it.
    """
    if job is None:
        return JobState()
    mine = [pod for pod in pods if _job_name(pod) == name]
    status = job.get("status", {})
    conditions = {c.get("type"): c for c in status.get("conditions", ()) if c["status"] == "True"}
    over = conditions.get("Complete") or conditions.get("Failed") or {}
    is_complete = "Complete" in conditions
    newest = max(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), default=None)
    # What an earlier attempt suffered from is over when a new one runs.
    found = None if is_complete or newest is None else diagnose([newest], waits)
    ended = sorted(_terminations(mine), key=lambda one: str(one.get("finishedAt") or ""))
    good = [one for one in ended if one.get("exitCode") == 0]
    bad = [one for one in ended if one.get("exitCode") != 0]
    reason, text = (found.reason, found.message) if found else (None, "")
    if refused and newest is None and not over:
        reason, text = denial(refused), refused
    if job.get("spec", {}).get("suspend") and not over:
        reason, text = reasons.QUEUED, f"Job {name} is suspended (spec.suspend)"
    if not text and "Failed" in conditions:
        text = str(over.get("message") or over.get("reason") or "")
    return JobState(
        exists=True,
        uid=str(job["metadata"].get("uid", "")),
        is_complete=is_complete,
        is_failed="Failed" in conditions,
        ended_at=seconds(over.get("lastTransitionTime")),
        message=str(good[-1].get("message") or "") if good else "",
        reason=reason,
        text=text,
        exit_code=int(bad[-1].get("exitCode", 0)) if bad else 0,
        newest_pod=str(newest["metadata"]["name"]) if newest else "",
        failure=_failure(mine),
    )


def _job_name(pod: Obj) -> str:
    return label_of(pod, "batch.kubernetes.io/job-name") or label_of(pod, "job-name")


def _terminations(pods: Iterable[Obj]) -> Iterable[Obj]:
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if container.get("name") not in OWN_CONTAINERS:
                continue  # an injected sidecar knows nothing of the model
            for state in ("lastState", "state"):
                ended: Obj | None = container.get(state, {}).get("terminated")
                if ended:
                    yield ended


TTL_SECONDS = 3600
"""For who wants to read the log."""
RECORDED = "foveal.dev/recorded"
"""Annotation of a Job whose result is recorded. Its time to live does not tell that: admission
policies give one to every Job."""


def as_it_lies(live: Obj | None, wanted: Owned) -> Owned:
    """`wanted`, not to be applied to a Job that is made otherwise."""
    if _is_made_otherwise(live, wanted):
        return msgspec.structs.replace(wanted, policy="Keep")
    return wanted


def expiring(live: Obj, wanted: Owned) -> Owned:
    """A finished Job whose result is recorded, however it is made, with a time to live: the cluster
    deletes it with its pods. Not before: a Job that went with its result unread would run again.
    One that has both is left alone: nothing of it is to change any more."""
    uid, found = live["metadata"]["uid"], live["metadata"].get("annotations") or {}
    metadata: Obj = {**wanted.body["metadata"], "uid": uid}
    metadata["annotations"] = {RECORDED: "true"}
    if TEMPLATE in found:
        metadata["annotations"][TEMPLATE] = found[TEMPLATE]
    spec = {"ttlSecondsAfterFinished": TTL_SECONDS, **live.get("spec", {})}
    body = {**wanted.body, "metadata": metadata, "spec": spec}
    is_done = was_recorded(live) and "ttlSecondsAfterFinished" in live.get("spec", {})
    return msgspec.structs.replace(wanted, body=body, policy="Keep" if is_done else wanted.policy)


def is_of_earlier_claim(job: JobState, claim: Obj | None) -> bool:
    """Whether it ended before the claim was made that its files should lie on."""
    made = seconds((claim or {}).get("metadata", {}).get("creationTimestamp"))
    return 0.0 < job.ended_at < made


def was_recorded(live: Obj | None) -> bool:
    """Whether its result has been recorded; where no record is now, it has been deleted."""
    return RECORDED in ((live or {}).get("metadata", {}).get("annotations") or {})


def is_superseded(live: Obj | None, wanted: Owned, job: JobState) -> bool:
    """Whether it is made again: it has failed, or its pods cannot run and the resource now says
    otherwise what they are to be."""
    if job.is_complete or not _is_made_otherwise(live, wanted):
        return False
    return job.is_failed or (job.reason is not None and _chosen(live) != _chosen(wanted.body))


def _is_made_otherwise(live: Obj | None, wanted: Owned) -> bool:
    # Somebody may strip annotations: then it counts as ours, and the next apply puts it back.
    found = ((live or {}).get("metadata", {}).get("annotations") or {}).get(TEMPLATE)
    return found is not None and found != wanted.body["metadata"]["annotations"][TEMPLATE]


def _chosen(job: Obj | None) -> tuple[object, ...]:
    """What of a Job's pod the user chooses: image, secret, environment, volumes, limits, where and
    as whom it may run, labels and annotations."""
    template = (job or {}).get("spec", {}).get("template", {})
    spec, metadata = template.get("spec", {}), template.get("metadata", {})
    labels = {
        key: value
        for key, value in (metadata.get("labels") or {}).items()
        if not key.startswith(_NOT_CHOSEN)
    }
    container: Obj = next(iter(spec.get("containers") or ()), {})
    own = (container.get("image"), container.get("envFrom") or [], container.get("env") or [])
    limit = container.get("resources", {}).get("limits", {}).get("cpu")
    # The API server leaves out what is false.
    mounts = [
        {key: value for key, value in mount.items() if value}
        for mount in container.get("volumeMounts") or ()
    ]
    marks = (labels, metadata.get("annotations") or {})
    return (*own, limit, mounts, *marks, *(spec.get(key) for key in (*SETTINGS, "affinity")))
