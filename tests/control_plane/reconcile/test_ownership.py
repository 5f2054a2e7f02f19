"""Nothing that is not the resource's own is written, adopted or deleted."""

from __future__ import annotations

import copy

import msgspec
import pytest

from foveal_operator.kube.errors import UserError
from foveal_operator.kube.kinds import BY_NAME, INFERENCE, POD
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import access
from foveal_operator.reconcile.apply import ADOPT
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.budget_samples import VLM
from tests.support.operator_rig import KEY, Kit, resource, with_claim
from tests.support.samples import LEGAL, put
from tests.support.served_resource import add_pod, finish_fetch, finish_profile, served

FOREIGN: list[tuple[str, str]] = [
    ("ServiceAccount", "tiny"),
    ("NetworkPolicy", "tiny-engine"),
    ("Service", "tiny"),
    ("Service", "tiny-engine"),
    ("ConfigMap", "tiny-basis"),
    ("StatefulSet", "tiny-engine"),
    ("Deployment", "tiny-frontend"),
]
REFERRED = [
    ("Secret", "hub"), ("Secret", "keys"), ("Secret", "prometheus"),
    ("PersistentVolumeClaim", "warm"), ("PersistentVolumeClaim", "shared-tmpfs"),
]  # fmt: skip

GROWN = {"cache": {"size": "400Gi"}}


def everything() -> Obj:
    """A resource with each kind of object that one may have."""
    body = put(LEGAL["scaled"], "metadata", {"name": "tiny", "namespace": "default"})
    scaling = {"maxReplicas": 3, "metric": "CPU", "target": 70}
    body = put(body, "spec.frontend.autoscaling", scaling)
    body = put(body, "spec.frontend.autoscaling.minReplicas", 2)
    return put(body, "spec.observability.prometheusRule", "Enabled")


EVERYTHING = everything()


def foreign(kind: str, name: str, **metadata: object) -> Obj:
    """Somebody's object that has the name of one of the resource's."""
    body: Obj = {"apiVersion": BY_NAME[kind].api_version, "kind": kind}
    body["metadata"] = {"name": name, "namespace": "default", **metadata}
    if kind in ("Deployment", "StatefulSet"):
        body["spec"] = {"template": {"metadata": {"labels": {}}, "spec": {"containers": []}}}
    return body


def message(kit: Kit, kind: str) -> str:
    (found,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == kind]
    return str(found)


async def asked_for(kit: Kit, body: Obj | None = None) -> None:
    """The resource, with its own Jobs ended."""
    await kit.start()
    kit.cluster.add(copy.deepcopy(body) if body else resource())
    await kit.settle()
    profile = msgspec.json.encode(VLM).decode() if body else ""
    steps = {"fetch": finish_fetch, "profile": lambda cluster: finish_profile(cluster, profile)}
    for what, finish in steps.items():
        jobs = [kit.cluster.body("Job", name) for name in kit.cluster.names("Job")]
        mine = [job for job in jobs if job["metadata"].get("ownerReferences")]
        if any(f"-{what}-" in job["metadata"]["name"] for job in mine):
            finish(kit.cluster)
            await kit.settle()
    if body:  # whose key is not made yet may be an earlier resource's for a minute
        kit.time.now += 61.0
        await kit.resync()


