"""Pruning: what is wanted no more goes, and nothing that is not ours."""

from __future__ import annotations

from foveal_operator.kube.kinds import (
    BY_NAME,
    INFERENCE,
)
from foveal_operator.kube.types import Obj
from foveal_operator.model.job_state import TTL_SECONDS
from tests.support.operator_rig import (
    KEY,
    Kit,
    resource,
)
from tests.support.served_resource import served


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


async def test_the_profile_job_goes_when_its_result_is_kept(kit: Kit) -> None:
    await served(kit)
    (job,) = kit.cluster.names("Job")
    assert kit.cluster.body("Job", job)["spec"]["ttlSecondsAfterFinished"] == TTL_SECONDS
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


async def ask_for_workers(kit: Kit) -> None:
    """Six start-up documents of frontends, one a minute."""
    for workers in range(2, 8):
        kit.cluster.now_text = lambda workers=workers: f"2026-01-01T00:0{workers}:00Z"

        def change(body: Obj, workers: int = workers) -> None:
            body["spec"]["frontend"]["mediaWorkers"] = workers
            body["spec"]["frontend"]["hostMemory"] = "8Gi"

        kit.cluster.edit(INFERENCE, *KEY, change)
        await kit.settle()


async def test_a_document_that_a_pod_uses_stays_however_old_it_is(kit: Kit) -> None:
    await served(kit, pods=True)
    pods = [pod for (kind, _, _), pod in kit.cluster.objects.items() if kind == "Pod"]
    used = {v["configMap"]["name"] for pod in pods for v in pod["spec"]["volumes"]
            if "configMap" in v}  # fmt: skip
    await ask_for_workers(kit)
    found = set(kit.cluster.names("ConfigMap"))
    assert used <= found
    assert len({name for name in found - used if name.startswith("tiny-frontend-")}) == 3


async def test_old_documents_go_when_nothing_uses_them(kit: Kit) -> None:
    await served(kit)
    await ask_for_workers(kit)
    frontends = [n for n in kit.cluster.names("ConfigMap") if n.startswith("tiny-frontend-")]
    made = [kit.cluster.body("ConfigMap", n)["metadata"]["creationTimestamp"] for n in frontends]
    assert {f"2026-01-01T00:0{n}:00Z" for n in (5, 6, 7)} == set(made), "the three youngest"
    used = kit.cluster.body("Deployment", "tiny-frontend")["spec"]["template"]["spec"]["volumes"]
    (name,) = [v["configMap"]["name"] for v in used if "configMap" in v]
    assert name in frontends


async def test_what_was_pruned_and_is_wanted_again_is_no_drift(kit: Kit) -> None:
    """An autoscaler between one engine and two made FovealDriftFight of its PodDisruptionBudget."""

    async def ask(replicas: int) -> list[str]:
        def change(body: Obj) -> None:
            body["spec"]["frontend"]["replicas"] = replicas

        kit.cluster.edit(INFERENCE, *KEY, change)
        await kit.settle()
        return kit.cluster.names("PodDisruptionBudget")

    await served(kit)
    for _ in range(2):
        assert await ask(2) == ["tiny-frontend"]
        assert await ask(1) == []
    kind = "PodDisruptionBudget"
    assert not kit.telemetry.value("foveal_operator_drift_repairs_total", kind=kind)
