"""Pods and objects that admission refuses are told with the API server's words; so are rights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.kube.types import Obj
from tests.support.api_server.chart_role import RBAC, token
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import KIND, Sandbox, claim_in
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.api_server.webhook import NAME, WORDS, denying

Obstacle = Callable[[Sandbox, Path], AbstractContextManager[None]]


def wait_told(sandbox: Sandbox, kind: str, reason: Reason, words: str) -> None:
    try:
        wait_until(
            f"{kind} is {reason.name}",
            lambda: sandbox.condition_text(kind).startswith(f"{reason.name}: "),
            40,
        )
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{sandbox.told()}") from None
    message = sandbox.condition_text(kind)
    assert words in message
    assert message.endswith(f"{reason.action} ({reason.anchor})")

    def events() -> list[str]:
        listed = sandbox.api.list("Event", sandbox.namespace)
        return [e["note"] for e in listed if e["reason"] == reason.name and e["type"] == "Warning"]

    wait_until("an Event tells it too", lambda: any(words in note for note in events()), 10)


@contextlib.contextmanager
def _existing(sandbox: Sandbox, body: Obj, status: Obj | None = None) -> Iterator[None]:
    metadata = {"name": "small", "namespace": sandbox.namespace}
    sandbox.api.create({**body, "apiVersion": "v1", "metadata": metadata}).must()
    if status:
        change = {"status": status}
        sandbox.api.merge(body["kind"], sandbox.namespace, "small", change, "status").must()
    try:
        yield
    finally:
        sandbox.api.delete(body["kind"], sandbox.namespace, "small")


def quota(sandbox: Sandbox, folder: Path) -> AbstractContextManager[None]:
    """Its controller does not run here, so the figures it would write are written."""
    hard = {"pods": "0"}
    body = {"kind": "ResourceQuota", "spec": {"hard": hard}}
    return _existing(sandbox, body, {"hard": hard, "used": {"pods": "0"}})


def limit_range(sandbox: Sandbox, folder: Path) -> AbstractContextManager[None]:
    limits = [{"type": "Container", "max": {"memory": "1Mi"}}]
    return _existing(sandbox, {"kind": "LimitRange", "spec": {"limits": limits}})


def default_limit(sandbox: Sandbox, folder: Path) -> AbstractContextManager[None]:
    """What a container without a CPU limit gets."""
    limits = [{"type": "Container", "default": {"cpu": "100m"}}]
    return _existing(sandbox, {"kind": "LimitRange", "spec": {"limits": limits}})


def webhook(sandbox: Sandbox, folder: Path) -> AbstractContextManager[None]:
    return denying(sandbox.api, folder, sandbox.namespace, "", "pods")


def nothing(sandbox: Sandbox, folder: Path) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def _overlay(**spec: Any) -> Obj:
    return {"spec": spec}


PRIVILEGED = {
    "name": "sidecar", "image": "registry.example/side:1", "securityContext": {"privileged": True},
}  # fmt: skip
CASES: dict[str, tuple[Obstacle, Obj | None, Reason, str]] = {
    "quota": (quota, None, reasons.QUOTA_EXCEEDED, "exceeded quota: small"),
    "limit range": (limit_range, None, reasons.QUOTA_EXCEEDED, "maximum memory usage per"),
    "default": (default_limit, None, reasons.QUOTA_EXCEEDED, "to cpu limit of 100m"),
    "webhook": (webhook, None, reasons.ADMISSION_DENIED, NAME),
    "standard": (
        nothing, _overlay(containers=[PRIVILEGED]), reasons.POD_SECURITY, 'container "sidecar"'
    ),
    "priority": (
        nothing, _overlay(priorityClassName="gone"), reasons.PRIORITY_CLASS_MISSING, "name gone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("role", ["engine", "frontend"])
def test_why_pods_cannot_be_created_is_told(
    sandbox: Sandbox, tmp_path: Path, role: str, case: str
) -> None:
    """Engines were Starting, and only an Event of the StatefulSet said why."""
    obstacle, overlay, reason, words = CASES[case]
    kind = {"engine": "EnginesReady", "frontend": "FrontendsReady"}[role]
    with obstacle(sandbox, tmp_path):
        sandbox.operator("a", NO_LEASE).start()
        sandbox.apply(sandbox.sample("cpu", **{f"{role}__podTemplate": overlay or {}}))
        wait_told(sandbox, kind, reason, words)
        assert sandbox.condition_text("Stalled") == "", "it passes as soon as the refusal does"
    if overlay is None:
        wait_until(f"{kind} recovers", lambda: reason.name not in sandbox.condition_text(kind), 90)


@pytest.mark.parametrize("case", ["quota", "webhook"])
def test_why_a_job_gets_no_pod_is_told(sandbox: Sandbox, tmp_path: Path, case: str) -> None:
    obstacle, _, reason, words = CASES[case]
    with obstacle(sandbox, tmp_path):
        sandbox.operator("a", NO_LEASE).start()
        sandbox.api.create(claim_in(sandbox.namespace))
        sandbox.api.apply(sandbox.sample("cpu"), "user").must()
        wait_told(sandbox, "ModelReady", reason, words)
        assert f"{reason.name}: " in sandbox.condition_text("Ready")


@pytest.mark.timeout(240, func_only=True)
def test_a_refused_job_is_made_again_with_corrected_settings(sandbox: Sandbox) -> None:
    """Jobs take the frontends' settings; a Job's template cannot change, so a new one is made."""
    sandbox.operator("a", NO_LEASE).start()
    sandbox.api.create(claim_in(sandbox.namespace))
    template = {"frontend__podTemplate": _overlay(priorityClassName="gone")}
    sandbox.api.apply(sandbox.sample("cpu", **template), "user").must()
    wait_told(sandbox, "ModelReady", reasons.PRIORITY_CLASS_MISSING, "name gone")
    before = sandbox.api.list("Job", sandbox.namespace)[0]["metadata"]
    sandbox.api.apply(sandbox.sample("cpu"), "user").must()

    def is_made_again() -> bool:
        jobs = sandbox.api.list("Job", sandbox.namespace)
        return any(job["metadata"]["uid"] != before["uid"] for job in jobs)

    wait_until("there is another Job", is_made_again, 60)
    wait_until("it has a pod", lambda: sandbox.nodes.pods("model"), 30)
    assert [job["metadata"]["name"] for job in sandbox.api.list("Job", sandbox.namespace)] == [
        before["name"]
    ], "the same result, the same name"


def test_a_webhook_that_refuses_an_object_is_no_missing_right(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Its 403 was retried as a right that the operator lacks, and named nobody to ask."""
    with denying(sandbox.api, tmp_path, sandbox.namespace, "apps", "statefulsets"):
        sandbox.operator("a", NO_LEASE).start()
        sandbox.apply(sandbox.sample("cpu"))
        wait_told(sandbox, "SpecAccepted", reasons.ADMISSION_DENIED, WORDS)
        assert "StatefulSet qwen-engine" in sandbox.condition_text("SpecAccepted")
    note = {"metadata": {"annotations": {"look": "again"}}}
    sandbox.api.merge(KIND, sandbox.namespace, "qwen", note).must()
    sandbox.wait_condition("Ready")


@pytest.mark.timeout(240, func_only=True)
def test_a_right_that_is_missing_is_named(sandbox: Sandbox) -> None:
    config = sandbox.cluster.kubeconfig(
        f"{sandbox.namespace}-missing", token(sandbox), url=sandbox.proxy.url("limited")
    )
    role = sandbox.api.request(
        "GET", sandbox.api.path("Role", sandbox.namespace, "foveal", version=RBAC)
    ).must()
    rules = [
        {**rule, "verbs": ["get", "list", "watch"]} if "services" in rule["resources"] else rule
        for rule in role["rules"]
    ]
    assert rules != role["rules"]
    sandbox.api.replace({**role, "apiVersion": RBAC, "kind": "Role", "rules": rules}).must()
    operator = OperatorProcess("limited", config, sandbox.namespace)
    sandbox.operators.append(operator)
    operator.start()
    time.sleep(0.5)  # the authorizer reads roles from a cache
    sandbox.apply(sandbox.sample("cpu"))
    wait_told(sandbox, "Ready", reasons.MISSING_RIGHT, "cannot patch resource")
    text = sandbox.condition_text("SpecAccepted")
    assert text.startswith("Accepted"), "nothing in the resource is wrong"
