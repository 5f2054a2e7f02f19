"""From uri to profile: each step, each way it can fail, and that nothing is done twice."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.api import reasons
from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.model.flow import (
    PROFILE_KEY,
)
from tests.support.budget_samples import VLM
from tests.support.samples import resource
from tests.support.stored_objects import CLAIMED, FETCHED, PROFILE, StoredObjects, kinds


def test_a_fetched_model_goes_all_the_way() -> None:
    stored = StoredObjects(FETCHED)
    found = stored.decide()
    assert kinds(found) == ["ServiceAccount", "NetworkPolicy", "PersistentVolumeClaim", "Job"]
    assert (found.reason, found.model_ready) == (reasons.DOWNLOADING, False)
    found = stored.claim().job("fetch").pod("fetch", {"running": {}}).decide()
    assert found.reason is reasons.DOWNLOADING
    assert found.message == "fetching hf://Qwen/Qwen2.5-VL-7B-Instruct"
    found = stored.job("fetch", "Complete").decide()
    assert kinds(found) == [
        "ServiceAccount",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Job",
        "Job",
    ]
    assert (found.reason, found.model_ready, found.profile) == (reasons.PROFILING, True, None)
    found = stored.job("profile", "Complete").ended("profile", 0, PROFILE).decide()
    assert (found.reason, found.model_ready, found.profile) == (reasons.RESOLVED, True, VLM)
    config_map = found.objects[-1].body
    assert config_map["immutable"] is True
    assert config_map["metadata"]["name"] == stored.names["ConfigMap"]
    assert found.next_check_seconds is None


def test_a_profile_that_is_kept_needs_no_job() -> None:
    stored = StoredObjects(FETCHED).claim().job("fetch", "Complete")
    stored.live["ConfigMap", stored.names["ConfigMap"]] = {"data": {PROFILE_KEY: PROFILE}}
    found = stored.decide()
    assert found.profile == VLM
    assert kinds(found) == [
        "ServiceAccount",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Job",
        "ConfigMap",
    ]
    assert found.objects[-1].body["data"] == {PROFILE_KEY: PROFILE}


def test_other_limits_are_another_profile() -> None:
    other = parse(resource(modalities={"image": {"maxPixels": 1_000_000}}))
    assert StoredObjects(FETCHED).names["ConfigMap"] != StoredObjects(other).names["ConfigMap"]
    scaled = parse(resource(frontend={"replicas": 3}))
    assert StoredObjects(FETCHED).names["ConfigMap"] == StoredObjects(scaled).names["ConfigMap"]


def test_a_claim_of_the_user_must_exist() -> None:
    stored = StoredObjects(CLAIMED)
    found = stored.decide()
    assert found.reason is reasons.CLAIM_PENDING
    assert found.message == "claim weights does not exist"
    found = stored.claim("Pending").decide()
    assert found.reason is reasons.PROFILING
    assert kinds(found) == ["ServiceAccount", "NetworkPolicy", "Job"]


UNBOUND = [
    {
        "type": "PodScheduled",
        "reason": "Unschedulable",
        "message": "pod has unbound immediate PersistentVolumeClaims",
    }
]


def test_a_claim_that_nobody_binds() -> None:
    stored = StoredObjects(FETCHED).claim("Pending").job("fetch")
    assert stored.decide().reason is reasons.DOWNLOADING  # the first pod may be what it waits for
    found = stored.pod("fetch", {}, UNBOUND).decide()
    assert found.reason is reasons.CLAIM_PENDING
    assert UNBOUND[0]["message"] in found.message


@pytest.mark.parametrize(
    ("cache", "kept"),
    [
        ({}, ""),
        ({"accessMode": "ReadWriteMany", "storageClassName": "slow"}, ""),
        (
            {"accessMode": "ReadWriteOnce"},
            "accessMode ReadWriteMany (model.cache asks for ReadWriteOnce)",
        ),
        ({"storageClassName": "nfs"}, "storageClassName slow (model.cache asks for nfs)"),
        (
            {"accessMode": "ReadWriteOnce", "storageClassName": "nfs"},
            "accessMode ReadWriteMany (model.cache asks for ReadWriteOnce) and "
            "storageClassName slow (model.cache asks for nfs)",
        ),
    ],
)
def test_a_pending_claim_says_what_it_keeps(cache: Obj, kept: str) -> None:
    """The advice of its reason was followed, and nothing happened or was said."""
    stored = StoredObjects(parse(resource(model={"uri": "hf://org/model", "cache": cache})))
    name = stored.names["PersistentVolumeClaim"]
    stored.claim("Pending").job("fetch").pod("fetch", {}, UNBOUND)
    stored.live["PersistentVolumeClaim", name]["spec"] = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "slow",
        "resources": {"requests": {"storage": "50Gi"}},
    }
    found = stored.decide()
    assert found.reason is reasons.CLAIM_PENDING
    text = f"the claim keeps {kept}: delete it (kubectl delete pvc {name}) and it is made again"
    assert (text in found.message) == bool(kept)
    assert ("delete" in found.message) == bool(kept)
    stored.claim("Bound")
    assert "keeps" not in stored.decide().message


BAD_FETCHES = [
    ("hf://a/b: 401 Client Error. (Request ID: Root=1-2)", reasons.FETCH_DENIED, 600),
    ("hf://a/b: 403 Client Error. Access to model a/b is restricted", reasons.FETCH_DENIED, 600),
    ("s3://b/m: An error occurred (403) when calling ListObjectsV2", reasons.FETCH_DENIED, 600),
    ("hf://a/b: 404 Client Error. (Request ID: Root=1-2)", reasons.NOT_FOUND, None),
    ("hf://a/b holds no config.json with *.safetensors: not a model we can load",
     reasons.NOT_FOUND, None),
    ("cannot move /models/x: No space left on device", reasons.FETCH_FAILED, 1800),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason", "after"), BAD_FETCHES)
def test_a_download_that_fails_says_why(line: str, reason: Any, after: float | None) -> None:
    stored = StoredObjects(FETCHED).claim().job("fetch")
    message = f"log line\nfoveal-runtime: {line}\n"
    found = stored.ended("fetch", 2, message, ago=90).decide()
    assert found.reason is reason
    assert line in found.message
    assert "tried again" in found.message
    found = stored.job("fetch", "Failed", ago=100).decide()
    assert found.reason is reason
    assert line in found.message
    assert not found.delete
    assert found.next_check_seconds == (None if after is None else after - 100)
    found = stored.job("fetch", "Failed", ago=2000).decide()
    assert found.delete == (() if after is None else (("Job", stored.names["fetch"], "uid-fetch"),))
    assert ("Job" in kinds(found)) == (after is None)


def test_a_new_attempt_that_runs_is_a_download_again() -> None:
    stored = StoredObjects(FETCHED).claim().job("fetch").ended("fetch", 1, "boom", ago=60)
    assert stored.decide().reason is reasons.FETCH_FAILED
    assert stored.pod("fetch", {"running": {}}).decide().reason is reasons.DOWNLOADING


def test_an_image_that_cannot_be_pulled_is_told_as_such() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}}
    stored = StoredObjects(CLAIMED).claim().job("profile").pod("profile", waiting)
    assert stored.decide().reason is reasons.IMAGE_DENIED


@pytest.mark.parametrize(("inference", "what"), [(FETCHED, "fetch"), (CLAIMED, "profile")])
def test_a_suspended_job_is_queued(inference: Any, what: str) -> None:
    """By Kueue or by hand; the model was Downloading or Profiling without an end."""
    stored = StoredObjects(inference).claim().job(what, "Suspended")
    job = stored.live["Job", stored.names[what]]
    job["spec"] = {"suspend": True}
    found = stored.decide()
    assert found.reason is reasons.QUEUED
    assert found.message == f"Job {stored.names[what]} is suspended (spec.suspend)"
    job["spec"] = {"suspend": False}
    assert stored.decide().reason in (reasons.DOWNLOADING, reasons.PROFILING)


def test_a_model_that_the_runtime_refuses_is_not_tried_for_ever() -> None:
    line = "foveal-runtime: model type mamba is not supported"
    stored = StoredObjects(CLAIMED).claim().job("profile").ended("profile", 2, line)
    assert stored.decide().reason is reasons.UNSUPPORTED_MODEL
    found = stored.job("profile", "Failed", ago=9e6).decide()
    assert found.reason is reasons.UNSUPPORTED_MODEL
    assert "mamba" in found.message
    assert found.model_ready
    assert found.delete == ()


def test_a_profile_job_that_crashed_runs_again_later() -> None:
    stored = (
        StoredObjects(CLAIMED).claim().job("profile", "Failed", ago=10).ended("profile", 1, "boom")
    )
    found = stored.decide()
    assert (found.reason, found.next_check_seconds) == (reasons.PROFILE_FAILED, 1790)
    assert stored.job("profile", "Failed", ago=1801).decide().delete


@pytest.mark.parametrize("message", ["", PROFILE[:200], '{"weights": 1}', "[]"])
def test_a_profile_that_cannot_be_read_is_made_again(message: str) -> None:
    """A termination message may be cut off, or its pod gone before anybody read it."""
    stored = StoredObjects(CLAIMED).claim().job("profile", "Complete", ago=5)
    if message:
        stored.ended("profile", 0, message)
    found = stored.decide()
    assert found.profile is None
    assert (found.reason, found.next_check_seconds) == (reasons.PROFILE_FAILED, 55)
    found = stored.job("profile", "Complete", ago=61).decide()
    assert found.delete == (("Job", stored.names["profile"], "uid-profile"),)


def test_a_kept_profile_that_cannot_be_read_is_no_profile() -> None:
    stored = StoredObjects(CLAIMED).claim()
    stored.live["ConfigMap", stored.names["ConfigMap"]] = {"data": {PROFILE_KEY: "?"}}
    assert stored.decide().reason is reasons.PROFILING
