"""Errors of the API server and of the spec: what is retried, when, and whom the status names."""

from __future__ import annotations

import msgspec
import pytest

from foveal_operator.kube.errors import Conflict, Forbidden, Transient, UserError
from foveal_operator.kube.kinds import (
    BY_NAME,
    INFERENCE,
    POD,
)
from foveal_operator.kube.types import Obj
from foveal_operator.reconcile.reconciler import TOLD_FAILURES
from tests.support.operator_rig import (
    KEY,
    Kit,
    resource,
)
from tests.support.served_resource import add_pod, finish_profile, served, versions


async def test_a_bad_spec_leaves_what_runs_alone_and_is_stalled(kit: Kit) -> None:
    await served(kit, pods=True)
    before = versions(kit.cluster)

    def spoil(body: Obj) -> None:
        body["spec"]["engine"]["podTemplate"] = {"spec": {"hostNetwork": True}}

    kit.cluster.edit(INFERENCE, *KEY, spoil)
    assert set(await kit.settle()) <= {"success", "requeue_after"}, "no retries"
    assert kit.condition("SpecAccepted") == ("False", "InvalidSpec")
    assert kit.condition("Stalled") == ("True", "InvalidSpec")
    assert kit.condition("Available")[0] == "True", "older pods still serve, and are counted"
    after = versions(kit.cluster)
    del before["MultiModalInference/default/tiny"]
    assert {key: after[key] for key in before} == before
    events = [b for (k, _, _), b in kit.cluster.objects.items() if k == "Event"]
    assert [e["reason"] for e in events if e["type"] == "Warning"].count("InvalidSpec") == 1
    assert "docs/reference/reasons.md#invalidspec" in events[-1]["note"]


async def test_an_evicted_engine_is_told_and_counted_nowhere(kit: Kit) -> None:
    await served(kit, pods=True)
    (name,) = [name for name in kit.cluster.names("Pod") if name.startswith("tiny-engine")]

    def evict(body: Obj) -> None:
        body["status"] = {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}

    kit.cluster.edit(POD, "default", name, evict)
    await kit.settle()
    assert kit.condition("EnginesReady") == ("False", "Evicted")
    assert kit.status()["engine"].get("replicas", 0) == 0
    assert kit.status()["lastFailure"]["message"] == "Evicted: disk pressure"
    assert name in kit.cluster.names("Pod"), "its controller replaces it, not the rollout"


async def test_budgets_that_do_not_fit_create_no_pod(kit: Kit) -> None:
    body = resource()
    body["spec"]["engine"]["hostMemory"] = "256Mi"
    await served(kit, body)
    assert kit.condition("BudgetFits") == ("False", "BudgetMisfit")
    assert kit.condition("Stalled") == ("True", "BudgetMisfit")
    assert not kit.cluster.names("StatefulSet")
    assert not kit.cluster.names("Deployment")


async def test_a_spec_that_fits_no_more_leaves_pods_and_objects(kit: Kit) -> None:
    await served(kit, pods=True)

    def shrink(body: Obj) -> None:
        body["spec"]["engine"]["hostMemory"] = "256Mi"

    before = {k: v for k, v in versions(kit.cluster).items() if "Multi" not in k}
    kit.cluster.edit(INFERENCE, *KEY, shrink)
    await kit.settle()
    after = versions(kit.cluster)
    assert {key: after[key] for key in before} == before
    assert kit.condition("Stalled") == ("True", "BudgetMisfit")
    assert kit.condition("Available")[0] == "True"


async def test_transient_errors_are_retried_with_backoff(kit: Kit) -> None:
    """And told: a resource without any status counts as healthy."""
    await kit.start()
    kit.cluster.add(resource())
    for _ in range(4):
        kit.fail(Transient("busy", 503, 7.0), kind="ServiceAccount")
    # The status is new, so the watch brings the resource back once.
    assert await kit.settle() == ["error", "error"]
    assert kit.condition("Ready")[0] == "False"
    assert kit.operator.queue.core.next_due() == kit.time.now + 7.0, "Retry-After is kept to"
    for _ in range(2):
        assert await kit.settle() == [], "nobody comes early"
        kit.time.now += 60
        assert await kit.settle() == ["error"]
    kit.time.now += 60
    assert "error" not in await kit.settle()
    assert kit.cluster.names("ServiceAccount") == ["tiny"]


async def test_conflicts_are_tried_again_at_once_but_not_for_ever(kit: Kit) -> None:
    await kit.start()
    kit.cluster.add(resource())
    for _ in range(6):
        kit.fail(Conflict("modified", 409), kind="ServiceAccount")
    results = await kit.settle()
    assert results == ["requeue"] * 5 + ["error"]
    kit.time.now += 60
    assert "error" not in await kit.settle()


async def test_what_the_api_server_calls_wrong_is_the_users_to_mend(kit: Kit) -> None:
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    text = 'failed to create typed patch object: duplicate entries for key [name="A"]'
    for _ in range(9):
        kit.fail(UserError(text, 500), kind="StatefulSet")
    finish_profile(kit.cluster)
    await kit.settle()
    assert kit.condition("Stalled") == ("True", "Refused")
    assert kit.condition("BudgetFits")[0] == "True"
    assert kit.status()["budgets"], "they hold, whatever was refused"
    (message,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "SpecAccepted"]
    assert "StatefulSet tiny-engine" in message
    assert "duplicate entries" in message
    kit.cluster.failures.clear()
    kit.time.now += 70
    await kit.settle()
    assert kit.condition("SpecAccepted") == ("True", "Accepted")


