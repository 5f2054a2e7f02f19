"""Conditions tell the truth: Ready only when every replica of the current revision serves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foveal_operator.api import reasons
from foveal_operator.api.parse import SpecError, parse
from foveal_operator.api.status import MultiModalInferenceStatus
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import desired
from foveal_operator.pods.diagnose import diagnose, last_failure
from foveal_operator.status.report import plain, report
from tests.support import api_server_rules, kstatus
from tests.support.observed_status import (
    BASE,
    LATER,
    NOW,
    conditions,
    container,
    ended,
    observed_of,
    pod,
    revisions,
    serving,
    status_of,
)
from tests.support.regenerate import FACTS
from tests.support.samples import put


def test_all_replicas_of_the_current_revision_make_it_ready() -> None:
    status = status_of(**serving())
    assert conditions(status)["Ready"] == "True Ready"
    assert not {"Reconciling", "Stalled"} & conditions(status).keys()
    assert status.engine is not None
    assert (status.engine.ready, status.engine.updated, status.engine.desired) == (2, 2, 2)
    assert status.current_revision == status.update_revision
    assert status.url == "http://qwen.models.svc:8000/v1"


def test_the_status_fits_its_schema() -> None:
    obj = {**BASE, "status": plain(status_of(**serving()))}
    assert api_server_rules.problems(obj) == []
    assert obj["status"]["budgets"]["ipc"]["display"] == "4.00 GiB"
    resolved = obj["status"]["resolved"]
    assert resolved["rollout"]["drainTimeoutSeconds"] == 120
    assert resolved["engine"]["maxNumBatchedTokens"] == 2048
    assert resolved["frontend"]["processes"] == 1
    assert resolved["security"]["networkPolicy"] == "Enabled"
    assert resolved["observability"]["podMonitor"] == "Auto"
    assert resolved["image"] == "registry.example/foveal-runtime:test"


def test_every_default_is_recorded_and_no_template() -> None:
    """Behaviour defaults are not in the schema, so the status is where they can be read."""
    template = {"spec": {"nodeSelector": {"disk": "ssd"}}}
    obj = put(put(BASE, "spec.engine.podTemplate", template), "spec.frontend.podTemplate", template)
    resolved = plain(status_of(obj, **serving()))["resolved"]  # type: ignore[index,call-overload]
    spec = parse(obj).spec
    missing = []
    for part in ("modalities", "frontend", "engine", "caches", "rollout", "networking", "security",
                 "observability"):  # fmt: skip
        value = getattr(spec, part)
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        missing += [
            f"{part}.{key}" for key, name in names
            if getattr(value, name) not in (None, {}) and key not in resolved[part]
        ]  # fmt: skip
    assert missing == ["frontend.podTemplate", "engine.podTemplate"]


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        ("True", "every autoscaler works", "Scaling"),
        ("False", "HorizontalPodAutoscaler qwen-frontend: no metrics", "AutoscalerInert"),
        ("Unknown", "ScaledObject qwen-engine has not reported yet", "Waiting"),
    ],
)
def test_an_inert_autoscaler_is_told_and_holds_nothing_back(
    status: str, message: str, reason: str
) -> None:
    """It stands still in silence otherwise, until the day of the peak."""
    found = status_of(**serving(), scaling=status, scaling_message=message)
    assert conditions(found)["ScalingActive"] == f"{status} {reason}"
    assert conditions(found)["Ready"] == "True Ready"
    (condition,) = [c for c in found.conditions if c.type == "ScalingActive"]
    assert condition.message.startswith(message)
    assert "ScalingActive" not in conditions(status_of(**serving()))


def test_old_pods_that_serve_do_not_make_a_new_revision_ready() -> None:
    """Ready was kept True through rollouts by others, because only the number was looked at."""
    changed = put(BASE, "spec.caches.ipc.size", "1Gi")
    status = status_of(changed, **serving(BASE))
    found = conditions(status)
    assert found["EnginesReady"] == "False Rolling"
    assert found["Ready"] == "False Rolling"
    assert found["Available"] == "True Available"
    assert found["Reconciling"].startswith("True")
    assert status.current_revision != status.update_revision


def test_it_is_ready_when_the_engine_above_those_asked_for_has_gone() -> None:
    """Surge: e-2 and e-1 are new and serve, and e-0, which has gone, comes again before e-2 goes:
    Ready was told in between, and taken back."""
    seen = serving()
    _, engine = revisions(BASE)
    surging = {"metadata": {"name": "qwen-engine"}, "spec": {"replicas": 3}}
    new = (pod("e-1", engine), pod("e-2", engine))
    found = conditions(status_of(**{**seen, "stateful_set": surging, "engine_pods": new}))
    assert (found["EnginesReady"], found["Ready"]) == ("False Rolling", "False Rolling")
    assert found["Available"] == "True Available"
    assert conditions(status_of(**seen))["Ready"] == "True Ready"


def test_a_refused_spec_leaves_what_serves_counted() -> None:
    with pytest.raises(SpecError) as caught:
        parse(put(BASE, "spec.engine.gpus", 1))
    values = serving()
    status = report(None, caught.value, None, None, observed_of(**values), 4)
    found = conditions(status)
    assert found["SpecAccepted"] == "False InvalidSpec"
    assert found["Available"] == "True Available"
    assert found["Stalled"] == "True InvalidSpec"
    assert "spec.engine.gpus: unknown field" in status.conditions[0].message


def test_a_misfit_stalls_with_its_edits() -> None:
    status = status_of(put(BASE, "spec.engine.accelerator", {"memory": "16Gi"}))
    found = conditions(status)
    assert found["BudgetFits"] == "False BudgetMisfit"
    assert found["Stalled"] == "True BudgetMisfit"
    message = next(c.message for c in status.conditions if c.type == "BudgetFits")
    assert "set spec.engine.accelerator.count to 2" in message
    assert "docs/reference/reasons.md#budgetmisfit" in message


def test_a_shrunk_cache_is_read_from_the_plan() -> None:
    """The reason was read from the words of a note, and a node's clip hid that note."""
    pinned = put(put(BASE, "spec.caches.ipc.size", "4Gi"), "spec.engine.hostMemory", "8Gi")
    assert conditions(status_of(pinned))["BudgetFits"] == "False BudgetMisfit"
    status = status_of(put(pinned, "spec.caches.onMisfit", "Shrink"))
    assert conditions(status)["BudgetFits"] == "True Shrunk"
    message = next(c.message for c in status.conditions if c.type == "BudgetFits")
    assert "engine ipc: pinned 4.00 GiB, reduced to fit" in message