async def test_a_foreign_object_of_any_kind_is_left_as_it_is() -> None:
    """Each first write was a forced apply: the object got our fields and our owner reference, and
    was deleted with the resource. Every object that a resource ever writes is foreign in turn."""
    first = Kit(with_claim(FakeCluster()))
    await asked_for(first, EVERYTHING)
    made = {(kind, name) for verb, kind, name in first.cluster.writes if verb in ("APPLY", "POST")}
    made = {(kind, name) for kind, name in made if kind not in (INFERENCE.name, "Event")}
    rules = [rule for rule in access.rules("resources") if "create" in rule.verbs]
    granted = {plural for rule in rules for plural in rule.resources}
    assert {BY_NAME[kind].plural for kind, _ in made} == granted - {"events"}
    for kind, name in sorted(made):
        kit = Kit(with_claim(FakeCluster()))
        theirs = copy.deepcopy(kit.cluster.add(foreign(kind, name, labels={"app": "theirs"})))
        await asked_for(kit, EVERYTHING)
        what = f"{kind} default/{name}"
        assert kit.cluster.body(kind, name) == theirs, what
        assert kit.condition("SpecAccepted") == ("False", "NameTaken"), what
        assert kit.condition("Stalled") == ("True", "NameTaken"), what
        assert f"{what} belongs to " in message(kit, "Ready")
        notes = [b["note"] for (k, *_), b in kit.cluster.objects.items() if k == "Event"]
        assert any(what in note for note in notes)
        kit.cluster.remove(INFERENCE, *KEY)
        await kit.settle()
        assert kit.cluster.body(kind, name) == theirs, what


async def test_what_a_resource_refers_to_is_never_written() -> None:
    """Secrets are not even read; claims are."""
    kit = Kit(with_claim(FakeCluster()))
    for kind, name in REFERRED:
        kit.cluster.add(foreign(kind, name))
    before = {place: copy.deepcopy(kit.cluster.body(*place)) for place in REFERRED}
    spec = put(EVERYTHING, "spec.security", {"apiKeySecretRef": {"name": "keys"}})
    await asked_for(kit, put(spec, "spec.model.secretRef", {"name": "hub"}))
    assert kit.cluster.names("StatefulSet") == ["tiny-engine"]
    kit.cluster.remove(INFERENCE, *KEY)
    await kit.settle()
    assert {place: kit.cluster.body(*place) for place in REFERRED} == before
    assert not {(kind, name) for _, kind, name in kit.cluster.writes} & set(REFERRED)
    assert {verb for verb, kind, _ in kit.cluster.calls if kind == "Secret"} == {"POST"}


async def test_what_pods_do_without_stops_no_rollout() -> None:
    """A foreign ConfigMap tiny-dashboard kept the operator from everything that came after it."""
    kit = Kit()
    theirs = copy.deepcopy(kit.cluster.add(foreign("ConfigMap", "tiny-dashboard")))
    await served(kit, resource(observability={"dashboard": "Enabled"}), pods=True)
    assert kit.cluster.body("ConfigMap", "tiny-dashboard") == theirs
    assert kit.condition("SpecAccepted") == ("False", "NameTaken")
    assert kit.condition("Available")[0] == "True"
    changed = resource(observability={"dashboard": "Enabled"})["spec"]
    changed["frontend"] = {**changed["frontend"], "replicas": 2}
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body.update(spec=changed))
    await kit.settle()
    assert kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 2


async def test_running_pods_go_on_when_a_name_is_taken_later() -> None:
    """The Service is deleted, and somebody is faster."""
    kit = Kit()
    await served(kit, pods=True)
    pods = kit.cluster.names("Pod")
    kit.hears = False
    kit.cluster.remove(BY_NAME["Service"], "default", "tiny")
    theirs = copy.deepcopy(kit.cluster.add(foreign("Service", "tiny")))
    kit.hears = True
    await kit.resync()
    assert kit.cluster.body("Service", "tiny") == theirs
    assert kit.condition("SpecAccepted") == ("False", "NameTaken")
    assert kit.cluster.names("Pod") == pods
    assert kit.condition("Available")[0] == "True"


async def test_a_stale_view_of_an_own_object_writes_to_no_namesake() -> None:
    """The cache still tells of our Service: the apply names its uid, which the namesake has not."""
    kit = Kit()
    await served(kit, pods=True)
    kit.hears = False
    kit.cluster.remove(BY_NAME["Service"], "default", "tiny")
    theirs = copy.deepcopy(kit.cluster.add(foreign("Service", "tiny")))
    kit.hears = True
    changed = resource(networking={"port": 9000})["spec"]
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body.update(spec=changed))
    await kit.settle()
    assert kit.cluster.body("Service", "tiny") == theirs
    assert kit.condition("SpecAccepted") == ("False", "NameTaken")


