"""Jobs over releases of the operator: results are found again, and what works is left to work.

Also what a Job that fails leaves in the status.
"""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.api import reasons
from foveal_operator.api.parse import SpecError, parse
from foveal_operator.kube.kinds import JOB
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import desired
from foveal_operator.manifests.job import TEMPLATE
from foveal_operator.model.flow import PROFILE_KEY, ModelDecision
from tests.support.operator_rig import Kit, resource
from tests.support.regenerate import FACTS
from tests.support.samples import resource as sample
from tests.support.served_resource import served, versions
from tests.support.stored_objects import CLAIMED, FETCHED, PROFILE, StoredObjects, kinds

FAILED_POD = {"exitCode": 1, "message": "boom", "finishedAt": "2026-01-01T00:00:00Z"}


# --- names -------------------------------------------------------------------------------------
def test_names_of_jobs_are_a_contract_with_every_earlier_release() -> None:
    """Whoever changes one has every model in the world fetched and profiled once more."""
    assert StoredObjects(FETCHED).names["fetch"] == "qwen-fetch-665b245cf4"
    assert StoredObjects(FETCHED).names["profile"] == "qwen-profile-6634606740"
    assert StoredObjects(CLAIMED).names["profile"] == "qwen-profile-19bb7ac212"


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"model": {"uri": "hf://other/model"}}, {"fetch", "profile"}),
        ({"model": {"uri": FETCHED.spec.model.uri, "revision": "v2"}}, {"fetch", "profile"}),
        ({"image": "other"}, {"profile"}),
        ({"modalities": {"image": {"maxPixels": 1_000_000}}}, {"profile"}),
        ({"engine": {"dtype": "float32"}}, {"profile"}),
        ({"engine": {"maxNumBatchedTokens": 4096}}, set()),
        ({"model": {"uri": FETCHED.spec.model.uri, "secretRef": {"name": "token"}}}, set()),
        ({"frontend": {"replicas": 3}}, set()),
    ],
)
def test_only_what_a_result_depends_on_asks_for_another(change: Obj, again: set[str]) -> None:
    before, after = StoredObjects(FETCHED).names, StoredObjects(parse(sample(**change))).names
    assert {what for what in ("fetch", "profile") if before[what] != after[what]} == again


