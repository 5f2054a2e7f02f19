"""Ways to pods: Services, opt-in routes for gateways, and NetworkPolicies.

Engines accept their frontends only; frontends reach sources of media only; Jobs accept the operator
only. Policies are IP-level and best effort: host names are enforced by the frontend itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from foveal_operator.api.operations import HttpRoute, InferencePool, RouteMatch
from foveal_operator.kube.kinds import OPERATOR_LABELS
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import (
    ENGINE_EVENTS_PORT,
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    PROGRESS_PORT,
    Context,
    Role,
)


def _port(name: str, number: int, target: str) -> Obj:
    return {"name": name, "port": number, "targetPort": target, "protocol": "TCP"}


def frontend_service(context: Context) -> Obj:
    """Over ready frontends. Annotations are added to those that others have set."""
    networking = context.inference.spec.networking
    port, wanted = _port("http", networking.port, "http"), networking.service
    spec = {"type": wanted.type, "selector": context.selector("frontend"), "ports": [port]}
    body = context.object("v1", "Service", "", "frontend", spec=spec)
    if wanted.annotations:
        body["metadata"]["annotations"] = dict(wanted.annotations)
    return body


def engine_service(context: Context) -> Obj:
    """Headless; it publishes engines before they are ready, so that sessions open early."""
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": context.selector("engine"),
        "ports": [
            _port("wire", ENGINE_PORT, "wire"),
            _port("http", ENGINE_HTTP_PORT, "http"),
        ],
    }
    return context.object("v1", "Service", "engine", "engine", spec=spec)


def http_route(context: Context, route: HttpRoute) -> Obj:
    """To the InferencePool when there is one, else to the Service."""
    networking = context.inference.spec.networking
    own: Obj = {"name": context.name, "port": networking.port}
    if networking.inference_pool:
        own = {
            "group": "inference.networking.k8s.io",
            "kind": "InferencePool",
            "name": context.name,
        }
    if route.splits:
        own["weight"] = route.weight
    spec: Obj = {
        "parentRefs": [msgspec.to_builtins(ref) for ref in route.parent_refs],
        # A rule each, because a prefix can only be taken away where it is the rule's only match.
        "rules": [
            _rule(match, [own, *_backends(route)]) for match in route.matches or (RouteMatch(),)
        ],
    }
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    return context.object("gateway.networking.k8s.io/v1", "HTTPRoute", "", "frontend", spec=spec)


def _backends(route: HttpRoute) -> list[Obj]:
    return [{"name": one.name, "port": one.port, "weight": one.weight} for one in route.splits]


def _rule(match: RouteMatch, backends: list[Obj]) -> Obj:
    chosen: Obj = {"path": {"type": "PathPrefix", "value": match.path}}
    if match.headers:
        chosen["headers"] = [
            {"type": "Exact", "name": header.name, "value": header.value}
            for header in match.headers
        ]
    rule: Obj = {
        "matches": [chosen],
        "backendRefs": backends,
        "timeouts": {"request": "0s"},  # streams may be long
    }
    if match.strip_path and match.path != "/":
        path = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
        rule["filters"] = [{"type": "URLRewrite", "urlRewrite": {"path": path}}]
    return rule


def inference_pool(context: Context, pool: InferencePool) -> Obj:
    spec = {
        "selector": {"matchLabels": context.selector("frontend")},
        "targetPorts": [{"number": context.inference.spec.networking.port}],
        "endpointPickerRef": {
            "name": pool.endpoint_picker,
            "port": {"number": pool.endpoint_picker_port},
        },
    }
    return context.object(
        "inference.networking.k8s.io/v1", "InferencePool", "", "frontend", spec=spec
    )


_PRIVATE_V4 = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")
_PRIVATE_V6 = ("fc00::/7", "fe80::/10")


def _ports(*numbers: int) -> list[Obj]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def frontend_ports(pods: Iterable[Obj]) -> tuple[int, ...]:
    """Where these frontends or templates of some serve, in order."""
    return tuple(sorted({
        int(port["containerPort"])
        for pod in pods
        for container in pod.get("spec", {}).get("containers") or ()
        for port in container.get("ports") or ()
        if (container.get("name"), port.get("name")) == ("frontend", "http")
    }))  # fmt: skip


_DNS_PORTS = (53, 5353)
"""Of the cluster's DNS and, on OpenShift, of its pods: OVN-Kubernetes filters by the latter."""


def _dns() -> Obj:
    protocols = ("UDP", "TCP")
    return {"ports": [{"port": n, "protocol": p} for n in _DNS_PORTS for p in protocols]}


def _in(namespace: str) -> list[Obj]:
    """Every pod of a namespace; nothing for ""."""
    labels = {"kubernetes.io/metadata.name": namespace}
    return [{"namespaceSelector": {"matchLabels": labels}}] if namespace else []


def _operator(context: Context) -> list[Obj]:
    """The operator's pods alone, by their chart's labels."""
    pods = {"podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    return [{**one, **pods} for one in _in(context.facts.operator_namespace)]


def _policy(context: Context, role: Role, ingress: list[Obj], egress: list[Obj]) -> Obj:
    spec: Obj = {
        "podSelector": {"matchLabels": context.selector(role)},
        "policyTypes": ["Ingress", "Egress"],
        # The API server keeps no empty list: writing one would look like drift each time.
        **({"ingress": ingress} if ingress else {}),
        "egress": egress,
    }
    return context.object("networking.k8s.io/v1", "NetworkPolicy", role, role, spec=spec)


def model_network_policy(context: Context) -> Obj:
    """Jobs reach whatever the model lies on; only the operator reads how far a download is."""
    watchers = _operator(context)
    ingress = [{"from": watchers, "ports": _ports(PROGRESS_PORT)}] if watchers else []
    return _policy(context, "model", ingress, [{}])


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
    return _policy(context, "engine", ingress, [_dns()])


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
    # While networking.port changes, those that still serve another. By number: network plug-ins
    # disagree on names, and OVN-Kubernetes takes a named port for every port.
    ports = sorted({context.inference.spec.networking.port, *context.facts.frontend_ports})
    ingress = [{"ports": _ports(*ports)}]
    return _policy(context, "frontend", ingress, egress)
