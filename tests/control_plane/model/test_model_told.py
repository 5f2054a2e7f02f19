"""What is said of the model: how far its download is, and which commit it really is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from foveal_operator.api import reasons
from foveal_operator.cli.status.view import status_text
from foveal_operator.cli.terminal import Style
from foveal_operator.kube.kinds import JOB
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.pods.metrics import PodReports
from foveal_operator.pods.probes import metrics_url
from foveal_operator.testing.fake_cluster import FakeCluster
from foveal_runtime.plan.fetch_progress import exposition
from tests.support.budget_samples import VLM
from tests.support.fake_pods import FakePods, pod
from tests.support.operator_rig import Kit, resource
from tests.support.served_resource import PROFILE, finish_profile
from tests.support.stored_objects import FETCHED, StoredObjects

COMMIT = "0123456789" * 4
URI = "hf://org/tiny"


# --- how far it is -----------------------------------------------------------------------------
def fetch_pod(ip: str, phase: str = "Running") -> Obj:
    (job,) = [
        job for job in desired(FETCHED, None, ClusterFacts()).of_kind("Job")
        if "-fetch-" in job["metadata"]["name"]
    ]  # fmt: skip
    spec = job["spec"]["template"]["spec"]
    metadata = {"name": "fetch-x", "uid": "u", "labels": {"job-name": job["metadata"]["name"]}}
    return {"metadata": metadata, "spec": spec, "status": {"podIP": ip, "phase": phase}}


async def test_a_fetch_jobs_pod_is_asked_while_it_runs_and_never_counts_as_serving() -> None:
    assert metrics_url(fetch_pod("10.0.0.9")) == "http://10.0.0.9:8000/metrics"
    assert metrics_url(fetch_pod("10.0.0.9", "Succeeded")) is None
    pods = FakePods(f0=exposition(300, 1000))
    found = await pods.prober.observe_pods([], [], [fetch_pod("f0")])
    assert found == PodReports(downloads={"fetch-x": 30})


async def test_a_pod_that_does_not_know_the_size_or_does_not_answer_says_nothing() -> None:
    pods = FakePods(f0=exposition(300, 0))
    jobs = [fetch_pod("f0"), {**pod("other", ip="f1")}]
    assert await pods.prober.observe_pods([], [], jobs) == PodReports()


def test_only_the_attempt_that_runs_tells() -> None:
    stored = StoredObjects(FETCHED).claim().job("fetch")
    stored.ended("fetch", 1, "boom", ago=60).pod("fetch", {"running": {}})
    old, new = (one["metadata"]["name"] for one in stored.pods)
    stored.downloads = {old: 90, new: 43}
    found = stored.decide()
    assert (found.reason, found.download_percent) == (reasons.DOWNLOADING, 43)
    assert found.message == f"fetching {FETCHED.spec.model.uri}: 43 % is there"
    stored.downloads = {old: 90}
    assert stored.decide().download_percent is None


# --- status ------------------------------------------------------------------------------------
def fetched_cluster() -> FakeCluster:
    cluster = Kit().cluster
    cluster.add(resource(model={"uri": URI, "cache": {"size": "1Gi"}}))
    return cluster


def job_named(cluster: FakeCluster, what: str) -> str:
    (name,) = [name for name in cluster.names("Job") if f"-{what}-" in name]
    return name


def add_fetch_pod(cluster: FakeCluster) -> str:
    name = job_named(cluster, "fetch")
    job = cluster.body("Job", name)
    labels = {**job["spec"]["template"]["metadata"]["labels"], "job-name": name}
    metadata = {"name": f"{name}-x", "namespace": "default", "labels": labels}
    spec = job["spec"]["template"]["spec"]
    cluster.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
                 "status": {"phase": "Running"}})  # fmt: skip
    return f"{name}-x"


async def test_the_status_shows_percent_then_the_commit() -> None:
    kit = Kit(fetched_cluster())
    await kit.start()
    await kit.settle()
    assert "downloadPercent" not in kit.status()["model"]
    name = add_fetch_pod(kit.cluster)
    kit.reports = PodReports(downloads={name: 43})
    await kit.resync()
    assert kit.condition("ModelReady") == ("False", "Downloading")
    assert kit.status()["model"]["downloadPercent"] == 43
    live = kit.cluster.body("MultiModalInference", "tiny")
    text = status_text(live, 0.0, Style())
    assert f"fetching {URI}: 43 % is there" in text
    assert "model: 43 % fetched" in text
    events = [e for e in kit.cluster.writes if "Event" in str(e)]
    kit.reports = PodReports(downloads={name: 44})
    await kit.resync()
    assert kit.status()["model"]["downloadPercent"] == 44
    assert [e for e in kit.cluster.writes if "Event" in str(e)] == events, "no Event per percent"


async def test_a_job_s_pod_that_waits_for_a_volume_is_told() -> None:
    """A CA bundle whose ConfigMap is missing: the model was Downloading without an end."""
    kit = Kit(fetched_cluster())
    await kit.start()
    await kit.settle()
    name = add_fetch_pod(kit.cluster)
    kit.reports = PodReports(waits={name: 'MountVolume.SetUp failed: configmap "ca" not found'})
    await kit.resync()
    assert kit.condition("ModelReady") == ("False", "ConfigError")
    (told,) = [one["message"] for one in kit.status()["conditions"] if one["type"] == "Ready"]
    assert f'{name}: MountVolume.SetUp failed: configmap "ca" not found' in told
    kit.reports = PodReports()
    await kit.resync()
    assert kit.condition("ModelReady") == ("False", "Downloading")


async def test_the_commit_is_the_profiles() -> None:
    kit = Kit()
    kit.cluster.add(resource())
    await kit.start()
    await kit.settle()
    profile = msgspec.structs.replace(
        msgspec.json.decode(PROFILE.encode(), type=type(VLM)), revision=COMMIT
    )
    finish_profile(kit.cluster, msgspec.json.encode(profile).decode())
    await kit.resync()
    assert kit.status()["model"]["resolvedRevision"] == COMMIT
    live = kit.cluster.body("MultiModalInference", "tiny")
    assert f"model revision: {COMMIT}" in status_text(live, 0.0, Style())
    # A fresh operator has it from the kept profile; the Job and its pod are gone.
    again = Kit(kit.cluster)
    await again.start()
    await again.settle()
    assert again.status()["model"]["resolvedRevision"] == COMMIT


class Listening(Kit):
    """Remembers which workloads were asked why they have no pods."""

    short: Sequence[Obj] = ()

    async def _observe(self, *seen: Sequence[Obj]) -> PodReports:
        self.short = seen[3]
        return self.reports


async def test_a_job_is_asked_for_its_missing_pods_unless_it_is_suspended() -> None:
    """Once it had been suspended it was never asked again."""
    kit = Listening(fetched_cluster())
    await kit.start()
    await kit.settle()
    name = job_named(kit.cluster, "fetch")

    async def become(suspend: bool, condition: str) -> list[str]:
        def change(body: Obj) -> None:
            body["spec"]["suspend"] = suspend
            suspended = {"type": "Suspended", "status": condition}
            body["status"] = {"conditions": [suspended]}

        kit.cluster.edit(JOB, "default", name, change)
        await kit.settle()
        return [body["metadata"]["name"] for body in kit.short]

    assert await become(True, "True") == []
    assert kit.condition("ModelReady") == ("False", "Queued")
    assert await become(False, "False") == [name]
    assert kit.condition("ModelReady") == ("False", "Downloading")
