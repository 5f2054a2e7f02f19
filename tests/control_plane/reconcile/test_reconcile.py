"""The recipe over an API server in memory: what is written, and what is never touched."""

from __future__ import annotations

import copy

import msgspec
import pytest

from foveal_operator.api.status import MultiModalInferenceStatus
from foveal_operator.kube.errors import Conflict, Forbidden, Transient, UserError
from foveal_operator.kube.kinds import (
    BY_NAME,
    DEPLOYMENT,
    INFERENCE,
    JOB,
    POD,
)
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import REVISION_LABEL, SESSION_GROUP_LABEL
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import (
    EXAMPLES,
    KEY,
    OPTIONAL_KINDS,
    Kit,
    resource,
    with_claim,
)

PROFILE = (EXAMPLES / "profiles" / "tiny-vlm.json").read_text(encoding="utf-8")
EXPECTED = {
    "Deployment": ["tiny-frontend"],
    "NetworkPolicy": ["tiny-engine", "tiny-frontend"],
    "Secret": ["tiny-curve"],
    "Service": ["tiny", "tiny-engine"],
    "ServiceAccount": ["tiny"],
    "StatefulSet": ["tiny-engine"],
}


def versions(cluster: FakeCluster) -> dict[str, str]:
    return {"/".join(k): b["metadata"]["resourceVersion"] for k, b in cluster.objects.items()}


def finish_profile(cluster: FakeCluster, text: str = "") -> None:
    """What Job controller and kubelet do: the profile Job's pod ends with the document."""
    (name,) = [n for n in cluster.names("Job") if "-profile-" in n]
    job = cluster.body("Job", name)
    labels = {**job["spec"]["template"]["metadata"]["labels"], "job-name": name}
    ref = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    ref["controller"] = True  # type: ignore[assignment]
    ended = {"exitCode": 0, "message": text or PROFILE, "finishedAt": "2026-01-01T00:01:00Z"}
    cluster.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-x", "namespace": "default", "labels": labels,
                "ownerReferences": [ref],
            },
            "spec": copy.deepcopy(job["spec"]["template"]["spec"]),
            "status": {
                "phase": "Succeeded",
                "containerStatuses": [{"name": "profile", "state": {"terminated": ended}}],
            },
        }
    )  # fmt: skip

    def complete(body: Obj) -> None:
        conditions = [{"type": "Complete", "status": "True"}]
        body["status"] = {"succeeded": 1, "conditions": conditions}

    cluster.edit(JOB, "default", name, complete, manager="kube-controller-manager")


def add_pod(cluster: FakeCluster, role: str, *, ready: bool = True) -> Obj:
    """A pod as the workload's present template makes it."""
    kind = "StatefulSet" if role == "engine" else "Deployment"
    workload = cluster.body(kind, f"tiny-{role}")
    template = copy.deepcopy(workload["spec"]["template"])
    number = sum(1 for name in cluster.names("Pod") if name.startswith(f"tiny-{role}-"))
    return cluster.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": f"tiny-{role}-{number}",
                "namespace": "default",
            },
            "spec": template["spec"],
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            },
        }
    )


def see_template(cluster: FakeCluster) -> None:
    """The StatefulSet's controller has seen the template."""

    def change(body: Obj) -> None:
        body["status"] = {"observedGeneration": body["metadata"]["generation"]}

    cluster.edit(BY_NAME["StatefulSet"], "default", "tiny-engine", change, manager="controller")


async def served(kit: Kit, body: Obj | None = None, *, pods: bool = False) -> Kit:
    """A resource with everything in place."""
    await kit.start()
    kit.cluster.add(body or resource())
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    if pods:
        add_pod(kit.cluster, "engine")
        add_pod(kit.cluster, "frontend")
        await kit.settle()
    return kit


