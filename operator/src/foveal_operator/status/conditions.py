"""Small pure questions about live objects: what the status and the Events are made from.

Used by the reconciler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.api.status import Condition
from foveal_operator.kube.events import Type
from foveal_operator.kube.types import Obj

STEADY_FRACTION = 0.05
SERVICE_NAME_LABEL = "kubernetes.io/service-name"


class Refusal(msgspec.Struct, frozen=True):
    """Why an object of the resource's could not be written, for as long as nothing is edited."""

    reason: Reason
    text: str


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
    """Whether every gateway has accepted the HTTPRoute; None when no route is asked for."""
    if not is_wanted:
        return None, ""
    parents = (route or {}).get("status", {}).get("parents") or []
    if not parents:
        return False, "no gateway has answered yet"
    for parent in parents:
        for condition in parent.get("conditions") or ():
            if condition.get("type") in ("Accepted", "ResolvedRefs") and (
                condition.get("status") != "True"
            ):
                name = parent.get("parentRef", {}).get("name", "")
                return False, f"gateway {name}: {condition.get('message', '')}"
    return True, ""


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
    would be written for ever."""
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


def config_maps_in_use(workloads: Iterable[Obj | None], pods: Iterable[Obj]) -> set[str]:
    """ConfigMaps that templates or pods mount."""
    specs = [w["spec"]["template"]["spec"] for w in workloads if w is not None]
    specs += [pod.get("spec", {}) for pod in pods]
    return {
        str(volume["configMap"]["name"])
        for spec in specs
        for volume in spec.get("volumes") or ()
        if volume.get("configMap", {}).get("name")
    }


def newest(config_maps: Iterable[Obj], document: str, num_kept: int) -> set[str]:
    """Names of the youngest ConfigMaps that hold this start-up document."""
    found = [body for body in config_maps if document in (body.get("data") or {})]
    found.sort(key=lambda b: (b["metadata"].get("creationTimestamp", ""), b["metadata"]["name"]))
    return {body["metadata"]["name"] for body in found[-num_kept:]}


def noteworthy(
    now: Iterable[Condition], before: Iterable[Condition]
) -> list[tuple[Type, str, str]]:
    """(type, reason, note) of Events for conditions that have changed.

    A reason that asks somebody to act is a Warning; Ready becoming True is told too. A reason that
    several conditions share is told once, and once for each object that it is about.
    """
    old = {c.type: c for c in before}
    found: dict[str, tuple[Type, str, str]] = {}
    for condition in now:
        reason, then = reasons.BY_NAME[condition.reason], old.get(condition.type)
        about = condition.message if reason.names_object else ""
        if (
            then
            and (then.status, then.reason) == (condition.status, condition.reason)
            and (not about or then.message == about)
        ):
            continue
        stalled = condition.type == "Stalled"
        if stalled or (condition.status == "False" and reason.action):
            found.setdefault(reason.name, ("Warning", reason.name, condition.message))
        elif condition.type == "Ready" and condition.status == "True":
            found.setdefault(reason.name, ("Normal", reason.name, condition.message))
    return list(found.values())
