"""Which changes of conditions become Events."""

from __future__ import annotations

from foveal_operator.api.status import Condition
from foveal_operator.status.conditions import noteworthy


def condition(kind: str, status: str, reason: str, message: str = "m") -> Condition:
    return Condition(
        type=kind, status=status, reason=reason, message=message,  # type: ignore[arg-type]
        observed_generation=1, last_transition_time="2026-01-01T00:00:00Z",
    )  # fmt: skip


def test_events_tell_changes_that_ask_for_action_and_readiness() -> None:
    now = [
        condition("EnginesReady", "False", "OOMKilled"),
        condition("Ready", "False", "OOMKilled", "EnginesReady: m"),
        condition("FrontendsReady", "False", "Starting"),
        condition("Stalled", "True", "BudgetMisfit"),
    ]
    found = noteworthy(now, ())
    assert [(kind, reason) for kind, reason, _ in found] == [
        ("Warning", "OOMKilled"), ("Warning", "BudgetMisfit"),
    ]  # fmt: skip
    assert noteworthy(now, now) == []
    old = [condition("EnginesReady", "True", "VersionSkew")]
    assert [(kind, reason) for kind, reason, _ in noteworthy(old, ())] == [
        ("Warning", "VersionSkew")
    ]
    ready = [condition("Ready", "True", "Ready")]
    assert [(kind, reason) for kind, reason, _ in noteworthy(ready, now)] == [("Normal", "Ready")]


def test_a_taken_name_is_told_once_however_far_a_rollout_is() -> None:
    """Each step of a rollout was another Event about the same object."""

    def taken(what: str, progress: str) -> list[Condition]:
        return [
            condition("SpecAccepted", "False", "NameTaken", what),
            condition("Ready", "False", "NameTaken", f"SpecAccepted: {what}"),
            condition("Stalled", "True", "NameTaken", f"{what}. {progress}"),
        ]

    first = taken("Service a", "rolling: 0 of 2")
    assert [note for *_, note in noteworthy(first, ())] == ["Service a"]
    assert noteworthy(taken("Service a", "rolling: 1 of 2"), first) == []
    other = taken("PodMonitor a", "rolling: 1 of 2")
    assert [note for *_, note in noteworthy(other, first)] == ["PodMonitor a"]
