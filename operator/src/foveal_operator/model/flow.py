"""From a model's uri to its profile: fetch, profile, remember. Pure.

Called by the reconciler before the budgets; it applies `objects`, deletes `delete`, and keeps what
is in `objects` from being pruned. The profile lives in an immutable ConfigMap with the name of the
Job that made it, which is a hash of image, model, revision and limits: another revision has another
name, and going back finds the old profile. That a model was fetched is recorded in a ConfigMap in
the same way, with the uid of the claim that it lies on. Deleting a ConfigMap does its work again;
deleting a Job that has ended well does not, so the cluster may delete those after a while.

A Job that another release of the operator has made differently is that release's answer to the same
question: its result counts, and while it runs it is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Failure
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts, Owned, desired
from foveal_operator.manifests.context import Context
from foveal_operator.manifests.job import profile_limit_bytes
from foveal_operator.manifests.model_source import (
    ModelSource,
    as_it_can_be,
    kept_text,
    model_source,
)
from foveal_operator.model.job_state import (
    JobState,
    as_it_lies,
    expiring,
    fetch_reason,
    is_of_earlier_claim,
    is_superseded,
    read_job,
    was_recorded,
)
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile, decode
from foveal_runtime.plan.quantity import format_bytes

PROFILE_KEY = "profile.json"
CLAIM_KEY = "claim"
"""In the record of a fetch: the uid of the claim."""
RETRY_SECONDS = {"FetchDenied": 600.0, "FetchFailed": 1800.0, "ProfileFailed": 1800.0}
"""A failed Job has tried for some ten minutes itself. Reasons that only an edit heals are not
here: an edit gives the Job another name."""
UNREAD_SECONDS = 60.0
"""A finished profile Job whose message cannot be read runs again, but not at once."""
CHECK_SECONDS = 15.0


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """What the reconciler has read.

    Attributes:
        live: (kind, name) -> object, for every key of `model_keys` that exists.
        job_pods: pods of the resource's Jobs (label app.kubernetes.io/component=model).
        downloads: pod -> percent of the model that it has fetched, as it said last.
        refused: KIND/NAME -> why its pods cannot be created.
        waits: pod -> why its volumes are not there.
        now: seconds since the epoch.
    """

    inference: InferenceSpec
    facts: ClusterFacts
    live: Mapping[tuple[str, str], Obj] = {}
    job_pods: tuple[Obj, ...] = ()
    downloads: Mapping[str, int] = {}
    refused: Mapping[str, str] = {}
    waits: Mapping[str, str] = {}
    now: float


class ModelDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model stands and what to do for it.

    Attributes:
        profile: None until it is known; the plan needs it.
        reason, message: for status.Observed.model and model_message.
        model_ready: for ClusterFacts.model_ready.
        objects: to apply by their policy: account, claim, Jobs, the profile's ConfigMap.
        delete: (kind, name, uid) of Jobs to delete with their pods, so that they run again.
        next_check_seconds: decide again after so long; None = no need.
        download_percent: None when nothing is fetched, or nobody knows how much there is.
        failure: how the Job that is under way has failed last.
    """

    profile: ModelProfile | None = None
    reason: Reason = reasons.WAITING
    message: str = ""
    model_ready: bool = False
    objects: tuple[Owned, ...] = ()
    delete: tuple[tuple[str, str, str], ...] = ()
    next_check_seconds: float | None = None
    download_percent: int | None = None
    failure: Failure | None = None

    @property
    def resolved_revision(self) -> str:
        """The commit or digest that the profile is of; "" = not known."""
        return self.profile.revision if self.profile else ""


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that bring a model and its profile; `kept`: what its claim has and should not."""

    base: tuple[Owned, ...]
    fetch: Owned | None
    profile: Owned
    config_map: str
    source: ModelSource
    context: Context
    kept: str = ""


def model_keys(inference: InferenceSpec, facts: ClusterFacts) -> tuple[tuple[str, str], ...]:
    """(kind, name) of all that ModelView.live should hold."""
    wanted = _wanted(inference, facts)
    found = [("Job", wanted.profile.body["metadata"]["name"]), ("ConfigMap", wanted.config_map)]
    if wanted.fetch is not None:
        name = wanted.fetch.body["metadata"]["name"]
        found += [("Job", name), ("ConfigMap", name)]
    if wanted.source.claim:
        found.append(("PersistentVolumeClaim", wanted.source.claim))
    return tuple(found)


def decide_model(view: ModelView) -> ModelDecision:
    """The next step towards a profile; the same view gives the same decision."""
    wanted = _with_live_claim(view, _wanted(view.inference, view.facts))
    found = _decided(view, wanted)
    if found.profile is not None:
        return found
    return msgspec.structs.replace(found, failure=_failure(view, wanted))


def _decided(view: ModelView, wanted: _Wanted) -> ModelDecision:
    objects = wanted.base
    if wanted.fetch is not None:
        job, live = _job(view, wanted.fetch), _live(view, wanted.fetch)
        claim = _claim(view, wanted)
        record = _fetch_record(wanted, claim)
        if record is not None and _is_recorded(view, record):
            objects = (*objects, record, *_over(live, wanted.fetch, job))
        else:
            is_void = was_recorded(live) or is_of_earlier_claim(job, claim)
            if (job.is_complete and is_void) or is_superseded(live, wanted.fetch, job):
                return _replaced(wanted.fetch, job, reasons.DOWNLOADING, objects)
            objects = (*objects, as_it_lies(live, wanted.fetch))
            if not job.is_complete:
                return _fetching(view, wanted, job, objects)
            objects = (*objects, record) if record is not None else objects
    elif wanted.source.claim and _claim(view, wanted) is None:
        text = f"claim {wanted.source.claim} does not exist"
        return ModelDecision(
            reason=reasons.CLAIM_PENDING, message=text, objects=objects, next_check_seconds=60.0
        )
    profile = _cached(view, wanted)
    if profile is not None:
        assert wanted.config_map
        body = dict(view.live["ConfigMap", wanted.config_map])
        job, live = _job(view, wanted.profile), _live(view, wanted.profile)
        objects = (*objects, *_over(live, wanted.profile, job))
        return _resolved(wanted, profile, objects, body["data"][PROFILE_KEY])
    return _profiling(view, wanted, objects)


def _wanted(inference: InferenceSpec, facts: ClusterFacts) -> _Wanted:
    context = Context(inference=inference, plan=None, facts=facts)
    base: list[Owned] = []
    fetch: Owned | None = None
    *rest, profile = desired(inference, None, facts).objects
    for owned in rest:
        if owned.body["kind"] == "Job":
            fetch = owned
        else:
            base.append(owned)
    name = profile.body["metadata"]["name"]
    return _Wanted(
        base=tuple(base),
        fetch=fetch,
        profile=profile,
        config_map=name,
        source=model_source(context),
        context=context,
    )


def _with_live_claim(view: ModelView, wanted: _Wanted) -> _Wanted:
    """The resource's own claim may be older than the resource."""
    live = _claim(view, wanted)
    if live is None or not wanted.source.owns_claim:
        return wanted
    base = tuple(
        msgspec.structs.replace(owned, body=as_it_can_be(owned.body, live))
        if owned.policy == "Retain"
        else owned
        for owned in wanted.base
    )
    kept = "; ".join(
        kept_text(owned.body, live) for owned in wanted.base if owned.policy == "Retain"
    )
    return msgspec.structs.replace(wanted, base=base, kept=kept)


