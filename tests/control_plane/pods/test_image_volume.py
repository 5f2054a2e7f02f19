"""Which image an oci:// model is: pinned, reported by kubelets, or honestly unknown."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.kube.kinds import POD
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.model_source import image_revision
from tests.support.operator_rig import Kit, resource
from tests.support.served_resource import add_pod, served

ONE, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
URI = "oci://registry.example/models/tiny:v1"


def pod(*refs: str) -> Obj:
    """As a kubelet with ImageVolumeWithDigest reports."""
    mounts: list[Any] = [{"name": "config", "mountPath": "/etc/foveal/config"}]
    mounts += [{"name": "model", "volumeStatus": {"image": {"imageRef": ref}}} for ref in refs]
    return {"status": {"containerStatuses": [{"name": "engine", "volumeMounts": mounts}]}}


def test_only_images_have_a_digest() -> None:
    assert image_revision("hf://org/model", [pod(ONE)]) == ("", "")


def test_a_pinned_image_needs_no_report() -> None:
    assert image_revision(f"{URI}@{ONE}", []) == (ONE, "")


@pytest.mark.parametrize("ref", [ONE, f"registry.example/models/tiny@{ONE}"])
def test_what_kubelets_report(ref: str) -> None:
    assert image_revision(URI, [pod(ref), pod(ref), pod(), {"status": {}}]) == (ONE, "")


def test_a_tag_that_moved_between_two_pods_is_told() -> None:
    digest, text = image_revision(URI, [pod(ONE), pod(OTHER)])
    assert digest == ""
    assert ONE in text
    assert OTHER in text
    assert f"Pin one: {URI}@" in text


def test_what_nobody_reports_is_not_known() -> None:
    digest, text = image_revision(URI, [pod(), {}])
    assert digest == ""
    assert "ImageVolumeWithDigest" in text
    assert f"{URI}@sha256:" in text


async def test_the_status_tells_the_digest_once_a_kubelet_does() -> None:
    kit = Kit()
    await served(kit, resource(model={"uri": URI}))
    assert kit.status()["model"].get("resolvedRevision", "") == ""
    (said,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "ModelReady"]
    assert said.startswith("the model is in place; no node reports which digest")
    name = add_pod(kit.cluster, "engine")["metadata"]["name"]
    kit.cluster.edit(POD, "default", name, lambda body: body["status"].update(pod(ONE)["status"]))
    await kit.settle()
    assert kit.status()["model"]["resolvedRevision"] == ONE
    (said,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "ModelReady"]
    assert said == "the model is in place"
