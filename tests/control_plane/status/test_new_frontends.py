"""Ready waits for new frontends: until clients reach them, and until their sessions are known."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta
from typing import Any

import pytest

from foveal_operator.kube.types import Obj
from foveal_operator.status.conditions import reachable
from tests.support.observed_status import NOW, conditions, serving, status_of


def new_frontend(ago: int) -> Any:
    """The one of `serving`, ready for so many seconds."""
    pod = copy.deepcopy(serving()["frontend_pods"][0])
    at = datetime.fromisoformat(NOW) - timedelta(seconds=ago)
    pod["status"]["conditions"][0]["lastTransitionTime"] = at.isoformat()
    return pod


def test_ready_waits_until_the_service_reaches_every_frontend() -> None:
    """A client's first connection after Ready was refused: the Service had no endpoint yet."""
    none, one = endpoints(), endpoints({"ready": True})
    found = conditions(status_of(**serving(), reachable=reachable([none], "qwen")))
    assert found["FrontendsReady"] == found["Ready"] == "False Starting"
    found = conditions(status_of(**serving(), reachable=reachable([one], "qwen")))
    assert found["FrontendsReady"] == "True Serving"
    assert found["Ready"].startswith("True")


@pytest.mark.parametrize(
    ("reached", "ago", "ready"),
    [
        (1, 3, "False Starting"),
        (1, 4, "True Ready"),
        (1, -1, "True Ready"),  # the node's clock is ahead
        (None, 3, "True Ready"),  # nobody says what the Service reaches
    ],
)
def test_ready_waits_until_nodes_know_a_new_frontend(
    reached: int | None, ago: int, ready: str
) -> None:
    """A client's first connection after Ready came while kube-proxy wrote its rules, and hung."""
    values = {**serving(), "frontend_pods": (new_frontend(ago),)}
    found = status_of(**values, reachable=reached)
    assert conditions(found)["Ready"] == ready
    (condition,) = [c for c in found.conditions if c.type == "FrontendsReady"]
    assert ("nodes are just being told" in condition.message) == ready.startswith("False")


def test_reachable_pods_are_counted_once_over_all_slices_of_the_service() -> None:
    one = endpoints({"ready": True}, {"ready": False}, {})
    six = {**endpoints({"ready": True}), "addressType": "IPv6"}
    assert reachable([one, six], "qwen") == 2
    assert reachable([one], "qwen-engine") is None
    assert reachable([], "qwen") is None
    assert reachable([{**one, "endpoints": None}], "qwen") == 0


def endpoints(*conditions: dict[str, bool]) -> Obj:
    return {
        "metadata": {"name": "qwen-x", "labels": {"kubernetes.io/service-name": "qwen"}},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [f"10.0.0.{n}"], "conditions": found, "targetRef": {"uid": f"pod-{n}"}}
            for n, found in enumerate(conditions)
        ],
    }


@pytest.mark.parametrize(
    ("sessions", "ago", "mirrored", "ready"),
    [
        (-1, 29, "False Waiting", "False Waiting"),
        (-1, 31, "Unknown Waiting", "True Ready"),
        (2, 29, "False Waiting", "False Waiting"),  # of another frontend
        (2, 31, "True Mirrored", "True Ready"),
    ],
)
def test_ready_waits_a_moment_for_the_sessions_of_a_new_frontend(
    sessions: int, ago: int, mirrored: str, ready: str
) -> None:
    """Or it is true until the first answer, which says that none is up yet."""
    values = {**serving(), "sessions_up": sessions, "sessions_wanted": sessions}
    values |= {"frontend_pods": (new_frontend(ago),), "silent": ("f-0",)}
    found = conditions(status_of(**values))
    assert found["CachesMirrored"] == mirrored
    assert found["Ready"] == ready
