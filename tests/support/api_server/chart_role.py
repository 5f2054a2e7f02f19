"""A service account with exactly the chart's roles."""

from __future__ import annotations

from typing import Any

from foveal_operator.manifests import access
from tests.support.api_server.sandbox import Sandbox

RBAC = "rbac.authorization.k8s.io/v1"
ACCOUNT = "operator"
LEASE_NAME = "foveal-operator"


def role(name: str, namespace: str, scope: access.Scope, without: str = "") -> list[dict[str, Any]]:
    """Role and binding; the cluster's for scope nodes.

    Args:
        without: a resource that the role says nothing of.
    """
    prefix = "Cluster" if scope == "nodes" else ""
    metadata: dict[str, str] = {"name": name}
    if not prefix:
        metadata["namespace"] = namespace
    rules = []
    for rule in access.rules(scope):
        named = [resource for resource in rule.resources if resource != without]
        if not named:
            continue
        one = {"apiGroups": [rule.group], "resources": named, "verbs": rule.verbs}
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


def token(sandbox: Sandbox, without: str = "") -> str:
    """Of the service account that has the chart's roles and nothing else."""
    namespace, api = sandbox.namespace, sandbox.api
    account = {"name": ACCOUNT, "namespace": namespace}
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}
    api.create(body).must()
    bodies = role("foveal", namespace, "resources", without) + role(
        "foveal-lease", namespace, "lease"
    )
    bodies += role(f"{namespace}-nodes", namespace, "nodes")
    for one in bodies:
        api.create(one).must()
    reply = api.request(
        "POST",
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{ACCOUNT}/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
    )
    return str(reply.must()["status"]["token"])
