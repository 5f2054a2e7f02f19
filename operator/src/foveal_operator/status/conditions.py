"""Conditions: verdicts and what is made of them, and the questions about live objects that the
status and the Events rest on. Pure.

Used by status/verdicts.py, which finds most of them, and by the reconciler for what keeps a pass
from its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Condition
from foveal_operator.kube.events import Type
from foveal_operator.kube.types import Obj

MAX_MESSAGE = 4096
STEADY_FRACTION = 0.05
SERVICE_NAME_LABEL = "kubernetes.io/service-name"


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


def previous_conditions(resource: Obj) -> tuple[Condition, ...]:
    """Conditions as stored; what cannot be read (another version wrote it) counts as absent."""
    found = []
    for raw in resource.get("status", {}).get("conditions") or ():
        try:
            found.append(msgspec.convert(raw, Condition))
        except msgspec.ValidationError:
            continue
    return tuple(found)


def route_state(route: Obj | None, is_wanted: bool) -> tuple[bool | None, str]:
    """Whether every gateway has accepted the HTTPRoute as it is now; None when no route is asked
    for. What a gateway has said of an earlier generation is no answer."""
    if not is_wanted:
        return None, ""
    if route is None:
        return False, "no gateway has answered yet"
    silent = []
    for ref in route["spec"]["parentRefs"]:
        said = _answers(route, ref)
        for condition in said:
            if condition.get("type") in ("Accepted", "ResolvedRefs") and (
                condition.get("status") != "True"
            ):
                return False, f"gateway {ref['name']}: {condition.get('message', '')}"
        if not any(condition.get("type") == "Accepted" for condition in said):
            silent.append(str(ref["name"]))
    if silent:
        return False, f"no answer yet to the route as it is now: gateway {', '.join(silent)}"
    return True, ""


def _answers(route: Obj, ref: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Conditions of a gateway about the present generation of the route."""
    metadata = route["metadata"]
    present, namespace = metadata.get("generation", 0), metadata["namespace"]

    def where(parent: Mapping[str, Any]) -> tuple[str, str]:
        return parent.get("namespace") or namespace, parent.get("name", "")

    found: list[Mapping[str, Any]] = []
    for parent in route.get("status", {}).get("parents") or ():
        about, section = parent.get("parentRef", {}), ref.get("sectionName")
        # Without a section all of the gateway is meant, and some answer for each listener.
        if where(about) == where(ref) and section in (None, about.get("sectionName")):
            found += parent.get("conditions") or ()
    return [one for one in found if (one.get("observedGeneration") or present) >= present]


def reachable(slices: Iterable[Obj], service: str) -> int | None:
    """How many pods the Service of this name sends requests to; None while the cluster has not
    said so of any Service (no controller writes EndpointSlices there)."""
    of_service = [
        one for one in slices if one["metadata"]["labels"].get(SERVICE_NAME_LABEL) == service
    ]
    if not of_service:
        return None
    # A pod of two address families is in two slices. Not known counts as ready, as in kube-proxy.
    return len({
        endpoint.get("targetRef", {}).get("uid") or endpoint["addresses"][0]
        for one in of_service
        for endpoint in one.get("endpoints") or ()
        if endpoint.get("conditions", {}).get("ready") is not False
    })  # fmt: skip


def scaling_state(autoscalers: Mapping[str, Obj | None]) -> tuple[str, str]:
    """(status, message) of ScalingActive: what autoscalers say of themselves, by kind/name.

    ("", "") when there are none. A HorizontalPodAutoscaler says ScalingActive, a ScaledObject
    Ready; one that has not said anything yet is unknown.
    """
    if not autoscalers:
        return "", ""
    unknown = ""
    for name, autoscaler in autoscalers.items():
        said = {
            condition.get("type"): condition
            for condition in (autoscaler or {}).get("status", {}).get("conditions") or ()
        }
        own = said.get("ScalingActive") or said.get("Ready")
        if own is None or own.get("status") not in ("True", "False"):
            unknown = unknown or f"{name} has not reported yet"
        elif own["status"] == "False":
            return "False", f"{name}: {own.get('message') or own.get('reason') or 'is inert'}"
    return ("Unknown", unknown) if unknown else ("True", "every autoscaler works")


def steady(measured: Mapping[str, int], resource: Obj) -> dict[str, int]:
    """Measurements, each as stored unless it has moved by more than 5 %: a status that trembles
    would be written forever."""
    stored = resource.get("status", {}).get("budgets") or {}
    found = {}
    for name, value in measured.items():
        old = (stored.get(name) or {}).get("measuredBytes")
        close = old is not None and abs(value - old) <= STEADY_FRACTION * max(value, old)
        found[name] = old if old is not None and close else value
    return found


def selector_text(workload: Obj | None) -> str:
    """Labels that choose its pods, as `kubectl -l` and the scale subresource take them."""
    labels = (workload or {}).get("spec", {}).get("selector", {}).get("matchLabels", {})
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def noteworthy(
    now: Iterable[Condition], before: Iterable[Condition]
) -> list[tuple[Type, str, str]]:
    """(type, reason, note) of Events for conditions that have changed.

    A reason that asks somebody to act is a Warning, also of pods that serve; Ready becoming True is
    told too. A reason that several conditions share is told once, and once for each object that it
    is about: the first of them says which, others may add how far a rollout is.
    """
    old = {c.type: c for c in before}
    found: dict[str, tuple[Type, str, str]] = {}
    seen = set[str]()
    for condition in now:
        reason, then = reasons.BY_NAME[condition.reason], old.get(condition.type)
        about = condition.message if reason.names_object and reason.name not in seen else ""
        seen.add(reason.name)
        if (
            then
            and (then.status, then.reason) == (condition.status, condition.reason)
            and (not about or then.message == about)
        ):
            continue
        stalled = condition.type == "Stalled"
        is_bad = condition.status == "False" or reason is reasons.VERSION_SKEW
        if stalled or (is_bad and reason.action):
            found.setdefault(reason.name, ("Warning", reason.name, condition.message))
        elif condition.type == "Ready" and condition.status == "True":
            found.setdefault(reason.name, ("Normal", reason.name, condition.message))
    return list(found.values())
