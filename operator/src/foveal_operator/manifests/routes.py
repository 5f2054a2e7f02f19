"""Opt-in ways in for gateways: HTTPRoute (Gateway API) and InferencePool."""

from __future__ import annotations

import msgspec

from foveal_operator.api.service import HttpRoute, InferencePool, RouteMatch
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context


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
