"""Other people's objects on a real API server: never written, adopted or deleted."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.kube.cluster import KubeCluster, load_configuration
from foveal_operator.kube.errors import Conflict
from foveal_operator.kube.types import Obj
from foveal_operator.reconcile.apply import ADOPT
from foveal_operator.telemetry.series import Telemetry
from tests.support.api_server.api import Api
from tests.support.api_server.programs import Cluster, wait_until
from tests.support.api_server.sandbox import KIND, Sandbox, profile_of
from tests.support.api_server.scenarios import NO_LEASE, STEPS, run


def body(kind: str, api_version: str, name: str, namespace: str, **rest: Any) -> Obj:
    metadata = {"name": name, "namespace": namespace, "labels": {"app": "theirs"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}


def foreign(namespace: str) -> list[Obj]:
    """What was seen to be taken over, of a resource named qwen."""
    port = {"name": "web", "port": 80, "targetPort": 80}
    return [
        body("ServiceAccount", "v1", "qwen", namespace),
        body("NetworkPolicy", "networking.k8s.io/v1", "qwen-engine", namespace,
             spec={"podSelector": {"matchLabels": {"app": "theirs"}}}),
        body("Service", "v1", "qwen", namespace,
             spec={"selector": {"app": "theirs"}, "ports": [port]}),
        body("ConfigMap", "v1", "qwen-dashboard", namespace, data={"theirs": "yes"}),
    ]  # fmt: skip


def plain(obj: Obj | None) -> Obj:
    assert obj is not None
    return obj


def told(sandbox: Sandbox) -> dict[str, str]:
    found = (sandbox.resource() or {}).get("status", {}).get("conditions", ())
    return {c["type"]: f"{c['reason']}: {c['message']}" for c in found}


@pytest.mark.timeout(300, func_only=True)
def test_a_claim_that_was_kept_is_used_as_it_is(sandbox: Sandbox) -> None:
    """It is larger than asked for, and of another class: the API server refuses both changes."""
    claim = "PersistentVolumeClaim", sandbox.namespace, "qwen-model"
    sandbox.operator("a", NO_LEASE).start()
    model: Obj = {"uri": "hf://org/model", "cache": {"size": "200Gi", "storageClassName": "fast"}}
    sandbox.api.apply(sandbox.sample("cpu", model=model), "user").must()
    wait_until("the claim is there", lambda: sandbox.api.get(*claim) is not None, 60)
    before = plain(sandbox.api.get(*claim))
    sandbox.api.delete(KIND, sandbox.namespace, "qwen").must()
    wait_until("the resource is gone", lambda: sandbox.resource() is None, 60)
    sandbox.api.apply(sandbox.sample("cpu", model={"uri": model["uri"]}), "user").must()
    wait_until("it is looked at", lambda: "ModelReady" in told(sandbox), 60)
    assert told(sandbox)["SpecAccepted"].startswith("Accepted: ")
    after = plain(sandbox.api.get(*claim))
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])


@pytest.mark.timeout(400, func_only=True)
def test_foreign_objects_are_left_alone_and_named(sandbox: Sandbox) -> None:
    """Each got our fields and our owner by a forced apply, and was deleted with the resource.
    One after the other is removed, so that each in turn is what stands in the way."""
    theirs = foreign(sandbox.namespace)
    before = [sandbox.api.create(one).must() for one in theirs]
    sandbox.operator("a", NO_LEASE).start()
    sandbox.apply(sandbox.sample("cpu", observability={"dashboard": "Enabled"}))
    for index, one in enumerate(theirs):
        what = f"{one['kind']} {sandbox.namespace}/{one['metadata']['name']}"
        try:
            wait_until(f"{what} is named", lambda w=what: w in told(sandbox).get("Ready", ""), 120)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{sandbox.told()}") from None
        assert told(sandbox)["SpecAccepted"].startswith("NameTaken: ")
        for left in range(index, len(theirs)):
            meta = theirs[left]["metadata"]
            assert (
                sandbox.api.get(theirs[left]["kind"], sandbox.namespace, meta["name"])
                == (before[left])
            )
        sandbox.api.delete(one["kind"], sandbox.namespace, one["metadata"]["name"]).must()
        # Any change makes the operator look at once rather than in a minute.
        note = {"metadata": {"annotations": {"look": str(index)}}}
        sandbox.api.merge(KIND, sandbox.namespace, "qwen", note).must()
    sandbox.wait_condition("Ready", timeout_seconds=150)
    told_by = [
        e for e in sandbox.api.list("Event", sandbox.namespace) if e["reason"] == "NameTaken"
    ]
    for one in theirs:
        what = f"{one['kind']} {sandbox.namespace}/{one['metadata']['name']} belongs to test"
        assert any(what in event["note"] for event in told_by), what


@pytest.mark.timeout(300, func_only=True)
def test_a_taken_service_keeps_running_pods(sandbox: Sandbox) -> None:
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    run(sandbox, STEPS[0])
    pods = {pod["metadata"]["uid"] for pod in sandbox.nodes.pods()}
    operator.stop()
    sandbox.api.delete("Service", sandbox.namespace, "qwen").must()
    theirs = sandbox.api.create(foreign(sandbox.namespace)[2]).must()
    sandbox.proxy.audit.forget("a")
    operator.start()
    wait_until("it is told", lambda: "NameTaken" in told(sandbox).get("SpecAccepted", ""), 60)
    assert sandbox.api.get("Service", sandbox.namespace, "qwen") == theirs
    assert {pod["metadata"]["uid"] for pod in sandbox.nodes.pods()} == pods
    sandbox.api.delete(KIND, sandbox.namespace, "qwen").must()
    wait_until("the resource's own are gone", lambda: not sandbox.children(), 60)
    assert sandbox.api.get("Service", sandbox.namespace, "qwen") == theirs


@pytest.mark.timeout(300, func_only=True)
def test_a_namesake_made_at_once_waits_for_the_garbage_collector(sandbox: Sandbox) -> None:
    """Its predecessor's objects are still there; they are neither written to nor called taken."""
    sandbox.operator("a", NO_LEASE).start()
    expected = run(sandbox, STEPS[0])
    sandbox.api.delete(KIND, sandbox.namespace, "qwen").must()
    stored = sandbox.apply(sandbox.sample("cpu"))
    # The predecessor's profile is in the way until it is collected.
    profile = profile_of(stored)
    at = (sandbox.namespace, profile["metadata"]["name"])

    def has_profile() -> bool:
        sandbox.api.create(profile)
        there = sandbox.api.get("ConfigMap", *at)
        uid = stored["metadata"]["uid"]
        return there is not None and there["metadata"]["ownerReferences"][0]["uid"] == uid

    wait_until("the profile is there", has_profile, 60)
    sandbox.wait_condition("Ready", timeout_seconds=90)
    needed = {key for key in expected if "-profile-" not in key}
    wait_until("all is there", lambda: sandbox.children().keys() >= needed, 30)
    uid = plain(sandbox.resource())["metadata"]["uid"]
    for kind, name in (("Service", "qwen"), ("StatefulSet", "qwen-engine")):
        (owner,) = plain(sandbox.api.get(kind, sandbox.namespace, name))["metadata"][
            "ownerReferences"
        ]
        assert owner["uid"] == uid
    events = sandbox.api.list("Event", sandbox.namespace)
    assert not [e for e in events if e["reason"] == "NameTaken"]