async def test_an_object_handed_over_by_annotation_is_adopted() -> None:
    kit = Kit()
    kit.cluster.add(foreign("Service", "tiny", annotations={ADOPT: "tiny"}))
    await asked_for(kit)
    uid = kit.cluster.body(INFERENCE.name, "tiny")["metadata"]["uid"]
    adopted = kit.cluster.body("Service", "tiny")
    assert adopted["metadata"]["ownerReferences"][0]["uid"] == uid
    assert kit.condition("SpecAccepted") == ("True", "Accepted")


async def test_an_object_that_has_a_controller_is_never_adopted() -> None:
    kit = Kit()
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "u"}
    theirs = foreign(
        "Service",
        "tiny",
        annotations={ADOPT: "tiny"},
        ownerReferences=[{**ref, "controller": True}],
    )
    kit.cluster.add(theirs)
    await asked_for(kit)
    assert "belongs to Deployment web" in message(kit, "Ready")


async def test_what_an_earlier_resource_left_is_waited_for() -> None:
    """The garbage collector needs a moment; the forced apply met two controllers and was refused,
    or gave the new resource what was then collected."""
    kit = Kit()
    await served(kit)
    kit.cluster.collects = False
    old = kit.cluster.body(INFERENCE.name, "tiny")["metadata"]["uid"]
    kit.cluster.remove(INFERENCE, *KEY)
    kit.cluster.add(resource())
    await kit.settle()
    assert "is being deleted; waiting until it is gone" in message(kit, "Reconciling")
    assert kit.condition("SpecAccepted")[0] == "True"
    kit.cluster.collects = True
    kit.cluster.collect(old)
    kit.time.now += 60.0
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    kit.cluster.check_integrity()
    uid = kit.cluster.body(INFERENCE.name, "tiny")["metadata"]["uid"]
    for kind, name in FOREIGN:
        assert kit.cluster.body(kind, name)["metadata"]["ownerReferences"][0]["uid"] == uid


async def test_a_predecessors_keys_are_not_taken_for_ones_own() -> None:
    """A create that found the predecessor's Secret counted as done; then it was collected, and
    new pods waited for it."""
    kit = Kit()
    await served(kit)
    kit.cluster.now_text = kit.time.clock.now_text
    kit.cluster.collects = False
    old = kit.cluster.body(INFERENCE.name, "tiny")["metadata"]["uid"]
    kit.cluster.remove(INFERENCE, *KEY)
    secret = kit.cluster.objects.pop(("Secret", "default", "tiny-curve"))
    kit.cluster.collect(old)
    kit.cluster.objects["Secret", "default", "tiny-curve"] = secret  # collected last
    kit.cluster.collects = True
    kit.cluster.add(resource())
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    assert kit.cluster.names("Deployment") == [], "no pod is asked for before its keys can be made"
    assert kit.condition("SpecAccepted") == ("True", "Accepted")
    kit.cluster.collect(old)
    assert kit.cluster.names("Secret") == []
    kit.time.now += 3.0
    await kit.settle()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    assert kit.cluster.names("Deployment") == ["tiny-frontend"]


async def test_the_kept_claim_is_known_again_and_a_foreign_one_is_not_taken() -> None:
    fetched = resource(model={"uri": "hf://org/model", "cache": {"size": "1Gi"}})
    kit = Kit()
    await kit.start()
    kit.cluster.add(fetched)
    await kit.settle()
    claim = kit.cluster.body("PersistentVolumeClaim", "tiny-model")
    kit.cluster.remove(INFERENCE, *KEY)
    kit.cluster.add(fetched)
    await kit.settle()
    assert kit.condition("SpecAccepted")[0] == "True"
    uid = kit.cluster.body("PersistentVolumeClaim", "tiny-model")["metadata"]["uid"]
    assert uid == claim["metadata"]["uid"]

    def as_before(body: Obj) -> None:
        """As a release before these annotations made it."""
        del body["metadata"]["annotations"]

    kit.cluster.edit(BY_NAME["PersistentVolumeClaim"], "default", "tiny-model", as_before)
    await kit.settle()
    kept = kit.cluster.body("PersistentVolumeClaim", "tiny-model")["metadata"]
    assert kept["annotations"]["argocd.argoproj.io/sync-options"] == "Prune=false"

    other = Kit()
    labels = dict(claim["metadata"]["labels"])  # copied, as by a backup
    theirs = copy.deepcopy(
        other.cluster.add(foreign("PersistentVolumeClaim", "tiny-model", labels=labels))
    )
    await other.start()
    other.cluster.add(fetched)
    await other.settle()
    assert other.cluster.body("PersistentVolumeClaim", "tiny-model") == theirs
    assert other.condition("SpecAccepted") == ("False", "NameTaken")


