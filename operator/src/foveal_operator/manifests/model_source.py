"""Location of the model's files: the volume that pods mount, the path in it, the claim for fetched
ones, and which image it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from foveal_operator.api.model import DEFAULT_SIZE, ModelCache
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context
from foveal_runtime.plan.quantity import parse

MODELS_DIRECTORY = "/models"
VOLUME = "model"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """`claim` is empty for an OCI image; `fetched` models are downloaded by a Job first."""

    path: str
    claim: str = ""
    image: str = ""
    fetched: bool = False
    owns_claim: bool = False

    def volume(self) -> Obj:
        if self.image:
            return {
                "name": VOLUME,
                "image": {"reference": self.image, "pullPolicy": "IfNotPresent"},
            }
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": self.claim}}

    def mount(self, *, read_only: bool = True) -> Obj:
        return {"name": VOLUME, "mountPath": MODELS_DIRECTORY, "readOnly": read_only}


def model_source(context: Context) -> ModelSource:
    """The volume and path that the resource's uri and cache stand for."""
    model = context.inference.spec.model
    scheme, rest = model.uri.split("://", 1)
    if scheme == "oci":
        return ModelSource(path=MODELS_DIRECTORY, image=rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        return ModelSource(path=f"{MODELS_DIRECTORY}/{path}".rstrip("/"), claim=claim)
    given = model.cache.claim_name if model.cache else None
    return ModelSource(
        path=f"{MODELS_DIRECTORY}/{_folder(scheme, rest, model.revision)}",
        claim=given or context.child("model"),
        fetched=True,
        owns_claim=given is None,
    )


def _folder(scheme: str, rest: str, revision: str | None) -> str:
    """One folder for each source and revision, so that a claim can hold several models."""
    parts = [scheme, rest.strip("/"), revision or ("main" if scheme == "hf" else "")]
    text = "--".join(part for part in parts if part)
    return re.sub(r"[^A-Za-z0-9._-]+", "--", text)


NOT_OF_ARGO_CD = {
    "argocd.argoproj.io/compare-options": "IgnoreExtraneous",
    "argocd.argoproj.io/sync-options": "Prune=false",
}
"""An application that tracks by label takes the label `instance` for its own. Other objects have an
owner, which keeps them from being pruned."""


def model_claim(context: Context) -> Obj:
    """For fetched weights. It carries no owner: deleting the resource keeps them."""
    cache = context.inference.spec.model.cache or ModelCache()
    spec: Obj = {
        "accessModes": [cache.access_mode or "ReadWriteMany"],
        "resources": {"requests": {"storage": cache.size or DEFAULT_SIZE}},
    }
    if cache.storage_class_name:
        spec["storageClassName"] = cache.storage_class_name
    metadata = context.metadata("model", "model", owned=False)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {**metadata, "annotations": dict(NOT_OF_ARGO_CD)},
        "spec": spec,
    }


def as_it_can_be(wanted: Obj, live: Obj) -> Obj:
    """The claim that is wanted, given the one that is there: a claim only grows, its administrator
    may have expanded it, and its class and access modes stay as it was made with them."""
    there = live.get("spec", {})
    kept = {key: there[key] for key in ("accessModes", "storageClassName") if key in there}
    sizes = [
        spec["resources"]["requests"]["storage"]
        for spec in (wanted["spec"], there)
        if "storage" in spec.get("resources", {}).get("requests", {})
    ]
    requests = {"storage": max(sizes, key=parse)}
    return {**wanted, "spec": {**wanted["spec"], **kept, "resources": {"requests": requests}}}


def kept_text(wanted: Obj, live: Obj) -> str:
    """What of a claim that is there differs from what is wanted and cannot change; "" = nothing."""
    asked, there = wanted["spec"], live.get("spec", {})
    found = []
    modes, live_modes = asked["accessModes"], there.get("accessModes", asked["accessModes"])
    if modes != live_modes:
        found.append(f"accessMode {', '.join(live_modes)} (model.cache asks for {modes[0]})")
    name = asked.get("storageClassName")
    if name and name != there.get("storageClassName"):
        has = f"storageClassName {there.get('storageClassName') or 'unset'}"
        found.append(f"{has} (model.cache asks for {name})")
    return " and ".join(found)


MAX_CHARACTERS = 253


def image_revision(uri: str, pods: Iterable[Obj]) -> tuple[str, str]:
    """(digest, what is to be said of it). ("", "") for a model that is no image."""
    if not uri.startswith("oci://"):
        return "", ""
    image, _, pinned = uri.removeprefix("oci://").partition("@")
    if pinned:
        return pinned[:MAX_CHARACTERS], ""
    reported = _reported(pods)
    if len(reported) == 1:
        return reported[0], ""
    if reported:
        text = f"pods have different images under {image}: {', '.join(reported)}"
        return "", f"{text}. Pin one: oci://{image}@{reported[-1]}"
    return "", (
        f"no node reports which digest {image} is (kubelets do with the feature gate "
        f"ImageVolumeWithDigest); pinned as oci://{image}@sha256:... it is known"
    )


def _reported(pods: Iterable[Obj]) -> list[str]:
    found = {
        mount.get("volumeStatus", {}).get("image", {}).get("imageRef", "")
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses") or ()
        for mount in container.get("volumeMounts") or ()
        if mount.get("name") == VOLUME
    }
    return sorted(ref.rpartition("@")[2][:MAX_CHARACTERS] for ref in found if ref)