async def test_first_the_profile_then_everything(kit: Kit) -> None:
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    assert kit.condition("BudgetFits") == ("Unknown", "Profiling")
    assert not kit.cluster.names("StatefulSet")
    finish_profile(kit.cluster)
    await kit.settle()
    for kind, names in EXPECTED.items():
        assert kit.cluster.names(kind) == names
    assert kit.condition("BudgetFits")[0] == "True"
    assert kit.condition("Ready") == ("False", "Starting")
    assert kit.condition("Reconciling")[0] == "True"
    add_pod(kit.cluster, "engine")
    add_pod(kit.cluster, "frontend")
    await kit.settle()
    assert kit.condition("Ready") == ("True", "Ready")
    assert kit.condition("Reconciling") == ("", "")
    kit.cluster.check_integrity()
    kit.operator.caches.check_integrity()


async def test_the_first_status_follows_the_first_pass(kit: Kit) -> None:
    """No conditions at all mean "healthy" to kstatus."""
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    assert kit.status()["observedGeneration"] == 1
    assert kit.condition("Ready")[0] == "False"


async def test_at_rest_nothing_is_written(kit: Kit) -> None:
    await served(kit, pods=True)
    before, writes, calls = (
        versions(kit.cluster),
        list(kit.cluster.writes),
        len(kit.cluster.calls),
    )
    for _ in range(3):
        kit.operator.queue.add(KEY)
        await kit.settle()
    assert versions(kit.cluster) == before
    assert kit.cluster.writes == writes
    assert kit.cluster.calls[calls:] == [], "not even a request"


async def test_a_restart_changes_nothing(kit: Kit) -> None:
    await served(kit, pods=True)
    before = versions(kit.cluster)
    again = Kit(kit.cluster)
    again.time.now += 3600
    await again.start()
    await again.settle()
    assert versions(kit.cluster) == before