@pytest.mark.parametrize(
    "change",
    [{"size": "1Gi"}, {"size": "1Gi", "accessMode": "ReadWriteOnce"}, {}, None],
    ids=["smaller", "other access", "no class", "no cache"],
)
async def test_a_claim_that_is_there_keeps_what_cannot_change(
    change: dict[str, str] | None,
) -> None:
    """The resource was deleted and made again with another cache, and the claim stays: its apply
    was refused, and no pass came as far as the workloads."""
    cache = {"size": "200Gi", "storageClassName": "fast"}
    model: Obj = {"uri": "hf://org/model", "cache": cache}
    kit = await served(Kit(), resource(model=model))
    before = kit.cluster.body("PersistentVolumeClaim", "tiny-model")["spec"]
    kit.cluster.remove(INFERENCE, *KEY)
    await kit.settle()
    model = {"uri": "hf://org/model"} if change is None else {**model, "cache": change}
    kit = await served(kit, resource(model=model))
    assert kit.cluster.body("PersistentVolumeClaim", "tiny-model")["spec"] == before
    assert kit.condition("SpecAccepted") == ("True", "Accepted")
    assert kit.cluster.names("Deployment") == ["tiny-frontend"]


async def test_a_claim_that_its_administrator_expanded_keeps_its_size() -> None:
    kit = await served(Kit(), resource(model={"uri": "hf://org/model", "cache": {"size": "1Gi"}}))

    def expand(body: Obj) -> None:
        body["spec"]["resources"]["requests"]["storage"] = "300Gi"

    def scale(body: Obj) -> None:
        body["spec"]["frontend"]["replicas"] = 3

    claim = BY_NAME["PersistentVolumeClaim"]
    kit.cluster.edit(claim, "default", "tiny-model", expand)
    kit.cluster.edit(INFERENCE, *KEY, scale)
    await kit.settle()
    requests = kit.cluster.body("PersistentVolumeClaim", "tiny-model")["spec"]["resources"]
    assert requests == {"requests": {"storage": "300Gi"}}
    assert kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 3
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body["spec"]["model"].update(GROWN))
    await kit.settle()
    requests = kit.cluster.body("PersistentVolumeClaim", "tiny-model")["spec"]["resources"]
    assert requests == {"requests": {"storage": "400Gi"}}


async def test_a_claim_that_cannot_grow_keeps_no_workload_from_its_change() -> None:
    """Its storage class allows no expansion: told, and everything else goes on."""
    kit = await served(Kit(), resource(model={"uri": "hf://org/model", "cache": {"size": "1Gi"}}))
    refusal = "only dynamically provisioned pvc can be resized"
    for _ in range(9):
        kit.fail(UserError(refusal, 403), verb="APPLY", kind="PersistentVolumeClaim")

    def grow(body: Obj) -> None:
        body["spec"]["model"].update(GROWN)
        body["spec"]["frontend"]["replicas"] = 3

    kit.cluster.edit(INFERENCE, *KEY, grow)
    await kit.settle()
    assert kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 3
    assert refusal in message(kit, "SpecAccepted")


