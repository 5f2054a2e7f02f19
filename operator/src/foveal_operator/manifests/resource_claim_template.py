"""Dynamic resource allocation: the devices of one engine, claimed from a DeviceClass."""

from __future__ import annotations

from foveal_operator.api.workloads import Accelerator
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context


def resource_claim_template(context: Context, accelerator: Accelerator) -> Obj:
    exactly: Obj = {
        "deviceClassName": accelerator.device_class_name,
        "allocationMode": "ExactCount",
        "count": context.inference.spec.engine.num_devices,
    }
    if accelerator.device_selectors:
        exactly["selectors"] = [
            {"cel": {"expression": expression}} for expression in accelerator.device_selectors
        ]
    requests = [{"name": "devices", "exactly": exactly}]
    return context.object(
        "resource.k8s.io/v1", "ResourceClaimTemplate", "engine-devices", "engine",
        spec={"spec": {"devices": {"requests": requests}}},
    )  # fmt: skip
