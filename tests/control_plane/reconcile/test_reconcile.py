"""The recipe over an API server in memory: what is written, and what is never touched."""

from __future__ import annotations

import copy

import msgspec
import pytest

from foveal_operator.api.status import MultiModalInferenceStatus
from foveal_operator.kube.errors import UserError
from foveal_operator.kube.kinds import (
    BY_NAME,
    INFERENCE,
)
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.pods.metrics import PodReports
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import (
    KEY,
    OPTIONAL_KINDS,
    Kit,
    resource,
    with_claim,
)
from tests.support.served_resource import (
    EXPECTED,
    add_pod,
    finish_profile,
    see_template,
    served,
    versions,
)


async def test_first_the_profile_then_everything(kit: Kit) -> None:
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    assert kit.condition("BudgetFits") == ("Unknown", "Profiling")
    assert not kit.cluster.names("StatefulSet")
    finish_profile(kit.cluster)
    await kit.settle()
    for kind, names in EXPECTED.items():
        assert kit.cluster.names(kind) == names
    assert kit.condition("BudgetFits")[0] == "True"
    assert kit.condition("Ready") == ("False", "Starting")
    assert kit.condition("Reconciling")[0] == "True"
    add_pod(kit.cluster, "engine")
    add_pod(kit.cluster, "frontend")
    await kit.settle()
    assert kit.condition("Ready") == ("True", "Ready")
    assert kit.condition("Reconciling") == ("", "")
    kit.cluster.check_integrity()
    kit.operator.caches.check_integrity()


async def test_the_first_status_follows_the_first_pass(kit: Kit) -> None:
    """No conditions at all mean "healthy" to kstatus."""
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    assert kit.status()["observedGeneration"] == 1
    assert kit.condition("Ready")[0] == "False"


async def test_at_rest_nothing_is_written(kit: Kit) -> None:
    await served(kit, pods=True)
    before, writes, calls = (
        versions(kit.cluster),
        list(kit.cluster.writes),
        len(kit.cluster.calls),
    )
    for _ in range(3):
        kit.operator.queue.add(KEY)
        await kit.settle()
    assert versions(kit.cluster) == before
    assert kit.cluster.writes == writes
    assert kit.cluster.calls[calls:] == [], "not even a request"


async def test_a_restart_changes_nothing(kit: Kit) -> None:
    await served(kit, pods=True)
    before = versions(kit.cluster)
    again = Kit(kit.cluster)
    again.time.now += 3600
    await again.start()
    await again.settle()
    assert versions(kit.cluster) == before


