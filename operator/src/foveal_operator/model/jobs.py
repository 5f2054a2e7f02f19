"""Comparison of a Job in the cluster with the one that would be made today. Pure; used by flow.py.

A Job's template cannot change. One that is made otherwise (by another release of the operator, or
before the resource named another secret or image) is left running, and its result counts; it is
replaced only when it makes no progress.
"""

from __future__ import annotations

import msgspec

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Owned
from foveal_operator.manifests.job import SETTINGS, TEMPLATE
from foveal_operator.model.job_state import JobState, seconds

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
    """Whether it is to be made anew: it has failed, or it is in trouble and the resource now names
    another secret, image, environment or place for it."""
    if job.is_complete or not _is_made_otherwise(live, wanted):
        return False
    return job.is_failed or (job.trouble is not None and _chosen(live) != _chosen(wanted.body))


def _is_made_otherwise(live: Obj | None, wanted: Owned) -> bool:
    # Somebody may strip annotations: then it counts as ours, and the next apply puts it back.
    found = ((live or {}).get("metadata", {}).get("annotations") or {}).get(TEMPLATE)
    return found is not None and found != wanted.body["metadata"]["annotations"][TEMPLATE]


def _chosen(job: Obj | None) -> tuple[object, ...]:
    """What of a Job's pod the user chooses: image, secret, environment, where it may run."""
    spec = (job or {}).get("spec", {}).get("template", {}).get("spec", {})
    container: Obj = next(iter(spec.get("containers") or ()), {})
    own = (container.get("image"), container.get("envFrom") or [], container.get("env") or [])
    return (*own, *(spec.get(key) for key in SETTINGS))
