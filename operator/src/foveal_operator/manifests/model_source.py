"""Location of the model's files: the volume that pods mount, and the path in it.

Used by the pod builders (volume and path), the claim and the fetch Job.
"""

from __future__ import annotations

import re

import msgspec

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context

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