def test_transition_times_move_only_when_a_status_flips() -> None:
    first = status_of(**{**serving(), "sessions_up": 1})
    second = status_of(previous=first.conditions, now=LATER, **serving())
    times = {c.type: c.last_transition_time for c in second.conditions}
    assert times["Ready"] == times["CachesMirrored"] == LATER
    assert times["EnginesReady"] == times["BudgetFits"] == NOW


NOT_READY: list[tuple[str, dict[str, Any], str, str]] = [
    ("downloading", {"model": reasons.DOWNLOADING}, "ModelReady", "Downloading"),
    ("no claim", {"model": reasons.CLAIM_PENDING}, "ModelReady", "ClaimPending"),
    ("a session down", {"sessions_up": 1}, "CachesMirrored", "SessionDown"),
    ("stale hints", {"stale_rate": 0.01}, "CachesMirrored", "StaleHints"),
    ("no route", {"route_ready": False}, "RouteReady", "RoutePending"),
    ("no frontend", {"frontend_pods": ()}, "FrontendsReady", "Starting"),
]


@pytest.mark.parametrize(("changes", "kind", "reason"), [c[1:] for c in NOT_READY])
def test_each_aspect_holds_ready_back(changes: dict[str, Any], kind: str, reason: str) -> None:
    found = conditions(status_of(**{**serving(), **changes}))
    assert found[kind] == f"False {reason}"
    assert found["Ready"] == f"False {reason}"
    assert ("Stalled" in found) != ("Reconciling" in found)


