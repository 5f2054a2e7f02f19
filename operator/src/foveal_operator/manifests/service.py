"""Two Services: the entry for clients, and a headless one by which frontends find engines."""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import ENGINE_HTTP_PORT, ENGINE_PORT, Context


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
