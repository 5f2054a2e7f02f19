"""The operator with exactly the chart's roles: it does its work and is refused nothing."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.manifests import access
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.scenarios import STEPS, run
from tests.support.api_server.world import KIND, World

RBAC = "rbac.authorization.k8s.io/v1"
ACCOUNT = "operator"
LEASE_NAME = "foveal-operator"


def role(name: str, namespace: str, scope: access.Scope) -> list[dict[str, Any]]:
    """Role and binding; the cluster's for scope nodes."""
    prefix = "Cluster" if scope == "nodes" else ""
    metadata: dict[str, str] = {"name": name}
    if not prefix:
        metadata["namespace"] = namespace
    rules = []
    for rule in access.rules(scope):
        one = {"apiGroups": [rule.group], "resources": rule.resources, "verbs": rule.verbs}
        rules.append({**one, "resourceNames": [LEASE_NAME]} if rule.own_name else one)
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{prefix}Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    return [
        {"apiVersion": RBAC, "kind": f"{prefix}Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": RBAC,
            "kind": f"{prefix}RoleBinding",
            "metadata": metadata,
            "roleRef": ref,
            "subjects": [subject],
        },
    ]


def token(world: World) -> str:
    """Of the service account that has the chart's roles and nothing else."""
    namespace, api = world.namespace, world.api
    account = {"name": ACCOUNT, "namespace": namespace}
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}
    api.create(body).must()
    bodies = role("foveal", namespace, "resources") + role("foveal-lease", namespace, "lease")
    bodies += role(f"{namespace}-nodes", namespace, "nodes")
    for one in bodies:
        api.create(one).must()
    reply = api.request(
        "POST",
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{ACCOUNT}/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
    )
    return str(reply.must()["status"]["token"])


@pytest.mark.timeout(300, func_only=True)
def test_the_charts_roles_are_enough(world: World) -> None:
    # A name of its own: other tests' operators append to the log of theirs.
    config = world.cluster.kubeconfig(
        f"{world.namespace}-role", token(world), url=world.proxy.url("limited")
    )
    operator = OperatorProcess("limited", config, world.namespace)
    world.operators.append(operator)
    operator.start()
    found = run(world, STEPS[0])
    assert {"Deployment/qwen-frontend", "StatefulSet/qwen-engine"} <= set(found)
    world.api.delete(KIND, world.namespace, "qwen").must()
    _, metrics = operator.ask("/metrics")
    refused = [
        line for line in metrics.splitlines()
        if line.startswith("rest_client_requests_total") and 'code="403"' in line
    ]  # fmt: skip
    assert not refused, operator.log_tail()
    assert "forbidden" not in operator.log_tail(400).lower()


def test_secrets_cannot_be_read_with_them(world: World) -> None:
    """The grader is the API server's own answer."""
    account = f"system:serviceaccount:{world.namespace}:{ACCOUNT}"
    token(world)

    def may(verb: str, group: str, resource: str, subresource: str = "") -> bool:
        attributes = {"namespace": world.namespace, "verb": verb, "group": group}
        attributes |= {"resource": resource, "subresource": subresource}
        reply = world.api.request(
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": account, "resourceAttributes": attributes},
            },
        )
        return bool(reply.must()["status"]["allowed"])

    assert may("create", "", "secrets")
    for verb in ("get", "list", "watch", "patch", "update", "delete"):
        assert not may(verb, "", "secrets"), verb
    assert not may("create", "", "pods", "exec")
    assert not may("patch", "foveal.dev", "multimodalinferences")
    assert may("patch", "foveal.dev", "multimodalinferences", "status")
    assert not may("create", "", "pods")
    assert not may("update", "coordination.k8s.io", "leases")
