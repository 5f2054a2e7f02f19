"""Each rule of the audit can fail, and does not when all is well."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_server.audit import Audit, devices_of
from tests.support.api_server.calls import Call, parse_body, parse_path, verb_of

OURS = {"fieldManager": "foveal-operator"}
CONFIG = "/api/v1/namespaces/a/configmaps/c"
ENGINES = "/apis/apps/v1/namespaces/a/statefulsets/qwen-engine"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/foveal/leases/foveal-operator"
RESOURCE = "/apis/foveal.dev/v1alpha1/namespaces/a/multimodalinferences/qwen"
LABELS = {"app.kubernetes.io/component": "engine", "app.kubernetes.io/instance": "qwen"}


def call(verb: str, path: str, client: str = "a", body: Any = None, **query: str) -> Call:
    chosen = query or ({} if verb == "delete" else OURS)
    return Call(1, 1, client, verb, parse_path(path), chosen, body or {})


def engines(name: str = "qwen-engine", replicas: int = 1, devices: int = 1) -> dict[str, Any]:
    limits = {"cpu": "2", "nvidia.com/gpu": str(devices)}
    template = {"spec": {"containers": [{"resources": {"limits": limits}}]}}
    metadata = {"name": name, "namespace": "a", "labels": LABELS, "resourceVersion": "7"}
    return {"metadata": metadata, "spec": {"replicas": replicas, "template": template}}


def verdict(audit: Audit, made: Call, reply: Any = None, status: int = 200) -> str:
    """What one more call adds to the violations; "" for nothing."""
    before = len(audit.violations)
    audit.before(made)
    if made.is_write:
        audit.after(made, status, reply or {"metadata": {"resourceVersion": "7"}})
    return " ".join(audit.violations[before:])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (call("apply", CONFIG, fieldManager="kopf"), "field manager 'kopf'"),
        (call("create", CONFIG, x="y"), "field manager ''"),
        (call("delete", CONFIG), "without a uid"),
        (call("deletecollection", "/api/v1/namespaces/a/pods"), "whole collection"),
        (call("apply", RESOURCE), "the user's object"),
        (call("patch", RESOURCE), "the user's object"),
        (call("get", "/api/v1/namespaces/a/secrets/s"), "reads Secrets"),
        (call("watch", "/api/v1/secrets"), "reads Secrets"),
    ],
    ids=str,
)
def test_a_forbidden_call_is_noted(made: Call, words: str) -> None:
    assert words in verdict(Audit(), made)


@pytest.mark.parametrize(
    "made",
    [
        call("apply", CONFIG),
        call("apply", RESOURCE + "/status"),
        call("delete", CONFIG, body={"preconditions": {"uid": "u"}}),
        call("create", "/api/v1/namespaces/a/secrets"),
        call("list", "/api/v1/pods"),
    ],
    ids=str,
)
def test_a_proper_call_is_not(made: Call) -> None:
    assert verdict(Audit(), made) == ""


def test_the_same_write_twice_needs_a_change_between() -> None:
    audit, body = Audit(), {"data": {"k": "v"}}
    same = call("apply", CONFIG, body=body)
    assert verdict(audit, same) == ""
    assert "repeats a write" in verdict(audit, same)
    drifted = {"metadata": {"resourceVersion": "9"}}
    assert verdict(audit, same, drifted) == ""
    assert verdict(audit, call("apply", CONFIG, body={"data": {}}), drifted) == ""


def test_a_new_process_and_a_lost_answer_may_repeat() -> None:
    audit, same = Audit(), call("apply", CONFIG)
    verdict(audit, same)
    audit.forget("a")
    assert verdict(audit, same) == ""
    audit.unanswered(same)
    assert verdict(audit, same) == ""
    assert verdict(audit, same)


def test_writes_are_for_the_holder_of_the_lease() -> None:
    clock = [100.0]
    audit = Audit(needs_lease=True, now=lambda: clock[0])
    write_a, write_b = call("apply", CONFIG), call("apply", ENGINES, client="b")
    assert "nobody's" in verdict(audit, write_a)
    held = {"spec": {"holderIdentity": "pod-a", "leaseDurationSeconds": 15}}
    assert verdict(audit, call("update", LEASE), held) == ""
    assert verdict(audit, write_a, {"metadata": {"resourceVersion": "8"}}) == ""
    assert "lease is a's" in verdict(audit, write_b)
    clock[0] += 16
    assert "after its lease" in verdict(audit, write_a, {"metadata": {"resourceVersion": "9"}})
    verdict(audit, call("update", LEASE, client="b"), held)
    assert verdict(audit, write_b, {"metadata": {"resourceVersion": "10"}}) == ""
    verdict(audit, call("update", LEASE, client="b"), {"spec": {"holderIdentity": ""}})
    assert "nobody's" in verdict(audit, write_b, {"metadata": {"resourceVersion": "11"}})


def test_a_lease_that_was_refused_is_not_held() -> None:
    audit = Audit(needs_lease=True)
    verdict(audit, call("update", LEASE), {"spec": {"holderIdentity": "pod-a"}}, status=409)
    assert "nobody's" in verdict(audit, call("apply", CONFIG))


def test_one_set_of_engines_a_resource() -> None:
    audit = Audit()
    assert verdict(audit, call("apply", ENGINES), engines()) == ""
    other = call("apply", ENGINES + "-2")
    assert "second set" in verdict(audit, other, engines("qwen-engine-2"))
    gone = call("delete", ENGINES, body={"preconditions": {"uid": "u"}})
    assert verdict(audit, gone) == ""
    assert (
        verdict(audit, call("apply", ENGINES + "-2", body={"a": 1}), engines("qwen-engine-2")) == ""
    )


def test_engines_ask_for_no_more_devices_than_meant() -> None:
    audit = Audit(num_devices=lambda namespace, name: 4)
    assert devices_of(engines(devices=2)["spec"]["template"]) == 2
    assert verdict(audit, call("apply", ENGINES), engines(replicas=2, devices=2)) == ""
    three = call("apply", ENGINES, body={"replicas": 3})
    assert "asks for 6 devices, 4 are meant" in verdict(
        audit, three, engines(replicas=3, devices=2)
    )


@pytest.mark.parametrize(
    ("method", "url", "query", "content", "verb", "target"),
    [
        ("GET", "/api/v1/pods", {"watch": "true"}, "", "watch", "pods"),
        ("GET", "/api/v1/namespaces/a/pods", {}, "", "list", "pods/a"),
        ("GET", "/api/v1/namespaces/a", {}, "", "get", "namespaces/a"),
        ("GET", "/version", {}, "", "get", ""),
        ("PATCH", RESOURCE + "/status", {}, "application/apply-patch+yaml", "apply", None),
        ("PATCH", CONFIG, {}, "application/merge-patch+json", "patch", "configmaps/a/c"),
        ("DELETE", "/api/v1/namespaces/a/pods", {}, "", "deletecollection", "pods/a"),
        ("POST", "/api/v1/namespaces/a/pods/p/binding", {}, "", "create", "pods/a/p/binding"),
        ("PUT", LEASE, {}, "", "update", "leases/foveal/foveal-operator"),
    ],
)
def test_requests_are_understood(
    method: str, url: str, query: dict[str, str], content: str, verb: str, target: str | None
) -> None:
    parsed = parse_path(url)
    assert verb_of(method, parsed, query, content) == verb
    assert str(parsed) == (target if target is not None else "multimodalinferences/a/qwen/status")


def test_a_body_that_is_no_object_is_empty() -> None:
    assert parse_body(b"") == parse_body(b"[]") == {}
