"""The objects: golden, deterministic, restricted, and an engine that no frontend can restart."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from foveal_operator.kube.types import Obj
from foveal_operator.manifests import Desired, desired
from foveal_operator.manifests.context import ClusterFacts, Context
from foveal_operator.manifests.curve_keys import curve_secret
from foveal_operator.manifests.documents import engine_document, frontend_document
from foveal_runtime.plan.config import GIB, EngineConfig, FrontendConfig, expand
from foveal_runtime.plan.quantity import parse_bytes
from tests.support.regenerate import FACTS, GOLDEN, golden_text, planned, wanted
from tests.support.samples import AUTOSCALED, LEGAL, put, resource


def bodies(objects: Desired) -> dict[str, Obj]:
    return {"/".join(owned.key): owned.body for owned in objects.objects}


def pod_specs(objects: Desired) -> list[Obj]:
    kinds = ("Deployment", "StatefulSet", "Job")
    return [body["spec"]["template"]["spec"] for k in kinds for body in objects.of_kind(k)]


def of_engines(objects: Desired) -> dict[str, Obj]:
    component = "app.kubernetes.io/component"
    return {
        key: body
        for key, body in bodies(objects).items()
        if body["metadata"]["labels"][component] == "engine"
    }


@pytest.mark.parametrize("name", LEGAL)
def test_objects_are_the_committed_ones(name: str) -> None:
    """After a change that is meant: `make generate`, then read the difference."""
    assert (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8") == golden_text(name)


@pytest.mark.parametrize("name", LEGAL)
def test_no_two_objects_share_a_name(name: str) -> None:
    objects = wanted(LEGAL[name])
    assert objects.complete
    assert len(bodies(objects)) == len(objects.objects)
    assert all(len(owned.body["metadata"]["name"]) <= 63 for owned in objects.objects)


@pytest.mark.parametrize("name", LEGAL)
def test_pods_meet_restricted_pod_security(name: str) -> None:
    for spec in pod_specs(wanted(LEGAL[name])):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "image"}
        for volume in spec["volumes"]:
            assert (volume.keys() - {"name"}) <= allowed
            if "emptyDir" in volume:
                assert parse_bytes(volume["emptyDir"]["sizeLimit"]) > 0
        mounted = {m["name"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", LEGAL)
def test_limits_are_the_plans_and_count_shared_memory(name: str) -> None:
    inference, plan = planned(LEGAL[name])
    objects = desired(inference, plan, FACTS)
    for kind, place in (("Deployment", plan.frontend), ("StatefulSet", plan.engine)):
        (workload,) = objects.of_kind(kind)
        spec = workload["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert parse_bytes(container["resources"]["limits"]["memory"]) == place.limit_bytes
        assert (
            container["resources"]["requests"]["memory"]
            == (container["resources"]["limits"]["memory"])
        )
        (shm,) = [v for v in spec["volumes"] if v["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert parse_bytes(shm["emptyDir"]["sizeLimit"]) == place.line("shm").bytes


@pytest.mark.parametrize("name", LEGAL)
def test_documents_decode_as_the_processes_decode_them(name: str) -> None:
    inference, plan = planned(LEGAL[name])
    maps = {
        key: text
        for body in desired(inference, plan, FACTS).of_kind("ConfigMap")
        for key, text in body["data"].items()
    }
    engine = msgspec.json.decode(maps["engine.json"], type=EngineConfig)
    frontend = msgspec.json.decode(maps["frontend.json"], type=FrontendConfig)
    assert engine.caches.ipc_bytes == plan.ipc_bytes
    assert engine.caches.kv_bytes == plan.kv_bytes
    assert engine.caches.encoder_embeds == plan.encoder_embeds
    assert frontend.processor_bytes == plan.processor_bytes
    assert frontend.model.name == inference.served_name
    assert engine.model == msgspec.structs.replace(frontend.model, name=inference.name)


@pytest.mark.parametrize(
    ("size", "host_memory", "shared"),
    [("Auto", "64Gi", GIB), ("Auto", None, GIB), ("2Gi", "64Gi", 2 * GIB), ("0", "64Gi", 0)],
)
def test_shared_values_have_what_the_frontend_is_charged_for(
    size: str, host_memory: str | None, shared: int
) -> None:
    """With Auto the document named the engine's pool: 52 GiB in a frontend of 11 GiB, which did not
    start, and 4 GiB where 1 GiB was counted, which was killed once it had them."""
    obj = resource(
        engine={"hostMemory": host_memory} if host_memory else {},
        caches={"ipc": {"type": "SharedMemory", "claimName": "tmpfs", "size": size}},
    )
    inference, plan = planned(obj)
    document = frontend_document(Context(inference=inference, plan=plan, facts=FACTS))
    charged = [line.bytes for line in plan.frontend.lines if line.name == "sharedValues"]
    assert document.shm_bytes == shared == sum(charged)


def test_each_engine_has_a_folder_of_its_own_on_the_warm_claim() -> None:
    """All of them wrote to the claim's root, and each removed the files of the others."""
    objects = wanted(resource(caches={"encoder": {"warmSet": {"claimName": "warm"}}}))
    (text,) = [
        body["data"]["engine.json"]
        for body in objects.of_kind("ConfigMap")
        if "engine.json" in body["data"]
    ]
    (container,) = objects.of_kind("StatefulSet")[0]["spec"]["template"]["spec"]["containers"]
    (mounted,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "warm"]
    folders = [
        msgspec.json.decode(
            expand(text, {"POD_NAME": pod, "POD_IP": "10.0.0.1", "NODE_NAME": "n"}),
            type=EngineConfig,
        ).caches.warm_directory
        for pod in ("qwen-engine-0", "qwen-engine-1")
    ]
    assert folders == [f"{mounted}/qwen-engine-0", f"{mounted}/qwen-engine-1"]