async def test_an_operator_upgrade_restarts_nothing(kit: Kit) -> None:
    """A new default image is for new resources: the basis keeps the old one's."""
    await served(kit, pods=True)
    before = versions(kit.cluster)
    upgraded = Kit(kit.cluster, image="foveal/runtime:2")
    await upgraded.start()
    await upgraded.settle()
    assert versions(kit.cluster) == before
    other = resource()
    other["metadata"]["name"] = "other"
    kit.cluster.add(other)
    await upgraded.settle()
    (name,) = [n for n in kit.cluster.names("Job") if n.startswith("other-profile")]
    pod = kit.cluster.body("Job", name)["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "foveal/runtime:2"


async def test_frontend_changes_touch_no_engine(kit: Kit) -> None:
    await served(kit, pods=True)
    before = versions(kit.cluster)

    def change(body: Obj) -> None:
        body["spec"]["frontend"]["mediaWorkers"] = 2
        body["spec"]["frontend"]["hostMemory"] = "4Gi"

    kit.cluster.edit(INFERENCE, *KEY, change)
    await kit.settle()
    after = versions(kit.cluster)
    assert after["StatefulSet/default/tiny-engine"] == before["StatefulSet/default/tiny-engine"]
    assert after["Deployment/default/tiny-frontend"] != before["Deployment/default/tiny-frontend"]
    assert "tiny-engine-0" in kit.cluster.names("Pod")


@pytest.mark.parametrize("kind", [*sorted(EXPECTED.keys() - {"Secret"}), "ConfigMap"])
async def test_a_deleted_object_comes_back(kind: str, kit: Kit) -> None:
    await served(kit)
    names = kit.cluster.names(kind)
    for name in names:
        kit.cluster.remove(BY_NAME[kind], "default", name)
    await kit.settle()
    if kind == "ConfigMap":
        # The profile was among them: it is made once more.
        finish_profile(kit.cluster)
        await kit.settle()
    assert kit.cluster.names(kind) == names


@pytest.mark.parametrize("kind", [*sorted(EXPECTED.keys() - {"Secret"}), "ConfigMap"])
async def test_a_changed_field_of_ours_is_put_right_and_others_stay(kind: str, kit: Kit) -> None:
    await served(kit)
    name = kit.cluster.names(kind)[0]
    before = kit.cluster.body(kind, name)["metadata"]["labels"]

    def meddle(body: Obj) -> None:
        labels = body["metadata"]["labels"]
        labels["app.kubernetes.io/name"] = "somebody"
        labels["team"] = "mine"
        if kind in ("StatefulSet", "Deployment"):
            body["spec"]["template"]["spec"]["serviceAccountName"] = "admin"

    kit.cluster.edit(BY_NAME[kind], "default", name, meddle)
    await kit.settle()
    body = kit.cluster.body(kind, name)
    assert body["metadata"]["labels"] == {**before, "team": "mine"}
    if kind in ("StatefulSet", "Deployment"):
        assert body["spec"]["template"]["spec"]["serviceAccountName"] == "tiny"
        assert kit.telemetry.value("foveal_operator_drift_repairs_total", kind=kind) == 1


async def test_a_restart_by_kubectl_is_no_drift(kit: Kit) -> None:
    """Whatever the Deployment's controller wrote meanwhile counted as what the operator took back:
    some restarts within a quarter of an hour fired FovealDriftFight."""
    await served(kit)

    def restart(body: Obj) -> None:
        body["spec"]["template"]["metadata"].setdefault("annotations", {})["restartedAt"] = "now"

    at = (BY_NAME["Deployment"], "default", "tiny-frontend")
    kit.cluster.edit(*at, restart)
    kit.hears = False
    kit.cluster.edit(*at, lambda body: body.update(status={"observedGeneration": 2}))
    kit.hears = True
    await kit.settle()
    template = kit.cluster.body("Deployment", "tiny-frontend")["spec"]["template"]
    assert template["metadata"]["annotations"]["restartedAt"] == "now"
    assert not kit.telemetry.value("foveal_operator_drift_repairs_total", kind="Deployment")


async def test_a_fight_over_an_object_is_slowed_down_and_not_given_up(kit: Kit) -> None:
    """Two operators on one namespace, of another release or with other settings, answered each
    other 25 times a second."""
    await served(kit)
    repairs, kind, ours = "foveal_operator_drift_repairs_total", "NetworkPolicy", "tiny-engine"

    def meddle(body: Obj) -> None:
        body["metadata"]["labels"]["app.kubernetes.io/name"] = "somebody"

    def label() -> str:
        found: str = kit.cluster.body(kind, ours)["metadata"]["labels"]["app.kubernetes.io/name"]
        return found

    for _ in range(40):
        kit.cluster.edit(BY_NAME[kind], "default", ours, meddle)
        await kit.settle()
    assert (kit.telemetry.value(repairs, kind=kind), label()) == (20, "somebody")
    kit.cluster.edit(BY_NAME["Service"], "default", "tiny", meddle)
    await kit.settle()
    assert kit.telemetry.value(repairs, kind="Service") == 1, "only that object waits"
    kit.time.now += 30
    await kit.settle()  # without any event
    assert (kit.telemetry.value(repairs, kind=kind), label()) == (21, "foveal")
    kit.cluster.remove(BY_NAME[kind], "default", ours)
    await kit.settle()
    assert label() == "foveal", "what is gone is made at once"


async def test_a_disruption_budget_of_the_other_kind_is_made_again(kit: Kit) -> None:
    """Somebody's minAvailable stayed beside our maxUnavailable, which the API server refuses: the
    resource was Refused until somebody took it away."""
    body = resource()
    body["spec"]["frontend"]["replicas"] = 2
    await served(kit, body)
    kind, name = "PodDisruptionBudget", "tiny-frontend"
    before = kit.cluster.body(kind, name)

    def change(live: Obj) -> None:
        del live["spec"]["maxUnavailable"]
        live["spec"]["minAvailable"] = 1

    kit.cluster.edit(BY_NAME[kind], "default", name, change)
    text = "minAvailable and maxUnavailable cannot be both set"
    kit.fail(UserError(text, 422), verb="APPLY", kind=kind)
    await kit.settle()
    after = kit.cluster.body(kind, name)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in after["spec"]
    assert kit.condition("SpecAccepted")[0] == "True"


async def test_what_is_deleted_again_and_again_is_made_ever_more_slowly(kit: Kit) -> None:
    """A policy that deletes what it does not like was answered as fast as the API server could."""
    await served(kit)
    repairs, kind, ours = "foveal_operator_drift_repairs_total", "NetworkPolicy", "tiny-engine"
    for _ in range(40):
        if ours in kit.cluster.names(kind):
            kit.cluster.remove(BY_NAME[kind], "default", ours)
        kit.operator.queue.add(KEY)
        await kit.settle()
    assert kit.telemetry.value(repairs, kind=kind) == 20
    assert ours not in kit.cluster.names(kind)
    assert "tiny-frontend" in kit.cluster.names(kind), "only that object waits"
    kit.time.now += 30
    await kit.settle()  # without any event
    assert ours in kit.cluster.names(kind)


async def test_paused_means_hands_off(kit: Kit) -> None:
    await served(kit, pods=True)

    def pause(body: Obj) -> None:
        body["spec"]["paused"] = True
        body["spec"]["frontend"]["hostMemory"] = "4Gi"

    before = {k: v for k, v in versions(kit.cluster).items() if "Multi" not in k}
    kit.cluster.edit(INFERENCE, *KEY, pause)
    kit.cluster.remove(BY_NAME["NetworkPolicy"], "default", "tiny-engine")
    del before["NetworkPolicy/default/tiny-engine"]
    await kit.settle()
    after = versions(kit.cluster)
    assert {key: after[key] for key in before} == before
    assert kit.cluster.names("NetworkPolicy") == ["tiny-frontend", "tiny-model"]
    assert kit.condition("Ready") == ("False", "Paused")

    def go_on(body: Obj) -> None:
        body["spec"]["paused"] = False

    kit.cluster.edit(INFERENCE, *KEY, go_on)
    await kit.settle()
    assert kit.cluster.names("NetworkPolicy") == EXPECTED["NetworkPolicy"]


async def test_a_users_claim_is_looked_for_until_it_is_there(kit: Kit) -> None:
    kit.cluster.remove(BY_NAME["PersistentVolumeClaim"], "default", "models")
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    assert kit.condition("ModelReady") == ("False", "ClaimPending")
    with_claim(kit.cluster)
    kit.time.now += 61
    await kit.settle()
    assert kit.condition("ModelReady") == ("False", "Profiling")
    assert [n for n in kit.cluster.names("Job") if "-profile-" in n]


async def test_a_namesake_made_at_once_starts_afresh(kit: Kit) -> None:
    await served(kit)
    kit.cluster.remove(INFERENCE, *KEY)
    kit.cluster.add(resource())
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    kit.cluster.check_integrity()
    uid = kit.cluster.body("MultiModalInference", "tiny")["metadata"]["uid"]
    sts = kit.cluster.body("StatefulSet", "tiny-engine")
    assert sts["metadata"]["ownerReferences"][0]["uid"] == uid
    assert kit.cluster.names("Secret") == ["tiny-curve"]


async def test_optional_apis_are_used_when_they_appear() -> None:
    kit = await served(Kit())
    assert "PodMonitor" not in {kind.name for kind in kit.watched}
    kit.cluster.missing = OPTIONAL_KINDS - {"PodMonitor"}
    await kit.resync()
    assert kit.cluster.names("PodMonitor") == ["tiny"]
    assert "PodMonitor" in {kind.name for kind in kit.watched}


async def test_an_api_that_a_resource_waits_for_is_found_within_a_minute() -> None:
    """It was installed, and the resource stayed Stalled until the next full look."""
    body = resource()
    body["spec"]["observability"] = {"podMonitor": "Enabled"}
    kit = await served(Kit(), body)
    assert kit.condition("SpecAccepted") == ("False", "MissingApi")
    kit.cluster.missing = OPTIONAL_KINDS - {"PodMonitor"}
    kit.time.now += 61
    await kit.settle()
    assert kit.cluster.names("PodMonitor") == ["tiny"]
    assert kit.condition("SpecAccepted") == ("True", "Accepted")
    await kit.resync()
    assert "PodMonitor" in {kind.name for kind in kit.watched}


async def test_an_engine_change_replaces_the_engine_by_its_uid(kit: Kit) -> None:
    await served(kit, pods=True)
    old = kit.cluster.body("Pod", "tiny-engine-0")["metadata"]

    def change(body: Obj) -> None:
        body["spec"]["engine"]["cpu"] = "3"

    kit.cluster.edit(INFERENCE, *KEY, change)
    for _ in range(30):
        kit.time.now += 5
        see_template(kit.cluster)
        await kit.settle()
        if "tiny-engine-0" not in kit.cluster.names("Pod"):
            break
    template = kit.cluster.body("StatefulSet", "tiny-engine")["spec"]["template"]
    assert template["metadata"]["labels"][REVISION_LABEL] != old["labels"][REVISION_LABEL]
    assert "tiny-engine-0" not in kit.cluster.names("Pod")
    assert kit.status()["rolloutStrategy"]


async def test_the_status_is_what_the_schema_takes(kit: Kit) -> None:
    """Round trip: what is stored reads back as the typed status."""
    await served(kit, pods=True)
    msgspec.convert(kit.status(), MultiModalInferenceStatus)


async def test_the_users_object_keeps_every_byte_but_its_status(kit: Kit) -> None:
    body = resource()
    await served(kit, copy.deepcopy(body), pods=True)
    live = kit.cluster.body("MultiModalInference", "tiny")
    assert live["spec"] == body["spec"]
    assert set(live["metadata"]) == {
        "name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp",
        "managedFields",
    }  # fmt: skip


@pytest.mark.parametrize(("sessions", "later", "kind"), [(1, 6, "Ready"), (0, 3, "CachesMirrored")])
async def test_a_new_frontend_is_looked_at_again_in_seconds(
    kit: Kit, sessions: int, later: int, kind: str
) -> None:
    """No watch tells that nodes know its address by now, or that its sessions are up: Ready came
    a minute after the pod, or 15 s."""
    await served(kit, pods=True)
    kit.reports = PodReports(sessions_up=sessions, sessions_wanted=1)
    labels = kit.cluster.body("Service", "tiny")["metadata"]["labels"]
    labels = {**labels, "kubernetes.io/service-name": "tiny"}
    metadata = {"name": "tiny-x", "namespace": "default", "labels": labels}
    endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}}
    kit.cluster.add(
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata,
            "addressType": "IPv4",
            "endpoints": [endpoint],
        }
    )

    def become_ready(body: Obj) -> None:
        body["status"]["conditions"][0]["lastTransitionTime"] = kit.time.clock.now_text()

    kit.cluster.edit(BY_NAME["Pod"], "default", "tiny-frontend-0", become_ready)
    await kit.settle()
    assert kit.condition("Ready")[0] == "False"
    kit.reports = PodReports(sessions_up=1, sessions_wanted=1)
    for _ in range(later):
        kit.time.now += 1
        await kit.settle()
    assert kit.condition(kind)[0] == "True"


