"""A pod that waits for a volume says nothing itself; its Events do."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.api import reasons
from foveal_operator.kube.errors import Transient
from foveal_operator.kube.queue import MAX_SECONDS
from foveal_operator.kube.types import Obj
from foveal_operator.pods.diagnose import diagnose
from foveal_operator.pods.events import PATIENCE_SECONDS, PodEvents, is_silent
from foveal_operator.pods.probes import PodReports
from foveal_operator.reconcile.reconciler import SHORT_SECONDS
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime
from tests.support.operator_rig import Kit
from tests.support.served_resource import served

MISSING = 'MountVolume.SetUp failed for volume "secret-api" : secret "nowhere" not found'


def pod(name: str, waiting: str = "ContainerCreating", phase: str = "Pending") -> Obj:
    states = [{"state": {"waiting": {"reason": waiting}}}] if waiting else []
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {"nodeName": "node1", "containers": []},
        "status": {"phase": phase, "containerStatuses": states},
    }


def event(name: str, about: str, note: str, at: str, reason: str = "FailedMount") -> Obj:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "regarding": {"kind": "Pod", "uid": f"uid-{about}"},
        "type": "Warning",
        "reason": reason,
        "note": note,
        "deprecatedLastTimestamp": at,
    }


async def test_a_missing_secret_is_told_from_the_latest_event() -> None:
    """A frontend that mounted a Secret which did not exist was `Starting` for ever."""
    cluster, clock = FakeCluster(), FakeTime()
    cluster.add(event("a", "f-0", "timed out", "2026-11-21T19:00:00Z"))
    cluster.add(event("b", "f-0", MISSING, "2026-11-21T19:00:09Z"))
    cluster.add(event("c", "f-0", "no sandbox", "2026-11-21T19:00:10Z", "FailedCreatePodSandBox"))
    cluster.add(event("d", "other", "another pod's", "2026-11-21T19:00:11Z"))
    events = PodEvents(cluster, clock.clock.monotonic)
    pods = [pod("f-0")]
    assert (await events.add_to(PodReports(), pods)).waits == {}  # it may just be slow
    clock.now += PATIENCE_SECONDS
    reports = await events.add_to(PodReports(), pods)
    assert reports.waits == {"f-0": MISSING}
    found = diagnose(pods, reports.waits)
    assert found is not None
    assert found.reason is reasons.CONFIG_ERROR
    assert "nowhere" in found.message


async def test_an_event_without_words_hides_no_other() -> None:
    """It ended the question: nothing that the pods said was known any more."""
    cluster, clock = FakeCluster(), FakeTime()
    cluster.add(event("a", "f-0", MISSING, "2026-11-21T19:00:09Z"))
    silent = event("b", "f-0", "", "2026-11-21T19:00:10Z")
    del silent["note"]
    cluster.add(silent)
    events = PodEvents(cluster, clock.clock.monotonic)
    await events.add_to(PodReports(), [pod("f-0")])
    clock.now += PATIENCE_SECONDS
    assert (await events.add_to(PodReports(), [pod("f-0")])).waits == {"f-0": MISSING}


async def test_each_pod_is_asked_about_now_and_then_and_forgotten_once_it_begins() -> None:
    cluster, clock = FakeCluster(), FakeTime()
    cluster.add(event("b", "f-0", MISSING, "2026-11-21T19:00:09Z"))
    events = PodEvents(cluster, clock.clock.monotonic)
    for _ in range(10):
        await events.add_to(PodReports(), [pod("f-0")])
        clock.now += PATIENCE_SECONDS
    assert len([call for call in cluster.calls if call[0] == "LIST"]) == 3
    assert (await events.add_to(PodReports(), [pod("f-0", "", "Running")])).waits == {}
    assert (await events.add_to(PodReports(), [pod("f-0")])).waits == {}


async def test_what_cannot_be_read_is_unknown() -> None:
    class Refusing(FakeCluster):
        async def list_all(self, *arguments: Any, **named: Any) -> list[Obj]:
            raise Transient("later")

    clock = FakeTime()
    events = PodEvents(Refusing(), clock.clock.monotonic)
    await events.add_to(PodReports(), [pod("f-0")])
    clock.now += PATIENCE_SECONDS
    assert (await events.add_to(PodReports(), [pod("f-0")])).waits == {}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (pod("a"), True),
        (pod("a", waiting=""), True),
        (pod("a", "PodInitializing"), True),
        (pod("a", "ImagePullBackOff"), False),
        (pod("a", "", "Running"), False),
        ({**pod("a"), "spec": {}}, False),
    ],
)
def test_silence(body: Obj, expected: bool) -> None:
    assert is_silent(body) is expected


async def test_a_workload_without_pods_is_explained_within_ten_seconds() -> None:
    """From the first look, at the pace at which the operator looks again."""
    cluster, clock = FakeCluster(), FakeTime()
    words = 'create Pod e-0 in StatefulSet e failed error: pods "e-0" is forbidden: exceeded quota'
    cluster.add(event("a", "e", words, "2026-11-21T19:00:00Z", "FailedCreate"))
    cluster.add(event("b", "e", "no volume", "2026-11-21T19:00:01Z"))
    events = PodEvents(cluster, clock.clock.monotonic)
    short = [{"kind": "StatefulSet", **pod("e")}]
    began = clock.now
    while not (found := await events.add_to(PodReports(), [], short)).refused:
        clock.now += SHORT_SECONDS
        assert clock.now - began < 10
    assert found.refused == {"StatefulSet/e": words}
    asked = len(cluster.calls)
    for _ in range(10):
        assert (await events.add_to(PodReports(), [], short)).refused == found.refused
    assert len(cluster.calls) == asked, "not asked again at once"


async def test_a_reason_outlasts_the_longest_pause_between_passes() -> None:
    cluster, clock = FakeCluster(), FakeTime()
    cluster.add(event("b", "f-0", MISSING, "2026-11-21T19:00:09Z"))
    events = PodEvents(cluster, clock.clock.monotonic)
    for pause in (PATIENCE_SECONDS, 1.1 * MAX_SECONDS):
        await events.add_to(PodReports(), [pod("f-0")])
        clock.now += pause
    assert (await events.add_to(PodReports(), [pod("f-0")])).waits == {"f-0": MISSING}


async def test_a_resync_forgets_nothing_that_is_still_there() -> None:
    """The reason why a workload has no pods came and went with every resync."""
    kit, kept = Kit(), set[str]()
    kit.operator._forget_pods = kept.update
    await served(kit, pods=True)
    await kit.resync()
    for kind in ("Pod", "StatefulSet", "Job"):
        uids = {b["metadata"]["uid"] for (k, *_), b in kit.cluster.objects.items() if k == kind}
        assert uids <= kept, kind
        assert uids or kind == "Job"
