"""Verdicts, and the conditions that are made of them. Pure.

Used by status/report.py, which finds them, and by the reconciler for what keeps a pass from its
end.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Condition

MAX_MESSAGE = 4096


class Verdict(msgspec.Struct, frozen=True):
    """One condition before it has a time."""

    kind: str
    status: str
    reason: Reason
    text: str


def verdict(kind: str, ok: bool, reason: Reason, text: str) -> Verdict:
    return Verdict(kind, "True" if ok else "False", reason, text)


def summary(
    verdicts: Iterable[Verdict],
    failure: Verdict | None = None,
    *,
    is_paused: bool = False,
    deadline_exceeded: bool = False,
    rollout_message: str = "",
) -> list[Verdict]:
    """Ready, and of the pair Reconciling and Stalled the one that is true.

    Args:
        failure: what keeps every pass from its end: then nothing else is up to date.
    """
    if failure is not None:
        return [failure, Verdict("Reconciling", "True", failure.reason, failure.text)]
    # Unknown mirrors (nothing reported yet) do not hold back what serves, nor does an autoscaler.
    failing = [
        v for v in verdicts
        if v.kind != "ScalingActive"
        and (v.status == "False" or (v.status == "Unknown" and v.kind != "CachesMirrored"))
    ]  # fmt: skip
    if not failing:
        return [verdict("Ready", True, reasons.READY, "every replica of this revision serves")]
    # What is not known yet waits for what has gone wrong: a model that cannot be loaded has no
    # profile, and so no budgets.
    first = next((v for v in failing if v.status == "False"), failing[0])
    if is_paused:
        text = f"paused; {first.kind}: {first.text}"
        return [verdict("Ready", False, reasons.PAUSED, text)]
    found = [verdict("Ready", False, first.reason, f"{first.kind}: {first.text}")]
    text = ". ".join(part for part in (first.text, rollout_message) if part)
    if deadline_exceeded:
        reason = reasons.DEADLINE_EXCEEDED
        found.append(Verdict("Stalled", "True", reason, text))
    elif first.reason.is_permanent:
        found.append(Verdict("Stalled", "True", first.reason, text))
    else:
        found.append(Verdict("Reconciling", "True", first.reason, text))
    return found


def to_conditions(
    verdicts: Iterable[Verdict], generation: int, now: str, previous: tuple[Condition, ...]
) -> tuple[Condition, ...]:
    """lastTransitionTime moves only when a status flips."""
    before = {condition.type: condition for condition in previous}
    found = []
    for verdict in verdicts:
        old = before.get(verdict.kind)
        kept = old is not None and old.status == verdict.status
        found.append(
            Condition(
                type=verdict.kind,
                status=verdict.status,  # type: ignore[arg-type]
                reason=verdict.reason.name,
                message=verdict.reason.message(verdict.text)[:MAX_MESSAGE],
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old and kept else now,
            )
        )
    return tuple(found)