def _live(view: ModelView, wanted: Owned) -> Obj | None:
    return view.live.get(("Job", wanted.body["metadata"]["name"]))


def _job(view: ModelView, wanted: Owned) -> JobState:
    name = wanted.body["metadata"]["name"]
    refused = view.refused.get(f"Job/{name}", "")
    return read_job(_live(view, wanted), name, view.job_pods, refused, view.waits)


def _failure(view: ModelView, wanted: _Wanted) -> Failure | None:
    """Of the Job that is under way; what one suffered that has ended well is over."""
    for owned in (wanted.fetch, wanted.profile):
        job = _job(view, owned) if owned is not None else JobState()
        if job.exists and not job.is_complete:
            return job.failure
    return None


def _replaced(
    wanted: Owned,
    job: JobState,
    reason: Reason,
    objects: tuple[Owned, ...],
    *,
    model_ready: bool = False,
) -> ModelDecision:
    key = ("Job", wanted.body["metadata"]["name"], job.uid)
    return ModelDecision(
        reason=reason,
        message=f"Job {key[1]} is created again",
        model_ready=model_ready,
        objects=objects,
        delete=(key,),
        next_check_seconds=1.0,
    )


def _over(live: Obj | None, wanted: Owned, job: JobState) -> tuple[Owned, ...]:
    """A Job whose result is recorded, while it is still there."""
    return (expiring(live, wanted),) if live is not None and job.is_complete else ()