@pytest.mark.timeout(300, func_only=True)
def test_what_is_handed_over_is_adopted_and_no_secret_is(sandbox: Sandbox) -> None:
    """By the annotation that names the resource, and by no other name."""
    account, _, service, _ = foreign(sandbox.namespace)
    account["metadata"]["annotations"] = {ADOPT: "qwen"}
    service["metadata"]["annotations"] = {ADOPT: "another"}
    secret = body("Secret", "v1", "qwen-curve", sandbox.namespace, data={})
    secret["metadata"]["annotations"] = {ADOPT: "qwen"}
    created = {one["kind"]: sandbox.api.create(one).must() for one in (account, service, secret)}
    sandbox.operator("a", NO_LEASE).start()
    uid = sandbox.apply(sandbox.sample("cpu"))["metadata"]["uid"]
    at = (sandbox.namespace, "qwen")

    def names(what: str) -> bool:
        return f"{what} belongs to" in told(sandbox).get("Ready", "")

    # After a minute in which it may have been an earlier resource's.
    refused = "No Secret can be handed over"
    wait_until("the Secret is refused", lambda: refused in told(sandbox).get("Ready", ""), 150)
    assert names(f"Secret {at[0]}/qwen-curve")
    assert sandbox.api.get("Secret", at[0], "qwen-curve") == created["Secret"]
    assert not sandbox.nodes.pods()
    adopted = plain(sandbox.api.get("ServiceAccount", *at))["metadata"]
    assert [one["uid"] for one in adopted["ownerReferences"]] == [uid]
    assert adopted["labels"]["app"] == "theirs", "what we do not apply stays"
    sandbox.api.delete("Secret", at[0], "qwen-curve").must()
    note = {"metadata": {"annotations": {"look": "again"}}}
    sandbox.api.merge(KIND, *at, note).must()
    wait_until("the Service is named", lambda: names(f"Service {at[0]}/qwen"), 90)
    assert sandbox.api.get("Service", *at) == created["Service"]