async def test_ready_waits_for_what_the_gateway_says_of_an_edited_route() -> None:
    """The pass of the edit read the answer to the old route, and told it of the new generation."""
    kit = Kit(with_claim(FakeCluster(missing=OPTIONAL_KINDS - {"HTTPRoute"})))
    route = {"parentRefs": [{"name": "edge"}], "hostnames": ["a.example.org"]}
    await served(kit, resource(networking={"httpRoute": route}), pods=True)

    async def answer(status: str) -> None:
        def change(body: Obj) -> None:
            said = {"type": "Accepted", "status": status, "message": "no listener for it"}
            said["observedGeneration"] = body["metadata"]["generation"]
            body["status"] = {"parents": [{"parentRef": {"name": "edge"}, "conditions": [said]}]}

        kit.cluster.edit(BY_NAME["HTTPRoute"], "default", "tiny", change, "gateway")
        await kit.settle()

    await answer("True")
    assert kit.condition("Ready") == ("True", "Ready")
    networking = {"httpRoute": {**route, "hostnames": ["b.example.com"]}}
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body["spec"].update(networking=networking))
    await kit.settle()
    assert kit.condition("RouteReady") == ("False", "RoutePending")
    assert kit.condition("Ready") == ("False", "RoutePending")
    await answer("False")
    assert kit.condition("Ready") == ("False", "RoutePending")
    await answer("True")
    assert kit.condition("Ready") == ("True", "Ready")
