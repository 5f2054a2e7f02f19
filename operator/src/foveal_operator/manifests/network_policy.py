"""NetworkPolicies: engines accept their frontends only; frontends reach sources of media only; Jobs
accept the operator only.

IP-level and best effort: host names are enforced by the frontend itself.
"""

from __future__ import annotations

from foveal_operator.kube.kinds import OPERATOR_LABELS
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import (
    ENGINE_EVENTS_PORT,
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    PROGRESS_PORT,
    Context,
)

_PRIVATE_V4 = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")
_PRIVATE_V6 = ("fc00::/7", "fe80::/10")


def _ports(*numbers: int) -> list[Obj]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _dns() -> Obj:
    return {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def _in(namespace: str) -> list[Obj]:
    """Every pod of a namespace; nothing for ""."""
    labels = {"kubernetes.io/metadata.name": namespace}
    return [{"namespaceSelector": {"matchLabels": labels}}] if namespace else []


def _operator(context: Context) -> list[Obj]:
    """The operator's pods alone, by their chart's labels."""
    pods = {"podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    return [{**one, **pods} for one in _in(context.facts.operator_namespace)]


def model_network_policy(context: Context) -> Obj:
    """Jobs reach whatever the model lies on; only the operator reads how far a download is."""
    spec: Obj = {
        "podSelector": {"matchLabels": context.selector("model")},
        "policyTypes": ["Ingress", "Egress"],
        "egress": [{}],
    }
    # The API server keeps no empty list: writing one would look like drift each time.
    if watchers := _operator(context):
        spec["ingress"] = [{"from": watchers, "ports": _ports(PROGRESS_PORT)}]
    return context.object("networking.k8s.io/v1", "NetworkPolicy", "model", "model", spec=spec)


def engine_network_policy(context: Context) -> Obj:
    frontends = {"podSelector": {"matchLabels": context.selector("frontend")}}
    ingress: list[Obj] = [{"from": [frontends], "ports": _ports(ENGINE_PORT, ENGINE_HTTP_PORT)}]
    # An empty `from` would admit everyone.
    if watchers := [*_operator(context), *_in(context.facts.monitoring_namespace)]:
        ingress.append({"from": watchers, "ports": _ports(ENGINE_HTTP_PORT)})
    if events := context.inference.spec.networking.cache_events:
        readers: Obj = {"podSelector": {"matchLabels": dict(events.reader_labels)}}
        if events.reader_namespace:
            readers |= _in(events.reader_namespace)[0]
        ports = _ports(ENGINE_EVENTS_PORT, ENGINE_EVENTS_PORT + 1)
        ingress.append({"from": [readers], "ports": ports})
    spec = {
        "podSelector": {"matchLabels": context.selector("engine")},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [_dns()],
    }
    return context.object("networking.k8s.io/v1", "NetworkPolicy", "engine", "engine", spec=spec)


def frontend_network_policy(context: Context) -> Obj:
    engines = {"podSelector": {"matchLabels": context.selector("engine")}}
    egress: list[Obj] = [
        _dns(),
        {"to": [engines], "ports": _ports(ENGINE_PORT, ENGINE_HTTP_PORT)},
    ]
    if context.inference.spec.security.media_sources.allowed_domains:
        outside = [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": [*_PRIVATE_V4]}},
            {"ipBlock": {"cidr": "::/0", "except": [*_PRIVATE_V6]}},
        ]
        egress.append({"to": outside, "ports": _ports(80, 443)})
    spec = {
        "podSelector": {"matchLabels": context.selector("frontend")},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": _ports(context.inference.spec.networking.port)}],
        "egress": egress,
    }
    return context.object(
        "networking.k8s.io/v1", "NetworkPolicy", "frontend", "frontend", spec=spec
    )