async def test_what_is_refused_is_tried_ever_more_seldom(kit: Kit) -> None:
    """Once a minute for ever, a hundred such resources asked more than all others together."""
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    for _ in range(99):
        kit.fail(UserError("exceeded quota", 403), verb="APPLY", kind="StatefulSet")
    finish_profile(kit.cluster)
    delays = []
    for _ in range(8):
        await kit.settle()
        due = kit.operator.queue.core.next_due()
        assert due is not None
        delays.append(round(due - kit.time.now, 3))
        kit.time.now = due
    assert delays == sorted(delays)
    assert 60.0 <= delays[0] < 70.0
    assert delays[-1] >= 300.0
    kit.cluster.failures.clear()
    kit.cluster.edit(
        INFERENCE, "default", "tiny", lambda body: body["spec"].update(image="other/runtime:2")
    )
    await kit.settle()
    assert kit.condition("SpecAccepted") == ("True", "Accepted"), "an edit is looked at at once"


async def test_a_missing_right_is_retried_not_blamed_on_the_user(kit: Kit) -> None:
    await kit.start()
    kit.cluster.add(resource())
    kit.fail(Forbidden("may not", 403), kind="ServiceAccount")
    taken = kit.operator.queue.core.take(kit.time.now)
    assert taken is not None
    assert await kit.operator.workers.once(taken[0]) == "error"
    kit.operator.queue.done(taken[0])
    assert kit.condition("SpecAccepted")[0] == "True"
    (message,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "Reconciling"]
    assert "ServiceAccount tiny: may not" in message
    assert kit.condition("Ready") == ("False", "MissingRight")
    kit.time.now += 60
    assert "error" not in await kit.settle()


async def test_a_pod_that_fails_is_named(kit: Kit) -> None:
    await served(kit)
    add_pod(kit.cluster, "engine", ready=False)

    def oom(body: Obj) -> None:
        ended = {
            "exitCode": 137, "reason": "OOMKilled", "message": "x memory_peak=3Gi",
            "finishedAt": "2026-01-01T00:00:09Z",
        }  # fmt: skip
        body["status"]["containerStatuses"] = [
            {"name": "engine", "state": {}, "lastState": {"terminated": ended}}
        ]

    kit.cluster.edit(POD, "default", "tiny-engine-0", oom, manager="kubelet")
    await kit.settle()
    assert kit.condition("EnginesReady") == ("False", "OOMKilled")
    assert kit.status()["lastFailure"]["pod"] == "tiny-engine-0"
    assert kit.status()["lastFailure"]["memoryPeak"] == "3Gi"


async def test_an_error_that_lasts_is_told_and_goes_when_it_goes(kit: Kit) -> None:
    """A resource that served stayed Ready while each pass over it failed, for hours."""
    await served(kit, pods=True)
    kit.reports = msgspec.structs.replace(kit.reports, sessions_up=1, sessions_wanted=1)
    await kit.resync()
    assert kit.condition("Ready")[0] == "True"
    kit.cluster.remove(BY_NAME["Service"], "default", "tiny")
    for _ in range(40):
        kit.fail(Transient("etcdserver: no leader", 500), kind="Service")
    for count in range(TOLD_FAILURES):
        assert kit.condition("Ready")[1] != "ReconcileFailed", count
        kit.operator.queue.add(KEY)
        taken = kit.operator.queue.core.take(kit.time.now)
        assert taken is not None
        assert await kit.operator.workers.once(taken[0]) == "error"
        kit.operator.queue.done(taken[0])
    assert kit.condition("Ready") == ("False", "ReconcileFailed")
    assert kit.condition("EnginesReady")[0] == "True", "the rest is told as it is"
    (message,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "Ready"]
    assert "Service tiny: etcdserver: no leader" in message
    kit.cluster.failures.clear()
    kit.time.now += 400
    await kit.settle()
    assert kit.condition("Ready")[0] == "True"
    assert kit.condition("Reconciling") == ("", "")


@pytest.mark.parametrize("before", ["served", "new"])
async def test_a_defect_is_told_at_once(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """It ended in a line of the log alone, again and again."""
    if before == "served":
        await served(kit, pods=True)
    else:
        await kit.start()
        kit.cluster.add(resource())

    async def fails(*_: object) -> None:
        raise KeyError("spec.nowhere")

    monkeypatch.setattr(kit.operator.reconciler._decider, "decide", fails)
    kit.operator.queue.add(KEY)
    taken = kit.operator.queue.core.take(kit.time.now)
    assert taken is not None
    assert await kit.operator.workers.once(taken[0]) == "error"
    assert kit.condition("Ready") == ("False", "ReconcileFailed")
    (message,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "Reconciling"]
    assert "KeyError: 'spec.nowhere'" in message
    assert kit.condition("EnginesReady")[0] == ("True" if before == "served" else "")
    labels = {"namespace": KEY[0], "name": KEY[1]}
    told = {"type": "Ready", "status": "False"}
    assert kit.operator.telemetry.value("foveal_inference_condition", **labels, **told) == 1