async def test_nothing_is_pruned_that_only_looks_like_ours() -> None:
    """Labels can be copied, and an owner that is no controller may be anybody's note."""
    kit = Kit()
    await served(kit)
    uid = kit.cluster.body(INFERENCE.name, "tiny")["metadata"]["uid"]
    labels = kit.cluster.body("Service", "tiny")["metadata"]["labels"]
    ref = {"apiVersion": INFERENCE.api_version, "kind": INFERENCE.name, "name": "tiny", "uid": uid}
    theirs = foreign("Service", "theirs", labels=labels, ownerReferences=[ref])
    kit.cluster.add(theirs)
    await kit.resync()
    assert "theirs" in kit.cluster.names("Service")


async def test_pods_of_others_that_carry_our_labels_are_neither_counted_nor_deleted() -> None:
    kit = Kit()
    await served(kit, pods=True)
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs", "uid": "u"}

    def taken(body: Obj) -> None:
        body["metadata"]["ownerReferences"] = [{**ref, "controller": True}]

    add_pod(kit.cluster, "engine")
    kit.cluster.edit(POD, "default", "tiny-engine-1", taken)
    await kit.resync()
    assert kit.status()["engine"]["replicas"] == 1


async def test_two_resources_whose_service_names_meet_are_both_told() -> None:
    """`tiny-engine` is the Service for engines of `tiny` and the one for clients of another."""
    kit = Kit()
    await served(kit, pods=True)
    second = resource()
    second["metadata"]["name"] = "tiny-engine"
    kit.cluster.add(second)
    await kit.settle()
    await kit.resync()
    uid = kit.cluster.body(INFERENCE.name, "tiny")["metadata"]["uid"]
    service = kit.cluster.body("Service", "tiny-engine")
    assert service["metadata"]["ownerReferences"][0]["uid"] == uid
    assert "MultiModalInference tiny-engine needs a Service" in message(kit, "SpecAccepted")
    assert kit.condition("Ready") == ("True", "Ready")


async def test_each_taken_object_has_an_event_of_its_own() -> None:
    """The second one had the reason of the first and was never told."""
    kit = Kit()
    kit.cluster.add(foreign("ServiceAccount", "tiny"))
    kit.cluster.add(foreign("Service", "tiny"))
    await asked_for(kit)
    kit.cluster.remove(BY_NAME["ServiceAccount"], "default", "tiny")
    await kit.resync()
    finish_profile(kit.cluster)
    await kit.resync()
    notes = [
        body["note"]
        for (kind, *_), body in kit.cluster.objects.items()
        if kind == "Event" and body["reason"] == "NameTaken"
    ]
    assert len(notes) == 2
    assert "ServiceAccount default/tiny belongs" in notes[0]
    assert "Service default/tiny belongs" in notes[1]


async def test_a_foreign_secret_of_the_keys_name_is_told() -> None:
    """Its pods waited for keys that nobody made, and nothing said why."""
    kit = Kit()
    theirs = copy.deepcopy(kit.cluster.add(foreign("Secret", "tiny-curve")))
    await asked_for(kit)
    kit.time.now += 61
    await kit.resync()
    assert kit.condition("SpecAccepted") == ("False", "NameTaken")
    told = message(kit, "Ready")
    assert "Secret default/tiny-curve belongs to another client" in told
    assert "No Secret can be handed over" in told
    assert ADOPT not in told
    assert not kit.cluster.names("StatefulSet")
    assert kit.cluster.body("Secret", "tiny-curve") == theirs
    assert {verb for verb, kind, _ in kit.cluster.calls if kind == "Secret"} == {"POST"}
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    await kit.resync()
    assert kit.cluster.names("StatefulSet")
    assert kit.condition("SpecAccepted") == ("True", "Accepted")


@pytest.mark.parametrize("lost", ["ConfigMap tiny-basis", "StatefulSet tiny-engine"])
async def test_own_keys_are_known_without_what_tells_of_them(lost: str) -> None:
    """Either the basis or the engines may be deleted: the keys stay the resource's own."""
    kit = Kit()
    await served(kit, pods=True)
    kind, name = lost.split()
    kit.cluster.remove(BY_NAME[kind], "default", name)
    await Kit(kit.cluster).start()
    await kit.resync()
    assert kit.cluster.names(kind)
    assert kit.condition("SpecAccepted") == ("True", "Accepted")
