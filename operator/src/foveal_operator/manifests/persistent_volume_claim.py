"""The claim for fetched weights. It carries no owner: deleting the resource keeps the weights."""

from __future__ import annotations

from foveal_operator.api.model import ModelCache
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context

DEFAULT_SIZE = "50Gi"


def model_claim(context: Context) -> Obj:
    cache = context.inference.spec.model.cache or ModelCache()
    spec: Obj = {
        "accessModes": [cache.access_mode or "ReadWriteMany"],
        "resources": {"requests": {"storage": cache.size or DEFAULT_SIZE}},
    }
    if cache.storage_class_name:
        spec["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": context.metadata("model", "model", owned=False),
        "spec": spec,
    }
