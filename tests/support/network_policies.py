"""Evaluation of NetworkPolicies over pods and flows, as the API's documentation defines them.

Nothing here enforces anything: it says what a network plug-in that implements the API would admit.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foveal_operator.kube.types import Obj

NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class End:
    """One end of a flow: a pod, or, without a namespace, an address outside the cluster."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.0.0.1"


def admits(
    policies: Iterable[Obj], source: End, target: End, port: int, protocol: str = "TCP"
) -> bool:
    """Whether both ends let a connection through."""
    every = list(policies)
    return _side(every, source, target, "Egress", port, protocol) and _side(
        every, target, source, "Ingress", port, protocol
    )


def _side(
    policies: list[Obj], own: End, peer: End, direction: str, port: int, protocol: str
) -> bool:
    """One end's policies: none that selects it admits all; else any rule of any of them."""
    mine = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"]
        and policy["metadata"]["namespace"] == own.namespace
        and _matches(policy["spec"]["podSelector"], own.labels)
    ]
    key = "from" if direction == "Ingress" else "to"
    rules = [rule for spec in mine for rule in spec.get(direction.lower()) or ()]
    return not mine or any(
        _has_port(rule.get("ports"), port, protocol) and _has_peer(rule.get(key), own, peer)
        for rule in rules
    )


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, "no other selectors are generated"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _has_port(ports: list[Obj] | None, port: int, protocol: str) -> bool:
    return not ports or any((one["port"], one["protocol"]) == (port, protocol) for one in ports)


def _has_peer(peers: list[Obj] | None, own: End, peer: End) -> bool:
    return not peers or any(_is_peer(one, own, peer) for one in peers)


def _is_peer(one: Obj, own: End, peer: End) -> bool:
    if "ipBlock" in one:
        address = ipaddress.ip_address(peer.address)
        block = one["ipBlock"]
        inside = [address in ipaddress.ip_network(net) for net in (block.get("except") or ())]
        return address in ipaddress.ip_network(block["cidr"]) and not any(inside)
    if not peer.namespace:
        return False
    namespaces = one.get("namespaceSelector")
    is_near = peer.namespace == own.namespace if namespaces is None else (
        _matches(namespaces, {NAME: peer.namespace})
    )  # fmt: skip
    return is_near and _matches(one.get("podSelector") or {}, peer.labels)