SETTINGS: Obj = {
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "nodeSelector": {"pool": "cpu"},
    "affinity": {"nodeAffinity": {}, "podAffinity": {}, "podAntiAffinity": {}},
    "priorityClassName": "low",
    "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "containers": [
        {
            "name": "frontend",
            "env": [
                {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
                {"name": "SSL_CERT_FILE", "value": "/etc/ca/ca.crt"},
                {"name": "HF_HUB_OFFLINE", "value": "1"},
            ],
            "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        },
        {"name": "sidecar", "image": "side:1"},
    ],
}


def test_jobs_take_the_settings_that_pods_take() -> None:
    """Behind a proxy, with a private registry or on tainted nodes no model was ever fetched."""
    inference = parse(sample(frontend={"podTemplate": {"spec": SETTINGS}}))
    assert StoredObjects(inference).names == StoredObjects(parse(sample())).names, "the same result"
    jobs = desired(inference, None, FACTS).of_kind("Job")
    assert len(jobs) == 2
    for job in jobs:
        spec = job["spec"]["template"]["spec"]
        for key in ("imagePullSecrets", "tolerations", "nodeSelector", "priorityClassName"):
            assert spec[key] == SETTINGS[key]
        (container,) = spec["containers"]
        mine = SETTINGS["containers"][0]
        assert all(one in container["env"] for one in mine["env"][:2])
        assert spec["affinity"] == {"nodeAffinity": {}}, "no pod of ours is there yet"
        offline = [one for one in container["env"] if one["name"] == "HF_HUB_OFFLINE"]
        assert len(offline) == (container["name"] == "profile"), "a fetch needs the hub"
        assert mine["volumeMounts"][0] in container["volumeMounts"]
        assert SETTINGS["volumes"][0] in spec["volumes"]
        assert {"name": "HOME", "value": "/tmp"} in container["env"], "ours stay"


MARKS = {
    "labels": {"team": "vision", "kueue.x-k8s.io/queue-name": "serving"},
    "annotations": {"sidecar.istio.io/inject": "false"},
}


def test_jobs_take_labels_and_annotations_that_pods_take() -> None:
    """Where a policy asks for a label no Job could run; where a mesh injects, none could end."""
    inference = parse(sample(frontend={"podTemplate": {"metadata": MARKS}}))
    assert StoredObjects(inference).names == StoredObjects(parse(sample())).names, "the same result"
    jobs = desired(inference, None, FACTS).of_kind("Job")
    assert len(jobs) == 2
    for job in jobs:
        metadata = job["spec"]["template"]["metadata"]
        assert metadata["labels"]["team"] == "vision"
        assert metadata["labels"]["app.kubernetes.io/component"] == "model", "ours stay"
        assert "kueue.x-k8s.io/queue-name" not in metadata["labels"], "the queue is for serving"
        assert metadata["annotations"] == MARKS["annotations"]


@pytest.mark.parametrize(("cpu", "requested"), [("4", "1"), ("600m", "600m"), (0.5, "500m")])
def test_jobs_are_limited_as_frontends_are(cpu: str | float, requested: str) -> None:
    """Where a quota counts limits.cpu no model was ever fetched. No limit is below a request."""
    own = {"name": "frontend", "resources": {"limits": {"cpu": cpu}}}
    spec = {"containers": [own, {"name": "sidecar"}]}
    body = sample(frontend={"cpu": "500m", "podTemplate": {"spec": spec}})
    jobs = desired(parse(body), None, FACTS).of_kind("Job")
    assert len(jobs) == 2
    for job in jobs:
        found = job["spec"]["template"]["spec"]["containers"][0]["resources"]
        assert (found["limits"]["cpu"], found["requests"]["cpu"]) == (cpu, requested)
        assert set(found["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize(
    ("mount", "says"),
    [({"name": "ca", "mountPath": "/tmp"}, "volume tmp"),
     ({"name": "model", "mountPath": "/data"}, "the operator's volume")],
)  # fmt: skip
def test_jobs_keep_their_mounts_and_name_the_field_that_was_written(mount: Obj, says: str) -> None:
    containers = [{"name": "frontend", "volumeMounts": [mount]}]
    body = sample(frontend={"podTemplate": {"spec": {"containers": containers}}})
    with pytest.raises(SpecError) as caught:
        desired(parse(body), None, FACTS)
    ((path, text),) = caught.value.problems
    place = f"containers[frontend].volumeMounts[{mount['mountPath']}]"
    assert path == f"spec.frontend.podTemplate.spec.{place}"
    assert says in text


# --- Jobs of another release -------------------------------------------------------------------
def otherwise(stored: StoredObjects, what: str, **container: Any) -> StoredObjects:
    """The Job as another release, or an earlier spec, has made it."""
    live = stored.live["Job", stored.names[what]]
    live["metadata"]["annotations"] = {TEMPLATE: "another"}
    wanted = {
        owned.body["metadata"]["name"]: owned.body
        for owned in StoredObjects(stored.inference).claim().decide().objects
    }.get(stored.names[what])
    spec = (wanted or {}).get("spec", {}).get("template", {}).get("spec", {"containers": [{}]})
    own = {**spec["containers"][0], **container}
    live["spec"] = {"template": {"spec": {**spec, "containers": [own]}}}
    return stored


def policy_of(found: ModelDecision, name: str) -> str:
    (policy,) = [o.policy for o in found.objects if o.body["metadata"]["name"] == name]
    return policy


def test_a_download_by_another_release_counts() -> None:
    stored = otherwise(StoredObjects(FETCHED).claim().job("fetch", "Complete"), "fetch")
    stored.live["ConfigMap", stored.names["ConfigMap"]] = {"data": {PROFILE_KEY: PROFILE}}
    found = stored.decide()
    assert (found.reason, found.delete) == (reasons.RESOLVED, ())
    assert policy_of(found, stored.names["fetch"]) == "Keep"


def test_a_download_under_way_is_not_begun_anew() -> None:
    stored = StoredObjects(FETCHED).claim().job("fetch").pod("fetch", {"running": {}})
    found = otherwise(stored, "fetch", image="older", envFrom=[{"x": "y"}]).decide()
    assert (found.reason, found.delete) == (reasons.DOWNLOADING, ())
    assert policy_of(found, stored.names["fetch"]) == "Keep"


@pytest.mark.parametrize(
    ("container", "anew"), [({}, False), ({"envFrom": ["old"]}, True), ({"image": "bad"}, True)]
)
def test_a_download_in_trouble_is_made_anew_with_another_secret_or_image(
    container: Obj, anew: bool
) -> None:
    stored = (
        StoredObjects(FETCHED).claim().job("fetch").ended("fetch", 2, "hf://a/b: 401 Client Error")
    )
    found = otherwise(stored, "fetch", **container).decide()
    assert found.delete == ((("Job", stored.names["fetch"], "uid-fetch"),) if anew else ())
    assert ("Job" in kinds(found)) is not anew, "applied in the same pass it would be the old one"


@pytest.mark.parametrize(
    ("label", "anew"), [("batch.kubernetes.io/job-name", False), ("team", True)]
)
def test_a_job_that_a_policy_refuses_is_made_anew_with_another_label(
    label: str, anew: bool
) -> None:
    """The cluster's own labels are no difference."""
    stored = StoredObjects(FETCHED).claim().job("fetch").ended("fetch", 2, "boom")
    otherwise(stored, "fetch")
    job = stored.live["Job", stored.names["fetch"]]
    job["spec"]["template"]["metadata"] = {"labels": {label: "x"}}
    assert bool(stored.decide().delete) is anew


LIMITED = {"name": "frontend", "resources": {"limits": {"cpu": "8"}}}
MOUNTED = {"name": "frontend", "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}
MENDED: list[tuple[str, Obj, bool]] = [
    ("a quota counts limits.cpu", {"containers": [LIMITED]}, True),
    ("a standard forbids it", {"securityContext": {"runAsUser": 2000}}, True),
    ("no node has the label", {"affinity": {"nodeAffinity": {}}}, True),
    ("no such ConfigMap", {"volumes": [{"name": "ca", "configMap": {"name": "ca"}}]}, True),
    ("mounted elsewhere", {"containers": [MOUNTED]}, True),
    ("nothing for a Job", {"schedulerName": "other"}, False),
]


@pytest.mark.parametrize(("spec", "anew"), [case[1:] for case in MENDED])
def test_a_job_without_pods_is_made_anew_once_the_pod_template_is_mended(
    spec: Obj, anew: bool
) -> None:
    """What kept its pods from running was corrected, and the Job stayed as it had been made."""
    before, after = sample(), sample(frontend={"podTemplate": {"spec": spec}})
    stored = StoredObjects(parse(after)).claim().job("fetch")
    live = stored.live["Job", stored.names["fetch"]]
    for job in desired(parse(before), None, FACTS).of_kind("Job"):
        if job["metadata"]["name"] == stored.names["fetch"]:
            live["metadata"]["annotations"] = job["metadata"]["annotations"]
            live["spec"] = job["spec"]
    assert stored.decide().delete == (), "it may still get its pods"
    stored.refused = {f"Job/{stored.names['fetch']}": "pods x is forbidden: exceeded quota: q"}
    found = stored.decide()
    assert found.delete == ((("Job", stored.names["fetch"], "uid-fetch"),) if anew else ())


@pytest.mark.parametrize("what", ["fetch", "profile"])
def test_a_job_that_failed_as_another_release_made_it_gets_another_chance(what: str) -> None:
    """Even one that only an edit would heal: the new release may have mended it."""
    stored = StoredObjects(FETCHED if what == "fetch" else CLAIMED).claim().job(what, "Failed")
    stored.ended(what, 2, "404 not a model we can load")
    assert otherwise(stored, what).decide().delete == (("Job", stored.names[what], f"uid-{what}"),)
    del stored.live["Job", stored.names[what]]["metadata"]["annotations"]
    assert stored.decide().delete == (), "made by this release: it has had its chance"


async def test_an_upgrade_that_makes_jobs_otherwise_changes_nothing() -> None:
    hub = resource(model={"uri": "hf://org/tiny", "cache": {"size": "1Gi"}})
    kit = await served(Kit(), hub, pods=True)
    (fetch,) = [name for name in kit.cluster.names("Job") if "-fetch-" in name]
    assert kit.condition("Ready") == ("True", "Ready")

    def as_of_old(body: Obj) -> None:
        body["metadata"]["annotations"][TEMPLATE] = "of-old"
        body["spec"]["backoffLimit"] = 4

    kit.cluster.edit(JOB, "default", fetch, as_of_old, manager="foveal-operator")
    before = versions(kit.cluster)
    newer = Kit(kit.cluster)
    await newer.start()
    await newer.settle()
    assert versions(kit.cluster) == before
    assert newer.condition("Ready") == ("True", "Ready")


@pytest.mark.parametrize(
    ("inference", "what", "line", "reason"),
    [(FETCHED, "fetch", "hf://a/b: 404 Client Error", reasons.NOT_FOUND),
     (CLAIMED, "profile", "model type mamba is not supported", reasons.UNSUPPORTED_MODEL)],
)  # fmt: skip
def test_a_deleted_job_runs_again_as_its_message_says(
    inference: Any, what: str, line: str, reason: reasons.Reason
) -> None:
    """The model came later, or its files were replaced: no edit of the resource tells."""
    stored = StoredObjects(inference).claim().job(what, "Failed", ago=9e9).ended(what, 2, line)
    found = stored.decide()
    assert (found.reason, found.delete, found.next_check_seconds) == (reason, (), None)
    assert "delete the Job, which runs again" in reason.message(found.message)
    again = stored.without_jobs().decide()
    names = [o.key[2] for o in again.objects if o.policy == "Apply"]
    assert stored.names[what] in names


# --- failures ----------------------------------------------------------------------------------
FAILURES = [
    (FETCHED, "fetch", 2, "hf://a/b: 403 Client Error", "FetchDenied"),
    (FETCHED, "fetch", 1, "Connection reset by peer", "FetchFailed"),
    (CLAIMED, "profile", 2, "model type mamba is not supported", "UnsupportedModel"),
    (CLAIMED, "profile", 1, "boom", "ProfileFailed"),
]


@pytest.mark.parametrize(("inference", "what", "code", "line", "reason"), FAILURES)
def test_a_job_that_fails_is_the_last_failure(
    inference: Any, what: str, code: int, line: str, reason: str
) -> None:
    stored = StoredObjects(inference).claim().job(what)
    failure = stored.ended(what, code, f"a log line\n{line}\n", ago=60).decide().failure
    assert failure is not None
    assert (failure.pod, failure.container) == (f"{stored.names[what]}-0", what)
    assert (failure.reason, failure.exit_code, failure.message) == (reason, code, line)
    stored.pod(what, {"running": {}})
    assert stored.decide().failure == failure, "while it is tried again"
    message = PROFILE if what == "profile" else ""
    found = stored.job(what, "Complete").ended(what, 0, message).decide()
    assert found.failure is None, "what a Job suffered that has ended well is over"


def with_proxy(stored: StoredObjects, code: int, message: str = "") -> StoredObjects:
    """An injected proxy ended after the Job's own container."""
    state = {"exitCode": code, "message": message, "finishedAt": "2099-01-01T00:00:00Z"}
    for pod in stored.pods:
        proxy = {"name": "istio-proxy", "state": {"terminated": state}}
        pod["status"]["containerStatuses"].append(proxy)
    return stored


def test_a_sidecar_s_last_words_are_no_profile() -> None:
    stored = StoredObjects(CLAIMED).claim().job("profile", "Complete").ended("profile", 0, PROFILE)
    assert with_proxy(stored, 0, "drained").decide().reason is reasons.RESOLVED


@pytest.mark.parametrize(("inference", "what", "code", "line", "reason"), FAILURES)
def test_a_sidecar_does_not_tell_why_a_job_failed(
    inference: Any, what: str, code: int, line: str, reason: str
) -> None:
    stored = StoredObjects(inference).claim().job(what).ended(what, code, line)
    found = with_proxy(stored, 2 if code == 1 else 143, "404 not found").decide()
    assert found.reason.name == reason
    assert line in found.message
    assert found.failure is not None
    assert (found.failure.container, found.failure.reason) == (what, reason)


async def test_the_status_tells_how_a_job_failed() -> None:
    kit = Kit()
    await kit.start()
    kit.cluster.add(resource())
    await kit.settle()
    (job,) = kit.cluster.names("Job")
    template = kit.cluster.body("Job", job)["spec"]["template"]
    labels = {**template["metadata"]["labels"], "job-name": job}
    states = [{"name": "profile", "state": {"terminated": FAILED_POD}}]
    kit.cluster.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{job}-x", "namespace": "default", "labels": labels},
            "spec": template["spec"],
            "status": {"phase": "Failed", "containerStatuses": states},
        }
    )
    await kit.settle()
    failure = kit.status()["lastFailure"]
    assert (failure["pod"], failure["reason"]) == (f"{job}-x", "ProfileFailed")
    assert (failure["exitCode"], failure["message"]) == (1, "boom")
    assert failure["time"] == "2026-01-01T00:00:00Z"
    assert failure["memoryLimit"], "the Job's own"
