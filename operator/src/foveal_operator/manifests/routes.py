"""Opt-in ways in for gateways: HTTPRoute (Gateway API) and InferencePool."""

from __future__ import annotations

import msgspec

from foveal_operator.api.service import HttpRoute, InferencePool
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context


def http_route(context: Context, route: HttpRoute) -> Obj:
    """To the InferencePool when there is one, else to the Service."""
    networking = context.inference.spec.networking
    backend: Obj = {"name": context.name, "port": networking.port}
    if networking.inference_pool:
        backend = {
            "group": "inference.networking.k8s.io",
            "kind": "InferencePool",
            "name": context.name,
        }
    spec: Obj = {
        "parentRefs": [msgspec.to_builtins(ref) for ref in route.parent_refs],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [backend],
                "timeouts": {"request": "0s"},  # streams may be long
            }
        ],
    }
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    return context.object("gateway.networking.k8s.io/v1", "HTTPRoute", "", "frontend", spec=spec)


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