@pytest.mark.timeout(300, func_only=True)
def test_two_resources_whose_service_names_meet_are_both_told(sandbox: Sandbox) -> None:
    """`qwen-engine` is the Service for engines of `qwen` and the one for clients of another."""
    sandbox.operator("a", NO_LEASE).start()
    run(sandbox, STEPS[0])
    pods = {pod["metadata"]["uid"] for pod in sandbox.nodes.pods()}
    service = plain(sandbox.api.get("Service", sandbox.namespace, "qwen-engine"))
    second = sandbox.sample("cpu")
    second["metadata"]["name"] = "qwen-engine"
    sandbox.apply(second)

    def of_the_second() -> str:
        status = plain(sandbox.resource("qwen-engine")).get("status", {})
        return str([c for c in status.get("conditions", ()) if c["type"] == "SpecAccepted"])

    wait_until("the second is told", lambda: "NameTaken" in of_the_second(), 60)
    assert f"Service {sandbox.namespace}/qwen-engine" in of_the_second()
    wait_until(
        "and the first, which serves",
        lambda: "MultiModalInference qwen-engine needs a Service" in told(sandbox)["SpecAccepted"],
        60,
    )
    assert told(sandbox)["Ready"].startswith("Ready: ")
    assert plain(sandbox.api.get("Service", sandbox.namespace, "qwen-engine")) == service
    assert pods <= {pod["metadata"]["uid"] for pod in sandbox.nodes.pods()}  # and a Job's


@pytest.mark.parametrize("name", ["default", "kubernetes"])
def test_reserved_names_are_refused(api: Api, sandbox: Sandbox, name: str) -> None:
    """`default` took the token from the namespace's ServiceAccount; `kubernetes` rewrote the API
    server's own Service."""
    obj = sandbox.sample("cpu")
    obj["metadata"]["name"] = name
    reply = api.create(obj, dryRun="All")
    assert reply.status == 422
    assert "is reserved" in reply.message


async def test_an_apply_that_only_creates(cluster: Cluster, namespace: str, api: Api) -> None:
    """The precondition is the API server's: nothing between a read and a write. One manager is left
    with one operation, so that what is no longer applied goes."""
    config = await load_configuration(str(cluster.kubeconfig(f"{namespace}-new")))
    kube = KubeCluster(config, Telemetry())
    try:
        mine = body("ConfigMap", "v1", "mine", namespace, data={"a": "1", "b": "2"})
        made = await kube.apply_new(mine)
        assert made is not None
        assert await kube.apply_new(mine) is None
        managers = [(m["manager"], m["operation"]) for m in made["metadata"]["managedFields"]]
        assert managers == [("foveal-operator", "Apply")]
        less = await kube.apply({**mine, "data": {"a": "1"}})
        assert less["data"] == {"a": "1"}
        theirs = api.create(body("ConfigMap", "v1", "theirs", namespace, data={"c": "3"})).must()
        taken = body("ConfigMap", "v1", "theirs", namespace, data={"d": "4"})
        assert await kube.apply_new(taken) is None
        taken["metadata"]["uid"] = made["metadata"]["uid"]
        with pytest.raises(Conflict):
            await kube.apply(taken)
        assert api.get("ConfigMap", namespace, "theirs") == theirs
    finally:
        await kube.close()
