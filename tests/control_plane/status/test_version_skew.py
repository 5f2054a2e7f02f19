"""Pods more than one minor release behind the operator are named, and serve as before."""

from __future__ import annotations

import pytest

from foveal_operator.common.versions import is_too_old
from foveal_operator.pods.metrics import PodReports, read_figures
from foveal_operator.process.options import read
from foveal_runtime.telemetry.metrics import Metrics
from tests.support.fake_pods import FakePods, pod
from tests.support.observed_status import conditions, serving, status_of
from tests.support.operator_rig import Kit
from tests.support.served_resource import add_pod, served


@pytest.mark.parametrize(
    ("pod", "operator", "is_old"),
    [
        ("0.3.0", "0.3.1", False),
        ("0.2.9", "0.3.0", False),
        ("0.1.9", "0.3.0rc1", True),
        ("0.4.0", "0.3.0", False),  # a downgrade of the operator: pods keep running
        ("0.9.0", "1.0.0", False),
        ("0.9.0", "1.1.0", True),
        ("0.9.0", "2.0.0", True),
        ("0", "0.3.0", False),  # from a source tree
        ("0.1.0", "", False),
    ],
)
def test_one_minor_release_behind_is_supported(pod: str, operator: str, is_old: bool) -> None:
    assert is_too_old(pod, operator) is is_old


async def test_pods_report_their_version_beside_their_figures() -> None:
    metrics = Metrics("engine", model_name="m", process="e-0", engine="e-0")
    metrics.set("foveal_build_info", 1, version="0.1.0")
    text = metrics.exposition().decode()
    assert read_figures(text).version == "0.1.0"
    found = await FakePods(e0=text, e1="").prober.observe_pods(
        [pod("e-0", ip="e0"), pod("e-1", ip="e1")], []
    )
    assert found.versions == {"e-0": "0.1.0"}


def test_a_pod_that_is_too_old_is_named_with_both_versions_and_the_fix() -> None:
    """Nothing said so: the page on versions alone forbade it."""
    versions = {"e-0": "0.3.1", "e-1": "0.1.2", "f-0": "0.2.0"}
    status = status_of(**serving(), versions=versions, version="0.3.0")
    found = {condition.type: condition for condition in status.conditions}
    assert conditions(status)["EnginesReady"] == "True VersionSkew"
    assert conditions(status)["FrontendsReady"] == "True Serving"
    assert conditions(status)["Ready"] == "True Ready"
    assert found["EnginesReady"].message == (
        "2 of 2 serve; more than one minor release behind the operator (0.3.0): e-1 (0.1.2). Set "
        "spec.image to an image of the operator's release or the one before it. "
        "(docs/reference/reasons.md#versionskew)"
    )
    same = status_of(**serving(), versions=versions, version="0.2.0")
    assert conditions(same)["EnginesReady"] == "True Serving"


async def test_the_operator_compares_its_own_version_and_tells_once() -> None:
    assert read([], {}).settings.version, "the installed distribution's"
    kit = Kit(version="0.3.0")
    await served(kit)
    add_pod(kit.cluster, "engine")
    await kit.settle()
    assert kit.condition("EnginesReady") == ("True", "Serving")
    kit.reports = PodReports(versions={"tiny-engine-0": "0.1.0"})
    for _ in range(2):
        await kit.resync()
    assert kit.condition("EnginesReady") == ("True", "VersionSkew")
    events = [body for (kind, *_), body in kit.cluster.objects.items() if kind == "Event"]
    notes = [event["note"] for event in events if event["reason"] == "VersionSkew"]
    assert [note.count("tiny-engine-0 (0.1.0)") for note in notes] == [1]
