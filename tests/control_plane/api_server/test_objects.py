"""Every object the operator would apply, judged by the API server that will get it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import Desired, desired
from tests.support.api_server.api import Api
from tests.support.regenerate import FACTS, wanted
from tests.support.samples import LEGAL, put

STRICT = {"fieldValidation": "Strict"}
MANAGER = "foveal-operator"


def stored(api: Api, namespace: str, name: str) -> Obj:
    """The sample as the API server holds it: with a uid."""
    return api.create(put(LEGAL[name], "metadata.namespace", namespace)).must()


def before_and_after_the_profile(resource: Obj) -> list[Desired]:
    """What is wanted while nothing is known of the model, and what is wanted then."""
    return [desired(parse(resource), None, FACTS), wanted(resource)]


def templates(objects: Desired) -> list[Obj]:
    return [
        owned.body["spec"]["template"]
        for owned in objects.objects
        if owned.body["kind"] in ("Deployment", "StatefulSet", "Job")
    ]


@pytest.mark.parametrize("name", LEGAL)
def test_objects_are_accepted_and_a_second_apply_changes_nothing(
    api: Api, namespace: str, name: str
) -> None:
    """Strictly validated, without a warning: Pod Security warns of workloads it would refuse."""
    api.merge("Namespace", "", namespace, _labels(warn="restricted")).must()
    for objects in before_and_after_the_profile(stored(api, namespace, name)):
        for owned in objects.objects:
            first = api.apply(owned.body, MANAGER, **STRICT)
            assert not first.message, f"{owned.key}: {first.message}"
            assert not first.warnings, f"{owned.key}: {first.warnings}"
            second = api.apply(owned.body, MANAGER, **STRICT).must()
            assert _ours(second) == _ours(first.body), owned.key


def _ours(obj: Obj) -> Obj:
    """Without what controllers write; they may run beside this test. `generation` stays in."""
    theirs = {"resourceVersion", "managedFields", "annotations"}
    metadata = {key: value for key, value in obj["metadata"].items() if key not in theirs}
    return {**obj, "metadata": metadata, "status": {}}


def _labels(**modes: str) -> Obj:
    labels = {f"pod-security.kubernetes.io/{mode}": level for mode, level in modes.items()}
    return {"metadata": {"labels": labels}}


@pytest.mark.parametrize("name", LEGAL)
def test_pods_are_admitted_where_restricted_is_enforced(
    api: Api, namespace: str, name: str
) -> None:
    """Pod Security's own admission is the judge; `namespace` enforces restricted."""
    resource = stored(api, namespace, name)
    checked = 0
    for objects in before_and_after_the_profile(resource):
        for account in objects.of_kind("ServiceAccount"):
            api.apply(account, MANAGER).must()
        for template in templates(objects):
            reply = api.create(_pod(template, namespace), dryRun="All", **STRICT)
            assert not reply.message
            checked += 1
    assert checked >= 3


def test_a_pod_that_runs_as_root_is_not_admitted(api: Api, namespace: str) -> None:
    """The judge of the test above does refuse."""
    objects = wanted(stored(api, namespace, "minimal"))
    api.apply(objects.of_kind("ServiceAccount")[0], MANAGER).must()
    pod = _pod(templates(objects)[0], namespace)
    pod["spec"]["securityContext"]["runAsNonRoot"] = False
    reply = api.create(pod, dryRun="All")
    assert reply.status == 403
    assert "runAsNonRoot" in reply.message


def _pod(template: Obj, namespace: str) -> dict[str, Any]:
    metadata = {**template["metadata"], "name": "judged", "namespace": namespace}
    # Copied: templates share their constant parts with every object built later in this process.
    spec = copy.deepcopy({"restartPolicy": "Always", **template["spec"]})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_immutable_documents_cannot_be_changed(api: Api, namespace: str) -> None:
    """A config map that pods started from stays what it was; a change needs another name."""
    objects = wanted(stored(api, namespace, "minimal"))
    config = objects.of_kind("ConfigMap")[0]
    api.apply(config, MANAGER).must()
    changed = {**config, "data": {"engine.json": "{}"}}
    reply = api.apply(changed, MANAGER, force=True)
    assert reply.status == 422
    assert "immutable" in reply.message


def test_a_mistake_of_the_users_template_reads_as_one(api: Api, namespace: str) -> None:
    """Server-side apply answers schema mistakes with 500; the operator must not retry those."""
    resource = stored(api, namespace, "minimal")
    (deployment,) = wanted(resource).of_kind("Deployment")
    broken = put(deployment, "spec.template.spec.nodeSelectr", {"a": "b"})
    reply = api.apply(broken, MANAGER, **STRICT)
    assert reply.status in (400, 422, 500)
    assert "nodeSelectr" in reply.message
