"""An operator whose Role was made by hand, and lacks what it can do without."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from foveal_operator.kube.errors import Forbidden
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import OPTIONAL_KINDS, Kit, with_claim
from tests.support.served_resource import served

TEXT = 'endpointslices.discovery.k8s.io is forbidden: User "op" cannot list resource'


class WithoutSlices(FakeCluster):
    """Refuses every list of EndpointSlices, until `may`."""

    may = False

    async def list_all(
        self, kind: Any, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        if kind.name == "EndpointSlice" and not self.may:
            raise Forbidden(TEXT, 403)
        return await super().list_all(kind, namespace, selector, fields)


async def test_without_the_right_to_endpoint_slices_pods_say_what_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waited without end for its first list, and reconciled nothing."""
    cluster = WithoutSlices(missing=OPTIONAL_KINDS)
    with_claim(cluster)
    kit = Kit(cluster)
    with caplog.at_level(logging.WARNING):
        await served(kit, pods=True)
        await kit.resync()
    assert kit.condition("Ready") == ("True", "Ready")
    assert "EndpointSlice" not in {kind.name for kind in kit.watched}
    said = [r.getMessage() for r in caplog.records if "going on without" in r.getMessage()]
    assert len(said) == 1, "once"
    assert "grant get, list and watch on endpointslices of discovery.k8s.io" in said[0]
    cluster.may = True
    await kit.resync()
    assert "EndpointSlice" in {kind.name for kind in kit.watched}, "as soon as it may"


async def test_a_right_that_is_taken_away_is_noticed() -> None:
    cluster = WithoutSlices(missing=OPTIONAL_KINDS)
    cluster.may = True
    with_claim(cluster)
    kit = Kit(cluster)
    await served(kit, pods=True)
    assert "EndpointSlice" in {kind.name for kind in kit.watched}
    cluster.may = False
    await kit.resync()
    await kit.resync()
    assert "EndpointSlice" not in {kind.name for kind in kit.watched}
    assert kit.condition("Ready") == ("True", "Ready")
