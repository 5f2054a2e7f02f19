"""Scaling, Services and routes on a real API server: by its own subresources and validation."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api, Reply
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import KIND, Sandbox
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.samples import put, resource

SCALE = {"apiVersion": "autoscaling/v1", "kind": "Scale"}
MERGE = "application/merge-patch+json"


def stored(api: Api, namespace: str, **spec: Any) -> Obj:
    return api.create(put(resource(**spec), "metadata.namespace", namespace)).must()


def scaled(api: Api, obj: Obj, replicas: int) -> Reply:
    """As `kubectl scale mmi/qwen --replicas` does."""
    body = {**SCALE, "spec": {"replicas": replicas}}
    return api.request("PATCH", api.path_of(obj, "scale"), body, MERGE)


def test_scale_sets_the_number_of_engines(api: Api, namespace: str) -> None:
    obj = stored(api, namespace, frontend={"replicas": 2})
    scaled(api, obj, 3).must()
    spec = api.request("GET", api.path_of(obj)).must()["spec"]
    assert (spec["engine"]["replicas"], spec["frontend"]["replicas"]) == (3, 2)


def test_scale_beyond_the_fields_bound_is_refused(api: Api, namespace: str) -> None:
    reply = scaled(api, stored(api, namespace), 257)
    assert reply.status == 422
    assert "spec.engine.replicas" in reply.message


def test_scale_beside_autoscaling_is_refused_clearly(api: Api, namespace: str) -> None:
    autoscaling = {"maxReplicas": 4, "prometheusAddress": "http://p:9090"}
    reply = scaled(api, stored(api, namespace, engine={"autoscaling": autoscaling}), 3)
    assert reply.status == 422
    assert "set replicas or autoscaling, not both" in reply.message


def test_an_autoscaler_reads_replicas_and_selector(api: Api, namespace: str) -> None:
    """What a HorizontalPodAutoscaler of the resource goes by."""
    obj = stored(api, namespace, engine={"replicas": 2})
    selector = "app.kubernetes.io/component=engine,app.kubernetes.io/instance=qwen"
    engine = {"desired": 2, "replicas": 1, "selector": selector}
    status = {"status": {"engine": engine}}
    api.request("PATCH", api.path_of(obj, "status"), status, MERGE).must()
    scale = api.request("GET", api.path_of(obj, "scale")).must()
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": selector}


@pytest.mark.parametrize("name", ["*.example.org", "a.example.org", "localhost"])
def test_host_names_of_the_gateway_api_are_taken(api: Api, namespace: str, name: str) -> None:
    route = {"parentRefs": [{"name": "gw"}], "hostnames": [name]}
    stored(api, namespace, networking={"httpRoute": route})


@pytest.mark.parametrize("names", [["b", "b"], ["b", "c", "b"]])
def test_a_resource_shares_a_route_once(api: Api, namespace: str, names: list[str]) -> None:
    splits = [{"name": name, "weight": 1} for name in names]
    route = {"parentRefs": [{"name": "gw"}], "splits": splits}
    obj = put(resource(networking={"httpRoute": route}), "metadata.namespace", namespace)
    assert "Duplicate value" in api.create(obj).message


def test_rules_stay_within_the_servers_budget_at_every_bound(api: Api, namespace: str) -> None:
    """The API server refuses a resource whose rules cost too much to evaluate."""
    notes = {f"example.org/{'k' * 50}{i}": "v" * 1024 for i in range(32)}
    route = {
        "parentRefs": [{"name": f"gw{i}"} for i in range(8)],
        "hostnames": [f"h{i}." + "a" * 60 + ".example.org" for i in range(16)],
        "matches": [
            {
                "path": f"/{i}" + "/a" * 500,
                "headers": [{"name": f"x{j}", "value": "v" * 1024} for j in range(16)],
            }
            for i in range(8)
        ],
        "splits": [{"name": f"s{i}", "weight": 1} for i in range(8)],
    }
    service = {"type": "LoadBalancer", "annotations": notes}
    obj = stored(api, namespace, networking={"httpRoute": route, "service": service})
    assert len(obj["spec"]["networking"]["service"]["annotations"]) == 32


@pytest.mark.timeout(300, func_only=True)
def test_the_clients_service_changes_and_keeps_others_annotations(sandbox: Sandbox) -> None:
    namespace = sandbox.namespace
    sandbox.operator("a", NO_LEASE).start()

    def ask(**service: Any) -> None:
        more: dict[str, Any] = {"networking": {"service": service}} if service else {}
        sandbox.apply(sandbox.sample("cpu", **more))

    def entry() -> Obj:
        return sandbox.api.get("Service", namespace, "qwen") or {"metadata": {}, "spec": {}}

    ask(type="NodePort", annotations={"ours.example.org/a": "1"})
    wait_until("it is a NodePort", lambda: entry()["spec"].get("type") == "NodePort", 120)
    note = {"metadata": {"annotations": {"theirs.example.org/b": "2"}}}
    sandbox.api.merge("Service", namespace, "qwen", note).must()
    ask(type="ClusterIP", annotations={"ours.example.org/a": "3"})
    wait_until("it is a ClusterIP", lambda: entry()["spec"]["type"] == "ClusterIP", 60)
    notes = entry()["metadata"]["annotations"]
    assert notes == {"ours.example.org/a": "3", "theirs.example.org/b": "2"}
    assert "nodePort" not in entry()["spec"]["ports"][0]
    ask()
    wait_until(
        "ours is gone",
        lambda: entry()["metadata"]["annotations"] == {"theirs.example.org/b": "2"},
        60,
    )
    live = sandbox.api.get(KIND, namespace, "qwen") or {}
    scaled(sandbox.api, live, 2).must()
    engines = "qwen-engine"
    wait_until(
        "two engines are asked for",
        lambda: (sandbox.api.get("StatefulSet", namespace, engines) or {})["spec"]["replicas"] == 2,
        60,
    )
