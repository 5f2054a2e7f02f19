"""Jobs that have ended well are the cluster's to delete; what they did is recorded elsewhere."""

from __future__ import annotations

import pytest

from foveal_operator.api import reasons
from foveal_operator.kube.errors import Conflict
from foveal_operator.kube.kinds import CLAIM, CONFIG_MAP, JOB
from foveal_operator.kube.types import Obj
from foveal_operator.model.flow import CLAIM_KEY, PROFILE_KEY, ModelDecision
from foveal_operator.model.job_state import RECORDED, TTL_SECONDS
from foveal_operator.reconcile.apply import ObjectError, Owner
from tests.support.operator_rig import Kit, resource
from tests.support.served_resource import finish_fetch, finish_profile, served, versions
from tests.support.stored_objects import FETCHED, PROFILE, StoredObjects

HUB = {"uri": "hf://org/tiny", "cache": {"size": "1Gi"}}


def ttl(found: ModelDecision) -> dict[str, int | None]:
    return {
        owned.key[2]: owned.body["spec"].get("ttlSecondsAfterFinished")
        for owned in found.objects
        if owned.key[0] == "Job"
    }


def fetched(uid: str = "claim-1") -> StoredObjects:
    """A model that has been fetched and profiled, and whose Jobs are still there."""
    stored = StoredObjects(FETCHED).claim(uid=uid).job("fetch", "Complete")
    stored.job("profile", "Complete").ended("profile", 0, PROFILE)
    return stored.keep(stored.decide())


def test_a_job_gets_a_time_to_live_only_once_its_result_is_recorded() -> None:
    """With one from the start, the result would be lost with an operator that is away so long."""
    stored = StoredObjects(FETCHED).claim(uid="claim-1").job("fetch", "Complete")
    found = stored.decide()
    assert ttl(found)[stored.names["fetch"]] is None
    found = stored.keep(found).decide()
    assert ttl(found)[stored.names["fetch"]] == TTL_SECONDS
    assert ttl(found)[stored.names["profile"]] is None
    found = fetched().decide()
    assert set(ttl(found).values()) == {TTL_SECONDS}
    for owned in found.objects:
        if owned.key[0] == "Job":
            assert owned.body["metadata"]["uid"], "this very Job or none: never a new one"


def test_a_time_to_live_of_an_admission_policy_says_nothing_of_a_record() -> None:
    """Such a Job counted as recorded, was deleted with its result unread, and ran for ever."""
    stored = StoredObjects(FETCHED).claim(uid="claim-1").job("fetch", "Complete")
    job = stored.live["Job", stored.names["fetch"]]
    job["spec"] = {"ttlSecondsAfterFinished": 900}
    found = stored.decide()
    assert found.delete == ()
    found = stored.keep(found).decide()
    assert found.delete == ()
    (recorded,) = [owned for owned in found.objects if owned.key[0] == "Job"][:1]
    assert recorded.body["spec"]["ttlSecondsAfterFinished"] == 900, "the policy's"
    assert recorded.body["metadata"]["annotations"] == {RECORDED: "true"}
    # Whose record is deleted after that runs once more.
    job["metadata"]["annotations"] = {RECORDED: "true"}
    del stored.live["ConfigMap", stored.names["record"]]
    assert stored.decide().delete == (("Job", stored.names["fetch"], "uid-fetch"),)


def test_a_job_that_expires_is_not_written_again() -> None:
    stored = fetched()
    for owned in stored.decide().objects:
        if owned.key[0] == "Job":
            assert owned.policy == "Apply"
            stored.live["Job", owned.key[2]].update(
                spec=owned.body["spec"], metadata=owned.body["metadata"]
            )
    found = stored.decide()
    assert {o.policy for o in found.objects if o.key[0] == "Job"} == {"Keep"}


def test_a_record_with_more_data_is_a_record() -> None:
    stored = fetched().without_jobs()
    record = stored.live["ConfigMap", stored.names["record"]]
    stored.live["ConfigMap", stored.names["record"]] = {
        **record, "data": {**record["data"], "note": "of somebody's"},
    }  # fmt: skip
    assert stored.decide().reason is reasons.RESOLVED


def test_without_its_jobs_a_model_is_not_fetched_or_profiled_again() -> None:
    found = fetched().without_jobs().decide()
    assert (found.reason, found.model_ready) == (reasons.RESOLVED, True)
    assert ttl(found) == {}


def test_a_failed_job_stays_and_says_why() -> None:
    stored = StoredObjects(FETCHED).claim(uid="c").job("fetch", "Failed", ago=9e6)
    found = stored.ended("fetch", 2, "hf://a/b: 404 Client Error").decide()
    assert (found.reason, found.delete) == (reasons.NOT_FOUND, ())
    assert ttl(found) == {stored.names["fetch"]: None}


