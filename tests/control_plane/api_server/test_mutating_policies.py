"""Admission that changes what the operator writes (a mesh, a mirror of images) is not fought."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.api_server.operator_process import RESYNC_SECONDS
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import NO_LEASE, STEPS, run

API = "admissionregistration.k8s.io/v1"
MIRROR = "mirror.example/foveal-runtime:1"
COMPONENT = "app.kubernetes.io/component"
IMAGE = "/spec/template/spec/containers/0/image"
LABEL = "Object{metadata: Object.metadata{labels: {%s}}}"
CHANGES = {
    "pods": (("", "pods"), "ApplyConfiguration", LABEL % '"mesh": "on"'),
    "own": (("", "services"), "ApplyConfiguration", LABEL % f'"{COMPONENT}": "theirs"'),
    "workloads": (
        ("apps", "*"), "JSONPatch",
        f'[JSONPatch{{op: "replace", path: "{IMAGE}", value: "{MIRROR}"}}]',
    ),
}  # fmt: skip
"""By name: what is changed, and how: something new, a label of the operator's, a field of its."""


def policy(sandbox: Sandbox, name: str) -> list[dict[str, Any]]:
    (group, resource), kind, expression = CHANGES[name]
    field = {"ApplyConfiguration": "applyConfiguration", "JSONPatch": "jsonPatch"}[kind]
    names = ["deployments", "statefulsets"] if resource == "*" else [resource]
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "resources": names}
    called = {"name": f"{sandbox.namespace}-{name}"}
    here = {"matchLabels": {"kubernetes.io/metadata.name": sandbox.namespace}}
    rules = [{**rule, "operations": ["CREATE", "UPDATE"]}]
    change = {"patchType": kind, field: {"expression": expression}}
    spec = {"matchConstraints": {"resourceRules": rules}, "mutations": [change]}
    spec |= {"failurePolicy": "Fail", "reinvocationPolicy": "IfNeeded"}
    bound = {"policyName": called["name"], "matchResources": {"namespaceSelector": here}}
    kinds = {"MutatingAdmissionPolicy": spec, "MutatingAdmissionPolicyBinding": bound}
    return [
        {"apiVersion": API, "kind": kind, "metadata": called, "spec": body}
        for kind, body in kinds.items()
    ]


@pytest.mark.timeout(300, func_only=True)
def test_what_admission_changes_is_not_written_again_and_again(sandbox: Sandbox) -> None:
    api, namespace = sandbox.api, sandbox.namespace
    bodies = [body for name in CHANGES for body in policy(sandbox, name)]
    for body in bodies:
        api.create(body).must()
    try:
        probe = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "p"}, "spec": {}}
        probe["metadata"]["namespace"] = namespace  # type: ignore[index]
        probe["spec"] = {"ports": [{"port": 1}]}

        def is_in_effect() -> bool:
            made = api.create(probe, dryRun="All").must()
            return COMPONENT in made["metadata"].get("labels", {})

        wait_until("policies are in effect", is_in_effect, 30)
        operator = sandbox.operator("a", NO_LEASE)
        operator.start()
        run(sandbox, STEPS[0])
        run(sandbox, STEPS[1])
        (pod,) = sandbox.nodes.pods("engine")
        assert pod["spec"]["containers"][0]["image"] == MIRROR
        assert pod["metadata"]["labels"]["mesh"] == "on"
        for kind, name in (("Service", "qwen"), ("Deployment", "qwen-frontend")):
            change = {"metadata": {"labels": {"touched": "yes"}}}  # so that it is looked at
            api.merge(kind, namespace, name, change).must()
        sandbox.settled()
        writes, until = len(sandbox.proxy.writes), time.monotonic() + 2.5 * RESYNC_SECONDS
        wait_until("two resyncs have passed", lambda: time.monotonic() > until, 60)
        assert [str(call) for call, _ in sandbox.proxy.writes[writes:]] == []
        assert sandbox.conditions()["Ready"] == "True"
        assert "as often as it is corrected" not in operator.log_tail(1000)
    finally:
        for body in bodies:
            api.request("DELETE", api.path_of(body))