FRONTEND_CHANGES: list[tuple[str, Any]] = [
    ("spec.frontend", {"replicas": 7}),
    ("spec.frontend", {"processes": 5}),
    ("spec.frontend", {"mediaWorkers": 9}),
    ("spec.frontend", {"hostMemory": "64Gi"}),
    ("spec.frontend", {"cpu": "13"}),
    ("spec.frontend", {"admission": {"maxRequests": 3, "maxMedia": "1Gi"}}),
    ("spec.frontend", {"autoscaling": AUTOSCALED}),
    ("spec.frontend", {"podTemplate": {"metadata": {"labels": {"team": "a"}}}}),
    ("spec.caches.processor", {"size": "1Gi"}),
    ("spec.networking.port", 9000),
    ("spec.security.apiKeySecretRef", {"name": "other"}),
    ("spec.security.mediaSources", {"allowedDomains": ["a.example.org"]}),
]


@pytest.mark.parametrize(("path", "value"), FRONTEND_CHANGES)
def test_changes_of_the_frontends_change_no_engine_object(path: str, value: Any) -> None:
    before, after = wanted(resource()), wanted(put(resource(), path, value))
    assert of_engines(after) == of_engines(before)
    assert bodies(after) != bodies(before)


def test_the_operators_version_is_in_no_pod() -> None:
    """The hash of a pod covers what the pod runs; the operator never appears in it."""
    text = golden_text("gpu")
    assert "0.1.0" not in text


def test_names_of_documents_follow_their_content() -> None:
    one, two = wanted(resource()), wanted(put(resource(), "spec.caches.ipc.size", "1Gi"))
    names = [{b["metadata"]["name"] for b in d.of_kind("ConfigMap")} for d in (one, two)]
    assert names[0] != names[1]
    assert all(
        body["immutable"] for body in one.of_kind("ConfigMap") if "dashboard" not in str(body)
    )