def _fetch_record(wanted: _Wanted, claim: Obj | None) -> Owned | None:
    """That the model was fetched into this very claim; None while there is no claim."""
    uid = (claim or {}).get("metadata", {}).get("uid")
    if wanted.fetch is None or not uid:
        return None
    suffix = wanted.fetch.body["metadata"]["name"].removeprefix(f"{wanted.context.name}-")
    data = {CLAIM_KEY: uid}
    return Owned(body=wanted.context.object("v1", "ConfigMap", suffix, "model", data=data))


def _is_recorded(view: ModelView, record: Owned) -> bool:
    live = view.live.get(("ConfigMap", record.body["metadata"]["name"])) or {}
    return bool((live.get("data") or {}).get(CLAIM_KEY) == record.body["data"][CLAIM_KEY])


def _claim(view: ModelView, wanted: _Wanted) -> Obj | None:
    return view.live.get(("PersistentVolumeClaim", wanted.source.claim))


def _fetching(
    view: ModelView, wanted: _Wanted, job: JobState, objects: tuple[Owned, ...]
) -> ModelDecision:
    assert wanted.fetch is not None
    claim = _claim(view, wanted)
    phase = (claim or {}).get("status", {}).get("phase", "Pending")
    if job.is_failed:
        return _failed(view, wanted.fetch, job, fetch_reason(job.text), objects)
    if phase != "Bound" and (phase == "Lost" or job.reason is reasons.UNSCHEDULABLE):
        text = f"claim {wanted.source.claim} is {phase}"
        if job.text:
            text += f"; {job.text}"
        if wanted.kept:
            text += (
                f"; the claim keeps {wanted.kept}: delete it (kubectl delete pvc "
                f"{wanted.source.claim}) and it is made again as the resource asks"
            )
        return _waiting(reasons.CLAIM_PENDING, text, objects)
    if job.reason is not None:
        reason = fetch_reason(job.text) if job.has_ended_badly else job.reason
        again = "; it is tried again" if job.has_ended_badly else ""
        return _waiting(reason, f"{job.text}{again}", objects)
    what = f"fetching {view.inference.spec.model.uri}"
    if not job.exists:
        return _waiting(reasons.DOWNLOADING, f"{what}: starting", objects)
    done = view.downloads.get(job.newest_pod)
    found = _waiting(
        reasons.DOWNLOADING, what if done is None else f"{what}: {done} % is there", objects
    )
    return msgspec.structs.replace(found, download_percent=done)