def test_a_missed_deadline_stalls() -> None:
    values = {**serving(), "engine_pods": (), "deadline_exceeded": True}
    assert conditions(status_of(**values))["Stalled"] == "True ProgressDeadlineExceeded"


UNSCHEDULABLE = [
    {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes: 3 Insufficient nvidia.com/gpu",
    }
]
TROUBLE: list[tuple[dict[str, Any], reasons.Reason, str]] = [
    (ended(137, reason="OOMKilled"), reasons.OOM_KILLED, "exit code 137"),
    (ended(135), reasons.SHM_FULL, "exit code 135"),
    (ended(1, "x\n/dev/shm: No space left on device"), reasons.SHM_FULL, "No space left"),
    (ended(2, "foveal-runtime: bad field"), reasons.INVALID_ARGUMENT, "bad field"),
    (ended(1, "Traceback\nValueError: boom\n\n"), reasons.CRASHED, "ValueError: boom"),
    (
        container(state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}),
        reasons.IMAGE_PULL,
        "not found",
    ),
    (
        container(
            state={
                "waiting": {
                    "reason": "CreateContainerConfigError",
                    "message": 'secret "qwen-api-keys" not found',
                }
            }
        ),
        reasons.CONFIG_ERROR,
        'secret "qwen-api-keys" not found',
    ),
    (
        container(state={"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}}),
        reasons.IMAGE_DENIED,
        "401 Unauthorized",
    ),
    (
        ended(2, "foveal-runtime: shm_bytes is 9, but /shared holds only 4 bytes: lower it"),
        reasons.SHM_FULL,
        "holds only 4 bytes",
    ),
    (
        ended(1, "memory_peak=9Mi\nthe step loop failed: OutOfMemoryError: CUDA out of memory"),
        reasons.DEVICE_FULL,
        "CUDA out of memory",
    ),
    ({"conditions": UNSCHEDULABLE}, reasons.UNSCHEDULABLE, "Insufficient nvidia.com/gpu"),
]


@pytest.mark.parametrize(("state", "reason", "said"), TROUBLE)
def test_a_pods_trouble_has_a_name(state: dict[str, Any], reason: Any, said: str) -> None:
    found = diagnose([pod("e-0", ready=False, **state)])
    assert found is not None
    assert found.reason is reason
    assert said in found.message


def test_pods_that_a_node_ended_or_refused_are_told_until_made_up_for() -> None:
    """They were not looked at: their resource was Starting, without a reason."""
    _, revision = revisions(BASE)
    text = "The node was low on resource: memory."
    engine = pod("e-1", revision, ready=False, phase="Failed", reason="Evicted", message=text,
                 **ended(137))  # fmt: skip
    later, old = pod("e-1", revision, ready=False), pod("e-9", "old", ready=False)
    engine["metadata"]["creationTimestamp"] = NOW
    later["metadata"]["creationTimestamp"] = LATER
    old["status"] = {**engine["status"], "message": "long ago"}
    values = {**serving(), "engine_pods": (pod("e-0", revision), later)}
    found = status_of(**{**values, "failed_pods": (engine, old)})
    assert conditions(found)["EnginesReady"] == "False Evicted"
    (message,) = [c.message for c in found.conditions if c.type == "EnginesReady"]
    assert message.startswith(f"e-1: Evicted: {text}"), "not that its container was killed"
    assert found.engine is not None
    assert (found.engine.replicas, found.engine.ready) == (2, 1), "no part of any count"
    failure = found.last_failure
    assert failure is not None
    assert (failure.pod, failure.reason) == ("e-1", "Evicted")
    assert failure.message == f"Evicted: {text}"

    ready = pod("e-1", revision)
    ready["metadata"]["creationTimestamp"] = LATER
    values["engine_pods"] = (ready, pod("e-0", revision, ready=False))
    found = status_of(**{**values, "failed_pods": (engine,)})
    assert conditions(found)["EnginesReady"] == "False Starting", "another has taken its place"
    values["engine_pods"] = (ready, pod("e-0", revision))
    found = status_of(**{**values, "failed_pods": (engine,)})
    assert conditions(found)["Ready"] == "True Ready"


def test_a_pod_that_the_control_plane_ended_says_why() -> None:
    """A failed container of its own is no eviction."""
    condition = {
        "type": "DisruptionTarget", "status": "True", "lastTransitionTime": LATER,
        "reason": "DeletionByTaintManager", "message": "Taint manager: deleting",
    }  # fmt: skip
    ended_so = pod("j", ready=False, phase="Failed", conditions=[condition], **ended(143))
    found, failure = diagnose([ended_so]), last_failure([ended_so])
    assert found is not None
    assert found.reason is reasons.EVICTED
    assert "DeletionByTaintManager: Taint manager" in found.message
    assert failure is not None
    assert (failure.time, failure.exit_code) == (LATER, -1)
    found = diagnose([pod("j", ready=False, phase="Failed", **ended(1, "boom"))])
    assert found is not None
    assert found.reason is reasons.CRASHED


def test_trouble_of_the_current_revision_is_told() -> None:
    _, engine = revisions(BASE)
    broken = pod("e-1", engine, ready=False, **ended(2, "foveal-runtime: no such field"))
    status = status_of(**{**serving(), "engine_pods": (pod("e-0", engine), broken)})
    assert conditions(status)["EnginesReady"] == "False InvalidArgument"
    assert conditions(status)["Stalled"] == "True InvalidArgument"
    assert status.last_failure is not None
    assert status.last_failure.exit_code == 2
    assert status.last_failure.message == "foveal-runtime: no such field"
    # As after an upgrade, which keeps the image: an edit uses a field that only the next one knows.
    (text,) = (c.message for c in status.conditions if c.type == "EnginesReady")
    assert "newer image (spec.image)" in text


def test_pods_that_are_starting_have_no_trouble() -> None:
    assert diagnose([pod("e-0", ready=False)]) is None
    assert diagnose([pod("e-0", ready=True, **ended(1))]) is None


def test_the_last_failure_is_the_latest_with_its_memory_peak() -> None:
    failure = last_failure(
        [
            pod("a", **ended(1, at=NOW)),
            pod("b", **ended(137, "memory_peak=11.9Gi limit=12Gi", "OOMKilled", at=LATER)),
        ]
    )
    assert failure is not None
    assert (failure.pod, failure.reason, failure.memory_peak) == ("b", "OOMKilled", "11.9Gi")


def test_draining_pods_are_counted_apart() -> None:
    _, engine = revisions(BASE)
    leaving = pod("e-2", engine)
    leaving["metadata"]["deletionTimestamp"] = NOW
    status = status_of(
        **{**serving(), "engine_pods": (pod("e-0", engine), pod("e-1", engine), leaving)}
    )
    assert status.engine is not None
    assert (status.engine.draining, status.engine.ready) == (1, 2)
    assert conditions(status)["Ready"] == "True Ready"


def test_every_reason_that_needs_action_says_which() -> None:
    quiet = {"Accepted", "Fits", "Shrunk", "Profiling", "Resolved", "Downloading", "Waiting"}
    quiet |= {"Serving", "ScaledToZero", "Starting", "Rolling", "Mirrored", "Routed", "Available"}
    quiet |= {"Unavailable", "Ready", "Paused", "Scaling", "Queued"}
    assert {r.name for r in reasons.ALL if not r.action} == quiet
    assert len(reasons.BY_NAME) == len(reasons.ALL)


KSTATUS: list[tuple[Obj, dict[str, Any], str]] = [
    (BASE, serving(), "Current"),
    (BASE, {}, "InProgress"),
    (BASE, {**serving(), "sessions_up": 0}, "InProgress"),
    (BASE, {**serving(), "engine_pods": ()}, "InProgress"),
    (BASE, {"model": reasons.DOWNLOADING}, "InProgress"),
    (BASE, {**serving(), "engine_pods": (), "deadline_exceeded": True}, "Failed"),
    (put(BASE, "spec.engine.accelerator", {"memory": "8Gi"}), {}, "Failed"),
    (put(BASE, "spec.caches.ipc.size", "1Gi"), serving(), "InProgress"),
]


@pytest.mark.parametrize(("obj", "observed", "verdict"), KSTATUS)
def test_generic_tools_judge_it_rightly(obj: Obj, observed: dict[str, Any], verdict: str) -> None:
    judged = {**obj, "metadata": {**obj["metadata"], "generation": 3}}
    judged["status"] = plain(status_of(obj, **observed))
    assert kstatus.verdict(judged) == verdict


def test_a_status_of_an_older_generation_is_in_progress() -> None:
    judged = {**BASE, "metadata": {**BASE["metadata"], "generation": 4}}
    judged["status"] = plain(status_of(**serving()))
    assert kstatus.verdict(judged) == "InProgress"


def test_the_status_is_the_same_for_the_same_input() -> None:
    one, two = status_of(**serving()), status_of(**serving())
    assert msgspec.json.encode(one) == msgspec.json.encode(two)


def test_an_empty_map_is_not_sent() -> None:
    """Found on a real API server: `budgets: {}` after filled budgets became null, and the status
    of a resource whose spec had become wrong was refused for ever (422)."""
    sent = plain(MultiModalInferenceStatus(url="u"))
    assert isinstance(sent, dict)
    assert sent["url"] == "u"
    assert {} not in sent.values()


def test_a_failure_that_left_no_peak_has_the_one_last_reported() -> None:
    broken = pod("b", **ended(137, "", "OOMKilled", at=LATER))
    limits = {"resources": {"limits": {"memory": "12Gi"}}}
    name = broken["status"]["containerStatuses"][0]["name"]
    broken["spec"] = {"containers": [{"name": name, **limits}]}
    failure = last_failure([broken], {"b": 12_345 << 20})
    assert failure is not None
    assert (failure.memory_peak, failure.memory_limit) == ("12345Mi", "12Gi")


def test_budgets_show_planned_and_measured_with_their_difference() -> None:
    status = status_of(measured={"weights": 1 << 30, "enginePodMemory": 1 << 30})
    for name in ("weights", "enginePodMemory"):
        budget = status.budgets[name]
        assert budget.measured_bytes == 1 << 30
        assert budget.difference_bytes == (1 << 30) - budget.bytes
    assert status.budgets["kv"].measured_bytes is status.budgets["kv"].difference_bytes is None


def test_a_rolled_back_rollout_stalls_and_says_where_it_stands() -> None:
    text = "revision a/b did not serve in time, so the last good revision is back"
    values = {
        **serving(),
        "engine_pods": (),
        "deadline_exceeded": True,
        "message": text,
        "strategy": "FreeFirst: no spare device is known",
    }
    status = status_of(**values)
    stalled = next(c for c in status.conditions if c.type == "Stalled")
    assert stalled.reason == "ProgressDeadlineExceeded"
    assert text in stalled.message
    assert status.rollout_strategy.startswith("FreeFirst")


def test_modalities_are_those_that_are_allowed_and_that_the_model_takes() -> None:
    """It named audio for a model that only sees, because the default limits allow it."""
    obj = put(BASE, "spec.modalities", {"video": {"maxPerPrompt": 0}})

    def told(**observed: Any) -> tuple[str, ...]:
        found = status_of(obj, **serving(obj), **observed).model
        assert found is not None
        return found.modalities

    assert told() == ("image", "audio")
    assert told(takes=("image", "video")) == ("image",)
    assert told(takes=()) == ()


def test_what_went_wrong_comes_before_what_is_not_known_yet() -> None:
    """Regression: without a profile the budgets are unknown, and Ready said Profiling for ever of
    a model that can never be loaded; it was not Stalled either."""
    text = "model type mamba is not supported"
    observed = observed_of(reasons.UNSUPPORTED_MODEL, text)
    status = report(parse(BASE), None, None, desired(parse(BASE), None, FACTS), observed, 3)
    found = conditions(status)
    assert found["BudgetFits"] == "Unknown Profiling"
    assert found["Ready"] == "False UnsupportedModel"
    assert found["Stalled"] == "True UnsupportedModel"
    observed = observed_of(reasons.PROFILING)
    status = report(parse(BASE), None, None, desired(parse(BASE), None, FACTS), observed, 3)
    assert conditions(status)["Reconciling"] == "True Profiling"
