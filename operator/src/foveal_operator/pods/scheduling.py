"""Scheduling of a pod: which nodes could take it, and what the scheduler says when none does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from foveal_operator.kube.types import Obj, allocatable, condition

_STATE = (
    r"(?:node\.(?:cloudprovider\.)?kubernetes\.io/|readiness\.k8s\.io/|karpenter\.sh/"
    r"|(?:startup|status|ignore)-taint\.cluster-autoscaler\.kubernetes\.io/"
    r"|ToBeDeletedByClusterAutoscaler\b|[^ /:]+/agent-not-ready\b)"
)
"""Taints for a node that starts, is cordoned, is about to go or is not well: they pass, and say
nothing of whom the node is meant for. `agent-not-ready` is what network and storage drivers use
(node.cilium.io, ebs.csi.aws.com)."""
_TOTAL = re.compile(r"0/(\d+) nodes are available: (.*?)(?:preemption:|$)", re.DOTALL)
_EXCLUDED = re.compile(
    r"(\d+) node\(s\) (?:didn't match Pod's node affinity/selector|didn't match node selector"
    rf"|had untolerated taint \{{(?!{_STATE}))"
)
_TAINTED = re.compile(r"(\d+) node\(s\) had untolerated taint\(s\)")
"""By which, newer schedulers do not say."""


def could_take(pod_spec: Obj, node: Obj) -> bool:
    """Whether labels and lasting taints of a node admit the pod. A malformed pod is no error."""
    metadata = node["metadata"]
    labels = metadata.get("labels") or {}
    if any(labels.get(key) != value for key, value in _map(pod_spec, "nodeSelector").items()):
        return False
    affinity = _map(_map(pod_spec, "affinity"), "nodeAffinity")
    required = _map(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    names = {"metadata.name": metadata["name"]}
    if isinstance(required.get("nodeSelectorTerms"), list) and not any(
        all(_holds(one, labels) for one in _maps(term, "matchExpressions"))
        and all(_holds(one, names) for one in _maps(term, "matchFields"))
        for term in _maps(required, "nodeSelectorTerms")
    ):
        return False
    tolerations = _maps(pod_spec, "tolerations")
    return all(
        taint.get("effect") == "PreferNoSchedule"
        or _is_state(taint)
        or any(_tolerates(one, taint) for one in tolerations)
        for taint in _maps(node.get("spec", {}), "taints")
    )


def is_closed(node: Obj) -> bool:
    """Whether it takes no pod now, whomever it is meant for."""
    spec = node.get("spec", {})
    return bool(spec.get("unschedulable")) or any(
        taint.get("effect") != "PreferNoSchedule" and _is_state(taint)
        for taint in _maps(spec, "taints")
    )


def _is_state(taint: Obj) -> bool:
    return re.match(_STATE, str(taint.get("key") or "")) is not None


def has_no_node(message: str, *, taints_are_known: bool = False) -> bool:
    """Whether the scheduler says that no node is meant for the pod: not that those are full.

    Args:
        taints_are_known: the caller has looked which taints of the nodes last.
    """
    if "no nodes available to schedule pods" in message:
        return True
    found = _TOTAL.search(message)
    if found is None:
        return False
    excluded = _EXCLUDED.findall(found[2])
    if not taints_are_known:
        excluded += _TAINTED.findall(found[2])
    return sum(map(int, excluded)) >= int(found[1])


def unschedulable_text(pod: Obj) -> str | None:
    """Why the scheduler finds no node for the pod; None when it does not say that."""
    found = condition(pod, "PodScheduled")
    return str(found.get("message") or "") if found.get("reason") == "Unschedulable" else None


def awaiting_nodes(
    pods: Iterable[Obj], nodes: Iterable[Obj], resources: Mapping[str, int]
) -> frozenset[str]:
    """Names of the pods that no present node is meant for.

    Args:
        nodes: empty when they are not known; then only the scheduler's words count.
        resources: amounts of extended resources that such a pod needs.
    """
    known, found = list(nodes), set[str]()
    for pod in pods:
        text = unschedulable_text(pod)
        if text is None:
            continue
        none_fits = known and not any(
            could_take(pod.get("spec", {}), node)
            and all(allocatable(node, name) >= least for name, least in resources.items())
            for node in known
        )
        if none_fits or has_no_node(text, taints_are_known=bool(known)):
            found.add(str(pod["metadata"]["name"]))
    return frozenset(found)


def _map(body: Obj, key: str) -> Obj:
    found = body.get(key)
    return found if isinstance(found, dict) else {}


def _maps(body: Obj, key: str) -> list[Obj]:
    """A list of maps. What a user has written otherwise the API server refuses, in its words."""
    found = body.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _holds(requirement: Obj, labels: Mapping[str, str]) -> bool:
    given, value = requirement.get("values"), labels.get(str(requirement.get("key", "")))
    values = given if isinstance(given, list) else []
    match requirement.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                found, limit = int(str(value)), int(str(values[0]))
            except (ValueError, IndexError):
                return False
            return found > limit if operator == "Gt" else found < limit
    return False


def _tolerates(toleration: Obj, taint: Obj) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator") == "Exists":
        return not key or key == taint.get("key")
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return bool(key == taint.get("key") and same_value)