def _profiling(view: ModelView, wanted: _Wanted, objects: tuple[Owned, ...]) -> ModelDecision:
    job, live = _job(view, wanted.profile), _live(view, wanted.profile)
    if (job.is_complete and was_recorded(live)) or is_superseded(live, wanted.profile, job):
        return _replaced(wanted.profile, job, reasons.PROFILING, objects, model_ready=True)
    objects = (*objects, as_it_lies(live, wanted.profile))
    if job.reason is reasons.OOM_KILLED:
        job = msgspec.structs.replace(job, text=f"{job.text}; {_more_memory(view)}")
    if job.is_complete:
        profile = _read(job.message)
        if profile is not None:
            return _resolved(wanted, profile, objects, job.message)
        text = "the profile Job ended without a profile that can be read; it runs again"
        return _again(
            view, wanted.profile, job, reasons.PROFILE_FAILED, text, objects, UNREAD_SECONDS
        )
    if job.is_failed:
        return _failed(view, wanted.profile, job, job.profile_reason(), objects, model_ready=True)
    if job.reason is not None:
        reason = job.profile_reason() if job.has_ended_badly else job.reason
        return _waiting(reason, job.text, objects, model_ready=True)
    return _waiting(reasons.PROFILING, "computing what the model costs", objects, model_ready=True)


def _more_memory(view: ModelView) -> str:
    """The Job's limit follows from limits of the resource's."""
    limit = profile_limit_bytes(view.inference.spec.modalities)
    return (
        f"its limit of {format_bytes(limit)} follows from modalities.image.maxPixels, "
        "modalities.video.maxPixels and modalities.audio.maxSeconds: lower the largest of them"
    )


def _failed(
    view: ModelView,
    owned: Owned,
    job: JobState,
    reason: Reason,
    objects: tuple[Owned, ...],
    *,
    model_ready: bool = False,
) -> ModelDecision:
    name = owned.body["metadata"]["name"]
    text = f"Job {name}: {job.text or 'failed'}"
    after = RETRY_SECONDS.get(reason.name)
    if after is None:
        return ModelDecision(reason=reason, message=text, model_ready=model_ready, objects=objects)
    found = _again(view, owned, job, reason, text, objects, after)
    return msgspec.structs.replace(found, model_ready=model_ready)


def _again(
    view: ModelView,
    owned: Owned,
    job: JobState,
    reason: Reason,
    text: str,
    objects: tuple[Owned, ...],
    after_seconds: float,
) -> ModelDecision:
    """Deletes the Job once it has been over for `after_seconds`; the next pass makes it anew."""
    left = job.ended_at + after_seconds - view.now
    found = ModelDecision(reason=reason, message=text, objects=objects)
    if left > 0:
        return msgspec.structs.replace(found, next_check_seconds=left)
    # Applied in the same pass it would be the old one that is patched.
    rest = tuple(other for other in objects if other.key != owned.key)
    key = ("Job", owned.body["metadata"]["name"], job.uid)
    return msgspec.structs.replace(found, objects=rest, delete=(key,), next_check_seconds=1.0)


def _waiting(
    reason: Reason, message: str, objects: tuple[Owned, ...], *, model_ready: bool = False
) -> ModelDecision:
    return ModelDecision(
        reason=reason,
        message=message,
        model_ready=model_ready,
        objects=objects,
        next_check_seconds=CHECK_SECONDS,
    )


def _resolved(
    wanted: _Wanted, profile: ModelProfile, objects: tuple[Owned, ...], text: str
) -> ModelDecision:
    """`text`: the profile as it was read, which its ConfigMap keeps."""
    suffix = wanted.config_map.removeprefix(f"{wanted.context.name}-")
    body = wanted.context.object(
        "v1", "ConfigMap", suffix, "model", immutable=True, data={PROFILE_KEY: text}
    )
    return ModelDecision(
        profile=profile,
        reason=reasons.RESOLVED,
        model_ready=True,
        objects=(*objects, Owned(body=body)),
    )


def _cached(view: ModelView, wanted: _Wanted) -> ModelProfile | None:
    live = view.live.get(("ConfigMap", wanted.config_map))
    return _read((live or {}).get("data", {}).get(PROFILE_KEY, ""))


def _read(text: str) -> ModelProfile | None:
    """None for what is no profile: a cut off or foreign message is no reason to stop."""
    if not text:
        return None
    try:
        return decode(text.encode())
    except StartupError:
        return None