def test_owner_references_and_the_claim_that_has_none() -> None:
    obj = resource()
    obj["metadata"]["uid"] = "0d9a"
    for owned in wanted(obj).objects:
        owner = owned.body["metadata"].get("ownerReferences")
        if owned.body["kind"] == "PersistentVolumeClaim":
            assert owner is None
            assert owned.policy == "Retain"
            # Nor does Argo CD prune it, which takes the label `instance` for its own.
            annotations = owned.body["metadata"]["annotations"]
            assert annotations["argocd.argoproj.io/sync-options"] == "Prune=false"
            assert annotations["argocd.argoproj.io/compare-options"] == "IgnoreExtraneous"
        else:
            assert owner[0]["uid"] == "0d9a"
            assert owner[0]["controller"] is True


def test_no_pods_before_profile_model_or_fit() -> None:
    inference, plan = planned(resource())
    unknown = desired(inference, None, FACTS)
    assert [o.body["kind"] for o in unknown.objects] == [
        "ServiceAccount",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Job",
        "Job",
    ]
    waiting = desired(inference, plan, msgspec.structs.replace(FACTS, model_ready=False))
    misfit = wanted(put(resource(), "spec.engine.accelerator", {"memory": "8Gi"}))
    for objects in (unknown, waiting, misfit):
        assert not objects.complete
        assert not objects.of_kind("StatefulSet")
        assert not objects.of_kind("Deployment")


def test_the_key_secret_is_created_once_and_never_shown() -> None:
    inference, plan = planned(resource())
    (owned,) = [o for o in desired(inference, plan, FACTS).objects if o.key[0] == "Secret"]
    assert owned.policy == "CreateOnly"
    keys = {"server-public": "a" * 40, "server-secret": "b" * 40}
    made = curve_secret(Context(inference=inference, plan=plan, facts=FACTS), keys)
    assert made == {**owned.body, "stringData": keys}
    assert "stringData" not in golden_text("minimal")
    mounts = {
        role: {item["key"] for v in spec["volumes"] if v["name"] == "curve" for item in
               v["secret"]["items"]}
        for role, spec in zip(("frontend", "engine"), pod_specs(wanted(resource())), strict=False)
    }  # fmt: skip
    assert "server-secret" not in mounts["frontend"]
    assert "client-secret" not in mounts["engine"]


def test_an_autoscaled_workload_is_handed_over_without_a_dip() -> None:
    """Leaving replicas out while we own the field would reset the workload to one pod."""
    obj = put(resource(), "spec.frontend.autoscaling", AUTOSCALED)

    def replicas(facts: ClusterFacts) -> Any:
        (deployment,) = wanted(obj, facts).of_kind("Deployment")
        return deployment["spec"].get("replicas")

    assert replicas(FACTS) == 2
    assert replicas(msgspec.structs.replace(FACTS, live_frontends=5)) == 5
    assert replicas(msgspec.structs.replace(FACTS, frontends_handed_over=True)) is None


def test_optional_apis_that_are_missing_are_told() -> None:
    bare = wanted(LEGAL["scaled"], ClusterFacts())
    assert bare.missing_apis == (
        "ResourceClaimTemplate",
        "ScaledObject",
        "InferencePool",
        "HTTPRoute",
        "PodMonitor",
    )
    assert wanted(resource(), ClusterFacts()).missing_apis == ()


def test_disruption_budgets_only_above_one_replica() -> None:
    assert wanted(resource()).of_kind("PodDisruptionBudget") == []
    assert len(wanted(LEGAL["gpu"]).of_kind("PodDisruptionBudget")) == 2


