"""Ownership of an object in the cluster: this resource's, another's, or on its way out. Pure.

Used by apply.py before the first write of an object and before every delete. An object is this
resource's when its controller is this very resource, by uid. The claim for fetched weights has no
owner, so that it outlives the resource: labels name the resource, and the API server's own record
of field managers says that the operator made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from foveal_operator.api import reasons
from foveal_operator.api.crd import GROUP, KIND
from foveal_operator.kube.errors import Transient, UserError
from foveal_operator.kube.kinds import FIELD_MANAGER, INSTANCE, MANAGED_BY
from foveal_operator.kube.types import Obj

ADOPT = f"{GROUP}/adopt"
"""Annotation by which its owner hands an object over to the resource that it names."""
NO_SECRET = "No Secret can be handed over: remove it, or rename the resource."
LEAVING_SECONDS = 1.0
Standing = Literal["Ours", "Leaving", "Offered", "Foreign"]
"""Ours: write it. Leaving: it is being deleted, or its owner is gone and the garbage collector is
about to delete it. Offered: handed over by annotation. Foreign: never write or delete it."""


class NameTaken(UserError):
    """An object of the name that the operator needs belongs to another client."""

    def __init__(self, live: Obj) -> None:
        metadata = live["metadata"]
        self.reason = reasons.NAME_TAKEN
        if live["kind"] == "Secret":
            self.reason = msgspec.structs.replace(self.reason, action=NO_SECRET)
        super().__init__(
            f"{live['kind']} {metadata.get('namespace', '')}/{metadata['name']} {_holder(live)}, "
            "not to this resource. It is left as it is"
        )


class StillLeaving(Transient):
    """An object of the name that the operator needs is on its way out: wait for it."""

    def __init__(self, live: Obj, why: str = "is being deleted") -> None:
        metadata = live["metadata"]
        text = (
            f"{live['kind']} {metadata.get('namespace', '')}/{metadata['name']} "
            f"{_holder(live)} and {why}; waiting until it is gone"
        )
        super().__init__(text, 409, LEAVING_SECONDS)


def standing(live: Obj, name: str, uid: str, *, is_retained: bool = False) -> Standing:
    """Whose a live object is.

    Args:
        name, uid: of the resource that asks.
        is_retained: the object carries no owner on purpose; `live` must then hold managedFields.
    """
    metadata = live["metadata"]
    owner = controller_of(live)
    if owner.get("uid") == uid or (is_retained and not owner and _is_kept(metadata, name)):
        return "Ours"
    # Two resources of one name never live at the same time: another uid is an earlier one's.
    is_namesakes = owner.get("kind") == KIND and owner.get("name") == name
    is_namesakes &= str(owner.get("apiVersion", "")).partition("/")[0] == GROUP
    if is_namesakes or metadata.get("deletionTimestamp"):
        return "Leaving"
    is_offered = (metadata.get("annotations") or {}).get(ADOPT) == name
    return "Offered" if is_offered and not owner else "Foreign"


def controller_of(live: Obj) -> Mapping[str, Any]:
    """The owner reference of the controller; {} without one."""
    for reference in live["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Mapping[str, Any] = reference
            return found
    return {}


def is_controlled_by(live: Obj, uid: str) -> bool:
    """Whether the controller has this uid; never for an empty one."""
    return bool(uid) and controller_of(live).get("uid") == uid


def _is_kept(metadata: Mapping[str, Any], name: str) -> bool:
    labels = metadata.get("labels") or {}
    managers = {entry.get("manager") for entry in metadata.get("managedFields") or ()}
    return (
        labels.get(MANAGED_BY) == FIELD_MANAGER
        and labels.get(INSTANCE) == name
        and FIELD_MANAGER in managers
    )


def _holder(live: Obj) -> str:
    """To whom it belongs, as far as it tells."""
    metadata = live["metadata"]
    owner = controller_of(live)
    if owner:
        return f"belongs to {owner.get('kind')} {owner.get('name')}"
    manager = (metadata.get("labels") or {}).get(MANAGED_BY)
    if manager and manager != FIELD_MANAGER:
        return f"belongs to {manager} (label {MANAGED_BY})"
    made = [str(entry.get("manager")) for entry in metadata.get("managedFields") or ()]
    return f"belongs to {made[0]} (its field manager)" if made else "belongs to another client"