def test_a_new_claim_is_filled_again() -> None:
    """Regression: a claim that was made anew counted as filled, by the old one's Job."""
    stored = fetched().without_jobs().claim(uid="claim-2")
    found = stored.decide()
    assert (found.reason, found.model_ready) == (reasons.DOWNLOADING, False)
    assert set(ttl(found)) == {stored.names["fetch"]}
    # The old Job is still there: it ended before the claim was made.
    stored = fetched().job("fetch", "Complete", ago=100).claim(uid="claim-2", ago=50)
    assert stored.decide().delete == (("Job", stored.names["fetch"], "uid-fetch"),)
    # And this one after that.
    found = stored.job("fetch", "Complete", ago=10).decide()
    assert found.delete == ()
    assert stored.keep(found).decide().reason is reasons.RESOLVED
    assert stored.live["ConfigMap", stored.names["record"]]["data"] == {CLAIM_KEY: "claim-2"}


def test_a_record_that_is_deleted_has_the_work_done_again() -> None:
    stored = fetched().without_jobs()
    del stored.live["ConfigMap", stored.names["record"]]
    assert stored.decide().reason is reasons.DOWNLOADING
    stored = fetched().without_jobs()
    del stored.live["ConfigMap", stored.names["ConfigMap"]]
    assert stored.decide().reason is reasons.PROFILING


async def served_from_the_hub() -> Kit:
    kit = await served(Kit(), resource(model=HUB), pods=True)
    assert kit.condition("Ready") == ("True", "Ready")
    return kit


def remove_jobs(kit: Kit) -> None:
    """What the controller of finished Jobs does after an hour."""
    for name in kit.cluster.names("Job"):
        assert kit.cluster.body("Job", name)["spec"]["ttlSecondsAfterFinished"] == TTL_SECONDS
        kit.cluster.remove(JOB, "default", name)


async def test_jobs_that_the_cluster_has_removed_are_not_run_again() -> None:
    kit = await served_from_the_hub()
    assert len(kit.cluster.names("Job")) == 2
    remove_jobs(kit)
    before = versions(kit.cluster)
    await kit.settle()
    await kit.resync()
    newer = Kit(kit.cluster)
    await newer.start()
    await newer.settle()
    assert newer.cluster.names("Job") == []
    # An apply of the claim moves its version even where it changes no field.
    changed = {k for k, v in versions(kit.cluster).items() if before.get(k) != v}
    assert {key for key in changed if "PersistentVolumeClaim" not in key} == set()
    assert newer.condition("Ready") == ("True", "Ready")


async def test_another_model_is_fetched_and_the_way_back_too() -> None:
    kit = await served_from_the_hub()
    remove_jobs(kit)
    await kit.settle()

    def serve(uri: str) -> None:
        def change(body: Obj) -> None:
            body["spec"]["model"]["uri"] = uri

        kit.cluster.edit(kit.watched[0], "default", "tiny", change, manager="user")

    serve("hf://org/other")
    await kit.settle()
    fetch = finish_fetch(kit.cluster)
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    remove_jobs(kit)
    await kit.settle()
    records = [
        name
        for name in kit.cluster.names("ConfigMap")
        if CLAIM_KEY in kit.cluster.body("ConfigMap", name)["data"]
    ]
    assert records == [fetch], "of the model that is asked for; the other's files may have gone"
    serve("hf://org/tiny")
    await kit.settle()
    assert len(kit.cluster.names("Job")) == 1


async def test_a_claim_made_anew_in_the_cluster_is_filled_again() -> None:
    kit = await served_from_the_hub()
    remove_jobs(kit)
    await kit.settle()
    kit.cluster.remove(CLAIM, "default", "tiny-model")
    await kit.settle()
    (fetch,) = kit.cluster.names("Job")
    assert "-fetch-" in fetch
    assert kit.condition("ModelReady") == ("False", "Downloading")
    assert kit.cluster.names("Pod"), "what runs goes on"
    finish_fetch(kit.cluster)
    await kit.settle()
    assert kit.condition("ModelReady") == ("True", "Resolved")


async def test_a_profile_that_is_deleted_runs_the_job_again() -> None:
    kit = await served_from_the_hub()
    remove_jobs(kit)
    await kit.settle()
    for name in kit.cluster.names("ConfigMap"):
        if PROFILE_KEY in kit.cluster.body("ConfigMap", name)["data"]:
            kit.cluster.remove(CONFIG_MAP, "default", name)
    await kit.settle()
    assert [n for n in kit.cluster.names("Job") if "-profile-" in n]


async def test_a_body_with_a_uid_is_never_created() -> None:
    """The cluster deletes a finished Job at any moment: an apply must not begin it anew."""
    kit = await served_from_the_hub()
    (name, _) = kit.cluster.names("Job")
    body = kit.cluster.body("Job", name)
    metadata = {k: body["metadata"][k] for k in ("name", "namespace", "labels", "uid")}
    kit.cluster.remove(JOB, "default", name)
    owner = Owner("tiny", kit.cluster.body("MultiModalInference", "tiny")["metadata"]["uid"])
    with pytest.raises(ObjectError) as raised:
        await kit.operator.reconciler.applier.ensure(owner, {**body, "metadata": metadata})
    assert isinstance(raised.value.cause, Conflict)
    assert name not in kit.cluster.names("Job")
