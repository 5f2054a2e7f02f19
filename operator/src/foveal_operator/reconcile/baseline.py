"""Baseline of a resource: the facts it was first planned with, kept in a ConfigMap beside it. Pure.

The runtime image and the node facts of the day the pods were first asked for stay the basis of all
later plans: neither a new operator nor a bigger node restarts anything. Used by the reconciler.
Deleting the ConfigMap, another kind of accelerator, or a spec that no longer fits the basis adopts
what is true today.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from foveal_operator.api.workloads import Accelerator, Engine
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.manifests.context import Context, content_hash

_KEY = "basis.json"
CHOOSES_NODES = ("nodeSelector", "affinity", "tolerations")


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """Input of every plan of one resource.

    Attributes:
        accelerator: what the node facts are about; "" in a basis written before it was kept.
        placement: hash of what chooses the nodes that they are about, "" where nothing does; unset
            in a basis written before it was kept.
        without_snapshots: image that refuses a budget for snapshots of recurrent state, "" for
            none; unset in a basis written before it was kept, whose image refuses it.
    """

    runtime_image: str
    accelerator: str = ""
    node_bytes: int = 0
    device_bytes: int = 0
    largest_device_bytes: int = 0
    without_snapshots: str | msgspec.UnsetType = msgspec.UNSET
    placement: str | msgspec.UnsetType = msgspec.UNSET
    # Which set of CURVE keys the pods share; another one replaces them all. "" is the first.
    key_generation: str | msgspec.UnsetType = msgspec.UNSET

    def is_about(self, engine: Engine) -> bool:
        """Facts about one kind of device, or about some nodes, say nothing of others."""
        return self.accelerator in ("", accelerator_name(engine.accelerator)) and (
            self.placement in (msgspec.UNSET, placement_of(engine))
        )

    def refusing_snapshots(self, image: str) -> str:
        """What to record of a resource whose pods have this image."""
        found = self.without_snapshots
        return image if isinstance(found, msgspec.UnsetType) else found

    def nodes(self, image: str) -> NodeFacts:
        return NodeFacts(
            node_bytes=self.node_bytes,
            device_bytes=self.device_bytes,
            largest_device_bytes=self.largest_device_bytes,
            takes_snapshots=self.refusing_snapshots(image) != image,
        )


def accelerator_name(accelerator: Accelerator) -> str:
    """Whose memory the node facts tell: CPU, a device class, or an extended resource."""
    return accelerator.extended_resource or accelerator.device_class_name or "CPU"


def placement_of(engine: Engine) -> str:
    """What of the podTemplate chooses nodes, as a hash; "" where nothing does."""
    overlay = (engine.pod_template or {}).get("spec")
    spec = overlay if isinstance(overlay, dict) else {}
    found = {key: spec[key] for key in CHOOSES_NODES if key in spec}
    return content_hash(found) if found else ""


def basis_name(name: str) -> str:
    return f"{name}-basis"


def read_basis(config_map: Mapping[str, Any] | None) -> Basis | None:
    """None when there is none, or somebody has spoilt it: it is then made anew."""
    text = (config_map or {}).get("data", {}).get(_KEY, "")
    try:
        return msgspec.json.decode(text, type=Basis) if text else None
    except msgspec.DecodeError:
        return None


def basis_config_map(context: Context, basis: Basis) -> Obj:
    text = msgspec.json.format(msgspec.json.encode(basis), indent=2).decode() + "\n"
    return context.object("v1", "ConfigMap", "basis", "model", data={_KEY: text})