@pytest.mark.parametrize(
    ("uri", "path", "claim"),
    [
        ("hf://Qwen/Qwen2.5-VL-7B", "/models/hf--Qwen--Qwen2.5-VL-7B--main", "qwen-model"),
        ("s3://bucket/some/prefix", "/models/s3--bucket--some--prefix", "qwen-model"),
        ("pvc://models/tiny/v1", "/models/tiny/v1", "models"),
        ("pvc://models", "/models", "models"),
        ("oci://registry.example/models/tiny:1", "/models", ""),
    ],
)
def test_models_are_found_where_their_uri_says(uri: str, path: str, claim: str) -> None:
    inference, plan = planned(put(resource(), "spec.model.uri", uri))
    objects = desired(inference, plan, FACTS)
    (deployment,) = objects.of_kind("Deployment")
    (volume,) = [
        v for v in deployment["spec"]["template"]["spec"]["volumes"] if v["name"] == "model"
    ]
    if claim:
        assert volume["persistentVolumeClaim"]["claimName"] == claim
    else:
        assert volume["image"]["reference"] == "registry.example/models/tiny:1"
    documents = [b["data"] for b in objects.of_kind("ConfigMap") if "engine.json" in b["data"]]
    assert re.search(rf'"path": "{re.escape(path)}"', documents[0]["engine.json"])
    assert bool(objects.of_kind("Job")) == uri.startswith(("hf", "s3"))


def test_engines_are_reached_through_one_name_however_many() -> None:
    few, many = (planned(put(resource(), "spec.engine.replicas", n)) for n in (2, 4))
    contexts = [
        Context(inference=inference, plan=plan, facts=FACTS) for inference, plan in (few, many)
    ]
    assert frontend_document(contexts[0]) == frontend_document(contexts[1])
    assert engine_document(contexts[0]) == engine_document(contexts[1])


def _spoil(value: Any) -> None:
    """Empties everything inside."""
    if isinstance(value, dict | list):
        for item in list(value.values() if isinstance(value, dict) else value):
            _spoil(item)
        value.clear()


@pytest.mark.parametrize("name", LEGAL)
def test_whoever_changes_an_object_changes_no_later_one(name: str) -> None:
    """Builders once shared dicts: emptying one pod's securityContext emptied all later ones'."""
    inference, result = planned(LEGAL[name])
    for budgets in (None, result):
        first = desired(inference, budgets, FACTS)
        before = msgspec.json.encode(first)
        for owned in first.objects:
            _spoil(owned.body)
        assert msgspec.json.encode(desired(inference, budgets, FACTS)) == before


def test_local_files_are_a_claim_that_frontends_alone_may_read() -> None:
    found = wanted(put(resource(), "spec.security.mediaSources.localFiles", {"claimName": "pics"}))
    (frontend,), (engine,) = found.of_kind("Deployment"), found.of_kind("StatefulSet")
    spec = frontend["spec"]["template"]["spec"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "files"]
    assert volume["persistentVolumeClaim"] == {"claimName": "pics"}
    (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "files"]
    assert mount["readOnly"] is True
    (text,) = [body["data"]["frontend.json"] for body in found.of_kind("ConfigMap")
               if "frontend.json" in body["data"]]  # fmt: skip
    document = msgspec.json.decode(text, type=FrontendConfig)
    assert document.media_sources.file_root == mount["mountPath"]
    assert "files" not in [one["name"] for one in engine["spec"]["template"]["spec"]["volumes"]]


@pytest.mark.parametrize(
    "engine",
    [
        {"parallelism": {"tensor": 4}},
        {"accelerator": {"count": 4}},
        {"parallelism": {"tensor": 4}, "accelerator": {"count": 4}},
    ],
)
def test_devices_follow_from_either_field(engine: Obj) -> None:
    inference, result = planned(resource(engine=engine))
    assert inference.spec.engine.num_devices == 4
    found = desired(inference, result, ClusterFacts())
    (body,) = found.of_kind("StatefulSet")
    needs = body["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert needs["limits"]["nvidia.com/gpu"] == "4"
    context = Context(inference=inference, plan=result, facts=ClusterFacts())
    assert engine_document(context).tensor_parallel == 4
    claimed = {**engine, "accelerator": {**engine.get("accelerator", {}), "deviceClassName": "g"}}
    (template,) = wanted(resource(engine=claimed)).of_kind("ResourceClaimTemplate")
    assert template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 4
