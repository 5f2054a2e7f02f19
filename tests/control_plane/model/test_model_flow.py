"""From uri to profile: each step, each way it can fail, and that nothing is done twice."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from foveal_operator.api import reasons
from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.kube.types import Obj
from foveal_operator.model.flow import (
    PROFILE_KEY,
    ModelDecision,
    ModelView,
    decide_model,
    model_keys,
)
from tests.support.budget_samples import VLM
from tests.support.regenerate import FACTS
from tests.support.samples import resource

NOW = 1_800_000_000.0
FETCHED = parse(resource())
CLAIMED = parse(resource(model={"uri": "pvc://weights/qwen"}))
PROFILE = msgspec.json.encode(VLM).decode()


def time(ago: float) -> str:
    return datetime.fromtimestamp(NOW - ago, UTC).isoformat().replace("+00:00", "Z")


class World:
    """What the API server holds, for one resource."""

    def __init__(self, inference: InferenceSpec) -> None:
        self.inference = inference
        self.live: dict[tuple[str, str], Obj] = {}
        self.pods: list[Obj] = []
        self.downloads: dict[str, int] = {}
        self.names = {}
        for kind, name in model_keys(inference, FACTS):
            what = "fetch" if "-fetch-" in name else "profile"
            self.names[kind if kind != "Job" else what] = name

    def decide(self) -> ModelDecision:
        view = ModelView(
            inference=self.inference,
            facts=FACTS,
            live=self.live,
            job_pods=tuple(self.pods),
            downloads=self.downloads,
            now=NOW,
        )
        found = decide_model(view)
        assert found == decide_model(view)
        return found

    def claim(self, phase: str = "Bound") -> World:
        name = self.names["PersistentVolumeClaim"]
        self.live["PersistentVolumeClaim", name] = {"status": {"phase": phase}}
        return self

    def job(self, what: str, condition: str = "", ago: float = 0.0) -> World:
        conditions = (
            [{"type": condition, "status": "True", "lastTransitionTime": time(ago)}]
            if condition
            else []
        )
        self.live["Job", self.names[what]] = {
            "metadata": {"name": self.names[what], "uid": f"uid-{what}"},
            "status": {"conditions": conditions},
        }
        return self

    def pod(self, what: str, state: Obj, conditions: Any = (), ago: float = 0.0) -> World:
        self.pods.append(
            {
                "metadata": {
                    "name": f"{self.names[what]}-{len(self.pods)}",
                    "creationTimestamp": time(ago),
                    "labels": {"batch.kubernetes.io/job-name": self.names[what]},
                },
                "status": {
                    "conditions": list(conditions),
                    "containerStatuses": [{"name": what, "state": state}],
                },
            }
        )
        return self

    def ended(self, what: str, code: int, message: str, ago: float = 0.0) -> World:
        state = {"exitCode": code, "message": message, "finishedAt": time(ago)}
        return self.pod(what, {"terminated": state}, ago=ago)


def kinds(found: ModelDecision) -> list[str]:
    return [owned.body["kind"] for owned in found.objects]


def test_a_fetched_model_goes_all_the_way() -> None:
    world = World(FETCHED)
    found = world.decide()
    assert kinds(found) == ["ServiceAccount", "PersistentVolumeClaim", "Job"]
    assert (found.reason, found.model_ready) == (reasons.DOWNLOADING, False)
    found = world.claim().job("fetch").pod("fetch", {"running": {}}).decide()
    assert found.reason is reasons.DOWNLOADING
    assert found.message == "fetching hf://Qwen/Qwen2.5-VL-7B-Instruct"
    found = world.job("fetch", "Complete").decide()
    assert kinds(found) == ["ServiceAccount", "PersistentVolumeClaim", "Job", "Job"]
    assert (found.reason, found.model_ready, found.profile) == (reasons.PROFILING, True, None)
    found = world.job("profile", "Complete").ended("profile", 0, PROFILE).decide()
    assert (found.reason, found.model_ready, found.profile) == (reasons.RESOLVED, True, VLM)
    config_map = found.objects[-1].body
    assert config_map["immutable"] is True
    assert config_map["metadata"]["name"] == world.names["ConfigMap"]
    assert found.next_check_seconds is None


def test_a_profile_that_is_kept_needs_no_job() -> None:
    world = World(FETCHED).claim().job("fetch", "Complete")
    world.live["ConfigMap", world.names["ConfigMap"]] = {"data": {PROFILE_KEY: PROFILE}}
    found = world.decide()
    assert found.profile == VLM
    assert kinds(found) == ["ServiceAccount", "PersistentVolumeClaim", "Job", "ConfigMap"]
    assert found.objects[-1].body["data"] == {PROFILE_KEY: PROFILE}


def test_other_limits_are_another_profile() -> None:
    other = parse(resource(modalities={"image": {"maxPixels": 1_000_000}}))
    assert World(FETCHED).names["ConfigMap"] != World(other).names["ConfigMap"]
    scaled = parse(resource(frontend={"replicas": 3}))
    assert World(FETCHED).names["ConfigMap"] == World(scaled).names["ConfigMap"]


def test_a_claim_of_the_user_must_exist() -> None:
    world = World(CLAIMED)
    found = world.decide()
    assert found.reason is reasons.CLAIM_PENDING
    assert found.message == "claim weights does not exist"
    found = world.claim("Pending").decide()
    assert found.reason is reasons.PROFILING
    assert kinds(found) == ["ServiceAccount", "Job"]


def test_a_claim_that_nobody_binds() -> None:
    world = World(FETCHED).claim("Pending").job("fetch")
    assert world.decide().reason is reasons.DOWNLOADING  # the first pod may be what it waits for
    why = "pod has unbound immediate PersistentVolumeClaims"
    conditions = [{"type": "PodScheduled", "reason": "Unschedulable", "message": why}]
    found = world.pod("fetch", {}, conditions).decide()
    assert found.reason is reasons.CLAIM_PENDING
    assert why in found.message


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
    world = World(FETCHED).claim().job("fetch")
    message = f"log line\nfoveal-runtime: {line}\n"
    found = world.ended("fetch", 2, message, ago=90).decide()
    assert found.reason is reason
    assert line in found.message
    assert "tried again" in found.message
    found = world.job("fetch", "Failed", ago=100).decide()
    assert found.reason is reason
    assert line in found.message
    assert not found.delete
    assert found.next_check_seconds == (None if after is None else after - 100)
    found = world.job("fetch", "Failed", ago=2000).decide()
    assert found.delete == (() if after is None else (("Job", world.names["fetch"], "uid-fetch"),))
    assert ("Job" in kinds(found)) == (after is None)


def test_a_new_attempt_that_runs_is_a_download_again() -> None:
    world = World(FETCHED).claim().job("fetch").ended("fetch", 1, "boom", ago=60)
    assert world.decide().reason is reasons.FETCH_FAILED
    assert world.pod("fetch", {"running": {}}).decide().reason is reasons.DOWNLOADING


def test_an_image_that_cannot_be_pulled_is_told_as_such() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}}
    world = World(CLAIMED).claim().job("profile").pod("profile", waiting)
    assert world.decide().reason is reasons.IMAGE_DENIED


def test_a_model_that_the_runtime_refuses_is_not_tried_for_ever() -> None:
    line = "foveal-runtime: model type mamba is not supported"
    world = World(CLAIMED).claim().job("profile").ended("profile", 2, line)
    assert world.decide().reason is reasons.UNSUPPORTED_MODEL
    found = world.job("profile", "Failed", ago=9e6).decide()
    assert found.reason is reasons.UNSUPPORTED_MODEL
    assert "mamba" in found.message
    assert found.model_ready
    assert found.delete == ()


def test_a_profile_job_that_crashed_runs_again_later() -> None:
    world = World(CLAIMED).claim().job("profile", "Failed", ago=10).ended("profile", 1, "boom")
    found = world.decide()
    assert (found.reason, found.next_check_seconds) == (reasons.PROFILE_FAILED, 1790)
    assert world.job("profile", "Failed", ago=1801).decide().delete


@pytest.mark.parametrize("message", ["", PROFILE[:200], '{"weights": 1}', "[]"])
def test_a_profile_that_cannot_be_read_is_made_again(message: str) -> None:
    """A termination message may be cut off, or its pod gone before anybody read it."""
    world = World(CLAIMED).claim().job("profile", "Complete", ago=5)
    if message:
        world.ended("profile", 0, message)
    found = world.decide()
    assert found.profile is None
    assert (found.reason, found.next_check_seconds) == (reasons.PROFILE_FAILED, 55)
    found = world.job("profile", "Complete", ago=61).decide()
    assert found.delete == (("Job", world.names["profile"], "uid-profile"),)


def test_a_kept_profile_that_cannot_be_read_is_no_profile() -> None:
    world = World(CLAIMED).claim()
    world.live["ConfigMap", world.names["ConfigMap"]] = {"data": {PROFILE_KEY: "?"}}
    assert world.decide().reason is reasons.PROFILING
