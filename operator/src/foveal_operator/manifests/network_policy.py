"""NetworkPolicies: engines accept their frontends only; frontends reach sources of media only.

IP-level and best effort: host names are enforced by the frontend itself.
"""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import ENGINE_HTTP_PORT, ENGINE_PORT, Context

_PRIVATE_V4 = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")
_PRIVATE_V6 = ("fc00::/7", "fe80::/10")


def _ports(*numbers: int) -> list[Obj]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _dns() -> Obj:
    return {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def engine_network_policy(context: Context) -> Obj:
    frontends = {"podSelector": {"matchLabels": context.selector("frontend")}}
    names = (context.facts.monitoring_namespace, context.facts.operator_namespace)
    watchers = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in dict.fromkeys(names)
        if name
    ]
    spec = {
        "podSelector": {"matchLabels": context.selector("engine")},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [frontends], "ports": _ports(ENGINE_PORT, ENGINE_HTTP_PORT)},
            {"from": watchers, "ports": _ports(ENGINE_HTTP_PORT)},
        ],
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
