"""Whose a live object is: every fact of it alone decides between writing it and leaving it."""

from __future__ import annotations

import pytest

from foveal_operator.api.crd import GROUP, KIND
from foveal_operator.kube.kinds import FIELD_MANAGER, INSTANCE, MANAGED_BY
from foveal_operator.kube.types import Obj
from foveal_operator.reconcile.apply import ADOPT, Owner, is_controlled_by, standing

TINY = Owner("tiny", "uid-of-tiny")
LABELS = {MANAGED_BY: FIELD_MANAGER, INSTANCE: "tiny"}
MADE = [{"manager": "kubectl"}, {"manager": FIELD_MANAGER}]
KEPT = {"labels": LABELS, "managedFields": MADE}
OFFERED = {"annotations": {ADOPT: "tiny"}}


def owned(**changes: object) -> Obj:
    """Metadata with a controller: an earlier resource of the same name, but for what changes."""
    reference = {"apiVersion": f"{GROUP}/v1alpha1", "kind": KIND, "name": "tiny"}
    reference |= {"uid": "uid-of-another", "controller": True, **changes}  # type: ignore[dict-item]
    return {"ownerReferences": [reference]}


FOREIGN_OWNER = owned(apiVersion="apps/v1", kind="Deployment")


@pytest.mark.parametrize(
    ("metadata", "is_retained", "expected"),
    [
        (owned(uid=TINY.uid), False, "Ours"),
        (owned(uid=TINY.uid, controller=False), False, "Foreign"),
        (owned(), False, "Leaving"),
        (owned(kind="Job"), False, "Foreign"),
        (owned(name="other"), False, "Foreign"),
        (owned(apiVersion="example.org/v1"), False, "Foreign"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False, "Leaving"),
        ({}, False, "Foreign"),
        (OFFERED, False, "Offered"),
        ({"annotations": {ADOPT: "other"}}, False, "Foreign"),
        ({**OFFERED, **FOREIGN_OWNER}, False, "Foreign"),
        (KEPT, True, "Ours"),
        (KEPT, False, "Foreign"),
        ({**KEPT, **FOREIGN_OWNER}, True, "Foreign"),
        ({**KEPT, "labels": None}, True, "Foreign"),
        ({**KEPT, "labels": {**LABELS, INSTANCE: "other"}}, True, "Foreign"),
        ({**KEPT, "labels": {**LABELS, MANAGED_BY: "Helm"}}, True, "Foreign"),
        ({**KEPT, "managedFields": MADE[:1]}, True, "Foreign"),
        ({**KEPT, "managedFields": None}, True, "Foreign"),
    ],
)
def test_each_fact_decides(metadata: Obj, is_retained: bool, expected: str) -> None:
    assert standing({"metadata": metadata}, TINY, is_retained=is_retained) == expected


def test_nothing_is_controlled_by_nobody() -> None:
    """A resource that is not known yet has no uid, nor has an object without a controller."""
    assert is_controlled_by({"metadata": owned(uid=TINY.uid)}, TINY.uid)
    assert not is_controlled_by({"metadata": owned()}, TINY.uid)
    assert not is_controlled_by({"metadata": owned(uid="")}, "")
