"""The operator with exactly the chart's roles: it does its work and is refused nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.api_server.chart_role import ACCOUNT, role, token
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import KIND, Sandbox
from tests.support.api_server.scenarios import STEPS, run


@pytest.mark.timeout(300, func_only=True)
def test_the_charts_roles_are_enough(sandbox: Sandbox) -> None:
    config = sandbox.cluster.kubeconfig(
        f"{sandbox.namespace}-role", token(sandbox), url=sandbox.proxy.url("limited")
    )
    operator = OperatorProcess("limited", config, sandbox.namespace)
    sandbox.operators.append(operator)
    operator.start()
    found = run(sandbox, STEPS[0])
    assert {"Deployment/qwen-frontend", "StatefulSet/qwen-engine"} <= set(found)
    sandbox.api.delete(KIND, sandbox.namespace, "qwen").must()
    _, metrics = operator.ask("/metrics")
    refused = [
        line for line in metrics.splitlines()
        if line.startswith("rest_client_requests_total") and 'code="403"' in line
    ]  # fmt: skip
    assert not refused, operator.log_tail()
    assert "forbidden" not in operator.log_tail(400).lower()


@pytest.mark.timeout(300, func_only=True)
def test_a_role_without_endpoint_slices_is_told_and_does(sandbox: Sandbox) -> None:
    """With rbac.create=false and an older role the operator waited for its first list."""
    config = sandbox.cluster.kubeconfig(
        f"{sandbox.namespace}-role", token(sandbox, "endpointslices"), url=sandbox.proxy.url("own")
    )
    operator = OperatorProcess("own", config, sandbox.namespace)
    sandbox.operators.append(operator)
    operator.start()
    run(sandbox, STEPS[0])
    sandbox.wait_condition("Ready", timeout_seconds=90.0)
    operator.wait_ready()
    assert "going on without endpointslices" in operator.log_tail(400)


def allowed_to(sandbox: Sandbox) -> Callable[..., bool]:
    """Asks the API server itself what the chart's roles allow."""
    account = f"system:serviceaccount:{sandbox.namespace}:{ACCOUNT}"
    token(sandbox)

    def may(
        verb: str, group: str, resource: str, subresource: str = "", *, cluster: bool = False
    ) -> bool:
        attributes = {"verb": verb, "group": group, "resource": resource}
        attributes |= {"subresource": subresource}
        attributes |= {} if cluster else {"namespace": sandbox.namespace}
        reply = sandbox.api.request(
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": account, "resourceAttributes": attributes},
            },
        )
        return bool(reply.must()["status"]["allowed"])

    return may


def test_secrets_cannot_be_read_with_them(sandbox: Sandbox) -> None:
    """The grader is the API server's own answer."""
    may = allowed_to(sandbox)
    assert may("create", "", "secrets")
    for verb in ("get", "list", "watch", "patch", "update", "delete"):
        assert not may(verb, "", "secrets"), verb
    assert not may("create", "", "pods", "exec")


CLUSTERS_OWN = [
    ("", "namespaces"), ("", "nodes"), ("", "persistentvolumes"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("resource.k8s.io", "resourceslices"), ("resource.k8s.io", "deviceclasses"),
]  # fmt: skip


def test_what_belongs_to_the_cluster_cannot_be_written_with_them(sandbox: Sandbox) -> None:
    may = allowed_to(sandbox)
    assert may("list", "", "nodes", cluster=True)
    for group, resource in CLUSTERS_OWN:
        for verb in ("create", "update", "patch", "delete", "deletecollection"):
            assert not may(verb, group, resource, cluster=True), (verb, resource)
    for resource in ("roles", "rolebindings"):
        for verb in ("create", "update", "patch", "delete", "escalate", "bind"):
            assert not may(verb, "rbac.authorization.k8s.io", resource), (verb, resource)


@pytest.mark.timeout(300, func_only=True)
def test_a_namespace_without_rights_stops_no_other(sandbox: Sandbox) -> None:
    """An operator for two namespaces, of which one has no RoleBinding, gets it, and loses it: no
    list there was allowed, and nothing was reconciled in the other one."""
    api, other = sandbox.api, f"{sandbox.namespace}-other"
    config = sandbox.cluster.kubeconfig(
        f"{sandbox.namespace}-two", token(sandbox), url=sandbox.proxy.url("a")
    )
    operator = OperatorProcess(
        "a", config, sandbox.namespace, f"--namespaces={sandbox.namespace},{other}"
    )
    sandbox.operators.append(operator)
    operator.start()
    operator.wait_ready()
    sandbox.apply(sandbox.sample("cpu"))
    sandbox.wait_condition("Ready", timeout_seconds=90)

    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}}).must()
    try:
        bodies = role("foveal", other, "resources")
        bodies[1]["subjects"][0]["namespace"] = sandbox.namespace
        for body in bodies:
            api.create(body).must()
        elsewhere = sandbox.sample("cpu")
        elsewhere["metadata"]["namespace"] = other
        api.apply(elsewhere, "user").must()

        def is_seen() -> bool:
            found = api.get("MultiModalInference", other, "qwen") or {}
            return "conditions" in found.get("status", {})

        wait_until("the other namespace is taken in", is_seen, 60)
        api.delete("RoleBinding", other, "foveal").must()
        wait_until("it is left out again", lambda: _is_left_out(operator, other), 60)
        operator.wait_ready()
        sandbox.apply(sandbox.sample("cpu", frontend__replicas=3))
        wait_until(
            "three frontends are there", lambda: len(sandbox.nodes.pods("frontend")) == 3, 60
        )
        assert operator.ask("/readyz")[0] == 200
    finally:
        api.delete("Namespace", "", other)


def _is_left_out(operator: OperatorProcess, namespace: str) -> bool:
    return operator.log_tail(1000).count(f"going on without namespace {namespace}") == 2
