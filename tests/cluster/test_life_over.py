"""A resource's end: what it owned goes with it. Runs after the other tests of its life."""

from __future__ import annotations

import pytest

from tests.support.node import commands
from tests.support.node.volumes import forget_claim

pytestmark = pytest.mark.cluster


def test_at_the_end_only_the_claim_is_left(tiny: str) -> None:
    commands.kubectl("delete", "mmi", "tiny", "--wait", "--timeout=60s")
    forget_claim("values")
    kinds = (
        "deployments,statefulsets,services,configmaps,secrets,jobs,pods,serviceaccounts,"
        "networkpolicies,poddisruptionbudgets,persistentvolumeclaims,endpointslices"
    )
    own = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default"),
           ("Service", "kubernetes"), ("EndpointSlice", "kubernetes")}  # fmt: skip

    def left() -> set[tuple[str, str]]:
        items = commands.get(kinds)["items"]
        return {(item["kind"], item["metadata"]["name"]) for item in items} - own

    commands.until(
        "all but the claim is gone", lambda: left() == {("PersistentVolumeClaim", "models")}, 120
    )