async def test_an_operator_upgrade_restarts_nothing(kit: Kit) -> None:
    """A new default image is for new resources: the basis keeps the old one's."""
    await served(kit, pods=True)
    before = versions(kit.cluster)
    upgraded = Kit(kit.cluster, image="foveal/runtime:2")
    await upgraded.start()
    await upgraded.settle()
    assert versions(kit.cluster) == before
    other = resource()
    other["metadata"]["name"] = "other"
    kit.cluster.add(other)
    await upgraded.settle()
    (name,) = [n for n in kit.cluster.names("Job") if n.startswith("other-profile")]
    pod = kit.cluster.body("Job", name)["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "foveal/runtime:2"


async def test_frontend_changes_touch_no_engine(kit: Kit) -> None:
    await served(kit, pods=True)
    before = versions(kit.cluster)

    def change(body: Obj) -> None:
        body["spec"]["frontend"]["mediaWorkers"] = 2
        body["spec"]["frontend"]["hostMemory"] = "4Gi"

    kit.cluster.edit(INFERENCE, *KEY, change)
    await kit.settle()
    after = versions(kit.cluster)
    assert after["StatefulSet/default/tiny-engine"] == before["StatefulSet/default/tiny-engine"]
    assert after["Deployment/default/tiny-frontend"] != before["Deployment/default/tiny-frontend"]
    assert "tiny-engine-0" in kit.cluster.names("Pod")


@pytest.mark.parametrize("kind", [*sorted(EXPECTED.keys() - {"Secret"}), "ConfigMap"])
async def test_a_deleted_object_comes_back(kind: str, kit: Kit) -> None:
    await served(kit)
    names = kit.cluster.names(kind)
    for name in names:
        kit.cluster.remove(BY_NAME[kind], "default", name)
    await kit.settle()
    if kind == "ConfigMap":
        # The profile was among them: it is made once more.
        finish_profile(kit.cluster)
        await kit.settle()
    assert kit.cluster.names(kind) == names


@pytest.mark.parametrize("kind", [*sorted(EXPECTED.keys() - {"Secret"}), "ConfigMap"])
async def test_a_changed_field_of_ours_is_put_right_and_others_stay(kind: str, kit: Kit) -> None:
    await served(kit)
    name = kit.cluster.names(kind)[0]
    before = kit.cluster.body(kind, name)["metadata"]["labels"]

    def meddle(body: Obj) -> None:
        labels = body["metadata"]["labels"]
        labels["app.kubernetes.io/name"] = "somebody"
        labels["team"] = "mine"
        if kind in ("StatefulSet", "Deployment"):
            body["spec"]["template"]["spec"]["serviceAccountName"] = "admin"

    kit.cluster.edit(BY_NAME[kind], "default", name, meddle)
    await kit.settle()
    body = kit.cluster.body(kind, name)
    assert body["metadata"]["labels"] == {**before, "team": "mine"}
    if kind in ("StatefulSet", "Deployment"):
        assert body["spec"]["template"]["spec"]["serviceAccountName"] == "tiny"
        assert kit.telemetry.value("foveal_operator_drift_repairs_total", kind=kind) == 1


async def test_what_is_wanted_no_more_is_pruned(kit: Kit) -> None:
    body = resource()
    body["spec"]["frontend"]["replicas"] = 2
    await served(kit, body)
    assert kit.cluster.names("PodDisruptionBudget") == ["tiny-frontend"]

    def change(body: Obj) -> None:
        body["spec"]["frontend"]["replicas"] = 1
        body["spec"]["security"] = {"networkPolicy": "Disabled"}

    kit.cluster.edit(INFERENCE, *KEY, change)
    await kit.settle()
    assert kit.cluster.names("PodDisruptionBudget") == []
    assert kit.cluster.names("NetworkPolicy") == []
    deletes = [call for call in kit.cluster.calls if call[0] == "DELETE"]
    for _, kind, name in deletes:
        at = kit.cluster.calls.index(("DELETE", kind, name))
        assert kit.cluster.calls[at - 1] == ("GET", kind, name), "looked at live just before"


async def test_what_is_not_ours_is_never_pruned(kit: Kit) -> None:
    await served(kit)
    labels = {
        "app.kubernetes.io/managed-by": "foveal-operator",
        "app.kubernetes.io/instance": "tiny",
    }
    for kind in ("ConfigMap", "Service", "PersistentVolumeClaim"):
        kind_ = BY_NAME[kind]
        metadata = {"name": "foreign", "namespace": "default", "labels": dict(labels)}
        kit.cluster.add({"apiVersion": kind_.api_version, "kind": kind, "metadata": metadata})
    await kit.resync()
    for kind in ("ConfigMap", "Service", "PersistentVolumeClaim"):
        assert "foreign" in kit.cluster.names(kind)


async def test_a_stale_cache_deletes_nothing(kit: Kit) -> None:
    """The cache says that an old object is there; live, its name belongs to a new one."""
    body = resource()
    body["spec"]["frontend"]["replicas"] = 2
    await served(kit, body)
    kit.hears = False
    kit.cluster.remove(BY_NAME["PodDisruptionBudget"], "default", "tiny-frontend")
    mine = {"name": "tiny-frontend", "namespace": "default"}
    kit.cluster.add({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": mine})
    kit.hears = True

    def change(body: Obj) -> None:
        body["spec"]["frontend"]["replicas"] = 1

    kit.cluster.edit(INFERENCE, *KEY, change)
    await kit.settle()
    assert kit.cluster.names("PodDisruptionBudget") == ["tiny-frontend"]


async def test_a_missed_deletion_is_found_by_the_next_list(kit: Kit) -> None:
    """kopf tells no deletion that fell into a gap of its watch."""
    await served(kit)
    kit.hears = False
    kit.cluster.remove(BY_NAME["Service"], "default", "tiny")
    kit.hears = True
    await kit.settle()
    assert kit.cluster.names("Service") == ["tiny-engine"]
    await kit.resync()
    assert kit.cluster.names("Service") == ["tiny", "tiny-engine"]
    missed = kit.telemetry.value("foveal_operator_watch_missed_total", kind="Service")
    assert missed == 1


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


async def test_paused_means_hands_off(kit: Kit) -> None:
    await served(kit, pods=True)

    def pause(body: Obj) -> None:
        body["spec"]["paused"] = True
        body["spec"]["frontend"]["hostMemory"] = "4Gi"

    before = {k: v for k, v in versions(kit.cluster).items() if "Multi" not in k}
    kit.cluster.edit(INFERENCE, *KEY, pause)
    kit.cluster.remove(BY_NAME["NetworkPolicy"], "default", "tiny-engine")
    del before["NetworkPolicy/default/tiny-engine"]
    await kit.settle()
    after = versions(kit.cluster)
    assert {key: after[key] for key in before} == before
    assert kit.cluster.names("NetworkPolicy") == ["tiny-frontend"]
    assert kit.condition("Ready") == ("False", "Paused")

    def go_on(body: Obj) -> None:
        body["spec"]["paused"] = False

    kit.cluster.edit(INFERENCE, *KEY, go_on)
    await kit.settle()
    assert kit.cluster.names("NetworkPolicy") == EXPECTED["NetworkPolicy"]


async def test_the_key_secret_is_created_once_and_never_read(kit: Kit) -> None:
    await served(kit)
    data = kit.cluster.body("Secret", "tiny-curve")["stringData"]
    assert {len(value) for value in data.values()} == {40}
    again = Kit(kit.cluster)
    await again.start()
    await again.settle()
    assert kit.cluster.body("Secret", "tiny-curve")["stringData"] == data
    verbs = {verb for verb, kind, _ in kit.cluster.calls if kind == "Secret"}
    assert verbs == {"POST"}


def session_group(kit: Kit, kind: str, name: str) -> str:
    labels = kit.cluster.body(kind, name)["spec"]["template"]["metadata"]["labels"]
    return str(labels[SESSION_GROUP_LABEL])


def set_phase(kit: Kit, name: str, phase: str) -> None:
    def change(body: Obj) -> None:
        body["status"] = {"phase": phase}

    kit.cluster.edit(POD, "default", name, change, manager="kubelet")


async def test_a_key_secret_that_vanished_under_pods_replaces_them_all(kit: Kit) -> None:
    """New keys under the old revision would let new pods start that the old ones refuse."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    await kit.resync()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    after = session_group(kit, "StatefulSet", "tiny-engine")
    assert after != before
    events = [body for key, body in kit.cluster.objects.items() if key[0] == "Event"]
    assert "KeysReplaced" in {body["reason"] for body in events}
    writes = len(kit.cluster.writes)
    await kit.resync()
    assert len(kit.cluster.writes) == writes, "a Secret that is there is left alone"


async def test_a_key_secret_that_no_pod_has_used_is_simply_made_again(kit: Kit) -> None:
    """Pods wait for it: nothing runs with other keys, so nothing need be replaced."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    for kind, _, name in list(kit.cluster.objects):
        if kind == "Pod":
            set_phase(kit, name, "Pending")
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    kit.time.now += 31
    await kit.settle()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    assert session_group(kit, "StatefulSet", "tiny-engine") == before


async def test_a_full_quota_does_not_make_keys_look_lost(kit: Kit) -> None:
    """The API server counts before it looks whether the name is taken."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    kit.fail(UserError("exceeded quota: secrets", 403), kind="Secret")
    await kit.resync()
    assert session_group(kit, "StatefulSet", "tiny-engine") == before
    assert kit.condition("SpecAccepted")[0] == "True"


async def test_an_operator_that_dies_between_note_and_keys_mixes_none(kit: Kit) -> None:
    """The generation is noted before the keys are made; its successor goes on from there."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    kit.operator.reconciler.doubt()
    await kit.operator.reconciler.reconcile(KEY)  # notes it, and dies
    assert kit.cluster.names("Secret") == []
    again = Kit(kit.cluster)
    await again.start()
    await again.settle()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    assert session_group(kit, "StatefulSet", "tiny-engine") != before
    tries = sum(1 for verb, kind, _ in kit.cluster.calls if (verb, kind) == ("POST", "Secret"))
    assert tries == 3, "made, missed, made"


async def test_a_fetched_models_claim_outlives_the_resource(kit: Kit) -> None:
    body = resource(model={"uri": "hf://org/model", "cache": {"size": "1Gi"}})
    await kit.start()
    kit.cluster.add(body)
    await kit.settle()
    claim = kit.cluster.body("PersistentVolumeClaim", "tiny-model")
    assert "ownerReferences" not in claim["metadata"]
    kit.cluster.remove(INFERENCE, *KEY)
    await kit.settle()
    assert "tiny-model" in kit.cluster.names("PersistentVolumeClaim")
    assert kit.cluster.names("ServiceAccount") == []


async def test_a_users_claim_is_looked_for_until_it_is_there(kit: Kit) -> None:
    kit.cluster.remove(BY_NAME["PersistentVolumeClaim"], "default", "models")
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    assert kit.condition("ModelReady") == ("False", "ClaimPending")
    with_claim(kit.cluster)
    kit.time.now += 61
    await kit.settle()
    assert kit.condition("ModelReady") == ("False", "Profiling")
    assert [n for n in kit.cluster.names("Job") if "-profile-" in n]


async def test_the_profile_job_goes_when_its_result_is_kept(kit: Kit) -> None:
    await served(kit)
    assert kit.cluster.names("Job") == []
    (name,) = [n for n in kit.cluster.names("ConfigMap") if "-profile-" in n]
    assert kit.cluster.body("ConfigMap", name)["immutable"] is True


async def test_a_deleted_resource_is_forgotten_without_a_write(kit: Kit) -> None:
    await served(kit, pods=True)
    kit.cluster.remove(INFERENCE, *KEY)
    calls = len(kit.cluster.calls)
    await kit.settle()
    assert kit.cluster.calls[calls:] == []
    text = b"".join(kit.telemetry.exposition()).decode()
    assert 'name="tiny"' not in text, "its series are gone"


async def test_a_namesake_made_at_once_starts_afresh(kit: Kit) -> None:
    await served(kit)
    kit.cluster.remove(INFERENCE, *KEY)
    kit.cluster.add(resource())
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    kit.cluster.check_integrity()
    uid = kit.cluster.body("MultiModalInference", "tiny")["metadata"]["uid"]
    sts = kit.cluster.body("StatefulSet", "tiny-engine")
    assert sts["metadata"]["ownerReferences"][0]["uid"] == uid
    assert kit.cluster.names("Secret") == ["tiny-curve"]


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
        kit.fail(UserError("exceeded quota", 403), kind="StatefulSet")
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
    kit.time.now += 60
    assert "error" not in await kit.settle()


async def test_optional_apis_are_used_when_they_appear() -> None:
    kit = await served(Kit())
    assert "PodMonitor" not in {kind.name for kind in kit.watched}
    kit.cluster.missing = OPTIONAL_KINDS - {"PodMonitor"}
    await kit.resync()
    assert kit.cluster.names("PodMonitor") == ["tiny"]
    assert "PodMonitor" in {kind.name for kind in kit.watched}


async def test_old_documents_go_when_nothing_uses_them(kit: Kit) -> None:
    await served(kit)
    for workers in range(2, 8):

        def change(body: Obj, workers: int = workers) -> None:
            body["spec"]["frontend"]["mediaWorkers"] = workers
            body["spec"]["frontend"]["hostMemory"] = "8Gi"

        kit.cluster.edit(INFERENCE, *KEY, change)
        await kit.settle()
    frontends = [n for n in kit.cluster.names("ConfigMap") if n.startswith("tiny-frontend-")]
    assert 1 <= len(frontends) <= 4
    used = kit.cluster.body("Deployment", "tiny-frontend")["spec"]["template"]["spec"]["volumes"]
    (name,) = [v["configMap"]["name"] for v in used if "configMap" in v]
    assert name in frontends


def scaled() -> Obj:
    body = resource()
    body["spec"]["frontend"]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 9}
    return body


def scale(cluster: FakeCluster, replicas: int) -> None:
    def change(body: Obj) -> None:
        body["spec"]["replicas"] = replicas

    cluster.edit(DEPLOYMENT, "default", "tiny-frontend", change, manager="kube-controller-manager")


async def test_the_autoscaler_gets_the_replicas_and_none_is_lost(kit: Kit) -> None:
    """Leaving the field out while we are its only owner would reset it to one."""
    await served(kit)

    def automatic(body: Obj) -> None:
        body["spec"]["frontend"] = scaled()["spec"]["frontend"]

    scale(kit.cluster, 4)
    await kit.settle()
    kit.cluster.edit(INFERENCE, *KEY, automatic)
    await kit.settle()
    live = [kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"]]
    for wanted in (5, 7, 3):
        scale(kit.cluster, wanted)
        await kit.settle()
        live.append(kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"])
    assert live[1:] == [5, 7, 3]
    assert kit.cluster.names("HorizontalPodAutoscaler") == ["tiny-frontend"]
    owners = kit.cluster.owners["Deployment", "default", "tiny-frontend"]
    assert ("spec", "replicas") not in owners["foveal-operator"]


async def test_what_the_autoscaler_says_of_itself_is_in_the_status(kit: Kit) -> None:
    await served(kit, scaled())
    assert kit.condition("ScalingActive") == ("Unknown", "Waiting")

    def inert(body: Obj) -> None:
        body["status"] = {
            "conditions": [{"type": "ScalingActive", "status": "False", "message": "no metrics"}]
        }

    kit.cluster.edit(
        BY_NAME["HorizontalPodAutoscaler"], *KEY[:1], "tiny-frontend", inert, manager="controller"
    )
    await kit.settle()
    assert kit.condition("ScalingActive") == ("False", "AutoscalerInert")
    events = [b for (k, _, _), b in kit.cluster.objects.items() if k == "Event"]
    said = [e["note"] for e in events if e["reason"] == "AutoscalerInert"]
    assert len(said) == 1
    assert "HorizontalPodAutoscaler tiny-frontend: no metrics" in said[0]
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body["spec"]["frontend"].pop("autoscaling"))
    await kit.settle()
    assert kit.condition("ScalingActive") == ("", "")


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


async def test_an_engine_change_replaces_the_engine_by_its_uid(kit: Kit) -> None:
    await served(kit, pods=True)
    old = kit.cluster.body("Pod", "tiny-engine-0")["metadata"]

    def change(body: Obj) -> None:
        body["spec"]["engine"]["cpu"] = "3"

    kit.cluster.edit(INFERENCE, *KEY, change)
    for _ in range(30):
        kit.time.now += 5
        see_template(kit.cluster)
        await kit.settle()
        if "tiny-engine-0" not in kit.cluster.names("Pod"):
            break
    template = kit.cluster.body("StatefulSet", "tiny-engine")["spec"]["template"]
    assert template["metadata"]["labels"][REVISION_LABEL] != old["labels"][REVISION_LABEL]
    assert "tiny-engine-0" not in kit.cluster.names("Pod")
    assert kit.status()["rolloutStrategy"]


async def test_the_status_is_what_the_schema_takes(kit: Kit) -> None:
    """Round trip: what is stored reads back as the typed status."""
    await served(kit, pods=True)
    msgspec.convert(kit.status(), MultiModalInferenceStatus)


async def test_the_users_object_keeps_every_byte_but_its_status(kit: Kit) -> None:
    body = resource()
    await served(kit, copy.deepcopy(body), pods=True)
    live = kit.cluster.body("MultiModalInference", "tiny")
    assert live["spec"] == body["spec"]
    assert set(live["metadata"]) == {
        "name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp",
        "managedFields",
    }  # fmt: skip


@pytest.fixture
def kit() -> Kit:
    return Kit()
