"""Permissions of the operator: verbs for each kind, and the roles that follow.

The chart's roles are generated from `rules()`; the table is derived from kinds.py, so a kind that
the code starts to write is in the role with the next `make generate`. Never `*`, no reading of
Secrets, no exec. Pure data; nothing here talks to a cluster.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from foveal_operator.kube.kinds import (
    CLAIM,
    DEVICE_CLASS,
    ENDPOINT_SLICE,
    EVENT,
    INFERENCE,
    KINDS,
    LEASE,
    NODE,
    POD,
    RESOURCE_SLICE,
    SECRET,
    SERVICE,
    Kind,
)

Scope = Literal["resources", "nodes", "lease"]
"""Which role: of the namespaces that are watched, of the cluster's nodes, of the operator's own
namespace (its Lease)."""

# Caches answer all other questions.
_FOLLOW = ("list", "watch")
# Whatever is deleted is read first, live.
_DELETE = ("get", "delete")
# Server-side apply is `patch`, and `create` where the object does not exist yet.
_APPLY = ("create", "patch")


class AccessRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of a role. `own_name`: only the object that has the operator's own name."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    own_name: bool = False


_SPECIAL: dict[str, tuple[str, ...]] = {
    ENDPOINT_SLICE.name: _FOLLOW,  # the cluster's own controller writes them
    INFERENCE.name: _FOLLOW,  # its spec, labels and annotations are the user's
    POD.name: (*_FOLLOW, *_DELETE),  # a rollout picks the pod that restarts
    CLAIM.name: (*_FOLLOW, *_APPLY, "get"),  # the user's own claims are looked at
    SERVICE.name: (*_FOLLOW, *_APPLY, "update"),  # foreign ports only a replacement drops
    SECRET.name: ("create",),  # key material is made once and never read back
    EVENT.name: (*_APPLY, "list"),  # what the kubelet says of pods that wait for a volume
}
_CLUSTERS = (NODE, RESOURCE_SLICE, DEVICE_CLASS)
_ELSEWHERE = {LEASE.name, *(kind.name for kind in _CLUSTERS)}


def verbs(kind: Kind) -> tuple[str, ...]:
    """Of a kind within watched namespaces."""
    if kind.name in _SPECIAL:
        return _SPECIAL[kind.name]
    found = (*_FOLLOW, *_APPLY) if kind.watched else _APPLY
    return (*found, *_DELETE) if kind.pruned else found


def rules(scope: Scope) -> tuple[AccessRule, ...]:
    if scope == "nodes":
        return tuple(
            AccessRule(group=kind.group, resources=(kind.plural,), verbs=("list",))
            for kind in _CLUSTERS
        )
    if scope == "lease":
        return (
            AccessRule(group=LEASE.group, resources=(LEASE.plural,), verbs=("create",)),
            AccessRule(
                group=LEASE.group,
                resources=(LEASE.plural,),
                verbs=("get", "update"),
                own_name=True,
            ),
        )
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for kind in KINDS:
        if kind.name not in _ELSEWHERE:
            grouped.setdefault((kind.group, tuple(sorted(verbs(kind)))), []).append(kind.plural)
    found = [
        AccessRule(group=group, resources=tuple(sorted(plurals)), verbs=allowed)
        for (group, allowed), plurals in grouped.items()
    ]
    plural = INFERENCE.plural
    found += [
        AccessRule(group=INFERENCE.group, resources=(f"{plural}/status",), verbs=("patch",)),
        # Owner references with blockOwnerDeletion need it where the cluster enforces them.
        AccessRule(group=INFERENCE.group, resources=(f"{plural}/finalizers",), verbs=("update",)),
    ]
    return tuple(sorted(found, key=lambda rule: (rule.group, rule.resources)))
