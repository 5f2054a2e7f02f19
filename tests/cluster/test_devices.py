"""Engines that ask for a device each, and how they roll with a spare one and without.

The devices cannot compute: the engines work on the CPU, and an init container of theirs asks for
the device, which the scheduler counts for as long as the pod lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.node import commands, devices
from tests.support.node.questions import wrong_answers
from tests.support.node.rolls import roll

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
RESOURCE = "devices"
ASKS = {
    "name": "device",
    "image": commands.OPERATOR_IMAGE,
    "command": ["python3", "-c", "print('here')"],
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    "resources": {"limits": {"memory": "64Mi", devices.NAME: "1"}},
}


@pytest.fixture(scope="module")
def placed(operator: str, models: str) -> Iterator[str]:
    """Two engines on the two devices that there are; the service's URL."""
    body = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8"))
    body["metadata"]["name"] = RESOURCE
    body["spec"]["frontend"]["replicas"] = 1
    body["spec"]["engine"]["podTemplate"] = {"spec": {"initContainers": [ASKS]}}
    with devices.advertised(2):
        commands.apply(body)
        commands.kubectl("wait", f"mmi/{RESOURCE}", "--for=condition=Ready", "--timeout=400s",
                    seconds=420)  # fmt: skip
        yield commands.service_url(RESOURCE)
        commands.kubectl("delete", "mmi", RESOURCE, "--wait", "--timeout=120s", seconds=130)
        commands.until("its pods are gone", lambda: not commands.pods("engine", RESOURCE), 120)


def test_a_third_engine_waits_for_a_device_and_the_others_serve(placed: str) -> None:
    commands.patch(RESOURCE, {"engine": {"replicas": 3}})
    try:
        found = commands.until(
            "the status says that it is unschedulable",
            lambda: (
                (c := commands.condition(RESOURCE, "EnginesReady")).get("reason") == "Unschedulable"
                and c
            ),
            120,
        )
        assert devices.NAME in found["message"]
        assert wrong_answers(placed) == []
    finally:
        commands.patch(RESOURCE, {"engine": {"replicas": 2}})
        commands.until("Ready with two", lambda: commands.is_current(RESOURCE), 120)


def test_engines_roll_without_a_spare_device(placed: str) -> None:
    """FreeFirst: one goes, its device is free, its successor comes; the other serves meanwhile."""
    change = {"engine": {"hostMemory": "2112Mi"}, "rollout": {"strategy": "FreeFirst"}}
    found = roll(placed, change, "engine", RESOURCE)
    assert found.most_pods == 2
    assert found.least_ready >= 1


def test_engines_roll_with_a_spare_device(placed: str) -> None:
    """Surge: the third device takes a new engine before an old one goes."""
    devices.advertise(3)
    change = {"engine": {"hostMemory": "2176Mi"}, "rollout": {"strategy": "Surge"}}
    found = roll(placed, change, "engine", RESOURCE)
    assert found.most_pods == 3
    assert found.least_ready >= 2
