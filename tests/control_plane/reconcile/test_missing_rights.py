"""An operator whose Role was made by hand, and lacks what it can do without."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from foveal_operator.kube.errors import Forbidden
from foveal_operator.kube.kinds import INFERENCE
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import KEY, OPTIONAL_KINDS, Kit, resource, with_claim
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


class Scoped(FakeCluster):
    """Refuses every list over all namespaces, and in those that are closed."""

    closed: frozenset[str] = frozenset()

    async def list_all(
        self, kind: Any, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        if namespace in self.closed or (namespace is None and kind.namespaced):
            raise Forbidden(f'{kind.plural} is forbidden in the namespace "{namespace}"', 403)
        return await super().list_all(kind, namespace, selector, fields)


def scoped(*closed: str) -> tuple[Scoped, Kit]:
    cluster = Scoped(missing=OPTIONAL_KINDS)
    cluster.closed = frozenset(closed)
    with_claim(cluster)
    return cluster, Kit(cluster, namespaces=("default", "team-b"))


def resource_of_team_b() -> Obj:
    body = resource()
    return {**body, "metadata": {**body["metadata"], "namespace": "team-b"}}


async def test_a_deleted_namespace_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Its RoleBinding goes with it: every list there was refused, every resync failed, and after
    the next restart nothing was reconciled anywhere."""
    cluster, kit = scoped()
    await served(kit, pods=True)
    cluster.add(resource_of_team_b())
    await kit.settle()
    assert ("ServiceAccount", "team-b", "tiny") in cluster.objects
    cluster.remove(INFERENCE, "team-b", "tiny")
    cluster.closed = frozenset({"team-b"})
    with pytest.raises(Forbidden):
        await kit.resync()
    assert kit.watched_namespaces == ("default", "team-b"), "one refusal proves nothing"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await kit.resync()
    said = [r.getMessage() for r in caplog.records if "without namespace team-b" in r.getMessage()]
    assert len(said) == 1, "once"
    assert "rbac.watchNamespaces" in said[0]
    assert kit.watched_namespaces == ("default",), "and no watch is missed there"
    changed = {**resource()["spec"]["frontend"], "replicas": 3}
    cluster.edit(INFERENCE, *KEY, lambda body: body["spec"].update(frontend=changed))
    await kit.settle()
    assert cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 3


async def test_what_was_in_a_namespace_that_is_closed_is_forgotten() -> None:
    cluster, kit = scoped()
    await kit.start()
    cluster.add(resource_of_team_b())
    await kit.settle()
    cluster.closed = frozenset({"team-b"})
    with pytest.raises(Forbidden):
        await kit.resync()
    await kit.resync()
    assert kit.operator.caches.keys(INFERENCE) == []
    writes = len(cluster.writes)
    await kit.resync()
    assert len(cluster.writes) == writes


async def test_an_operator_starts_without_a_namespace_and_finds_it_later() -> None:
    cluster, kit = scoped("team-b")
    with pytest.raises(Forbidden):
        await kit.start()
    await served(kit, pods=True)
    assert kit.operator.watch.is_synced
    assert kit.condition("Ready")[0] == "True"
    cluster.add(resource_of_team_b())
    kit.time.now += 61
    await kit.operator._tick()
    await kit.settle()
    assert ("ServiceAccount", "team-b", "tiny") not in cluster.objects
    cluster.closed = frozenset()
    kit.time.now += 61
    await kit.operator._tick()
    await kit.settle()
    assert kit.watched_namespaces == ("default", "team-b")
    assert ("ServiceAccount", "team-b", "tiny") in cluster.objects


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_that_passes_closes_no_namespace(status: int) -> None:
    """One answer of an API server that was starting closed it for up to a minute."""
    cluster, kit = scoped()
    await kit.start()
    cluster.add(resource_of_team_b())
    await kit.settle()
    for _ in range(4):
        refusal = Forbidden("multimodalinferences is forbidden", status)
        kit.fail(refusal, verb="LIST", kind=INFERENCE.name)
        with pytest.raises(Forbidden):
            await kit.resync()
        if status == 403:
            await kit.resync()
        assert not kit.operator.watch.closed
    await kit.resync()
    assert kit.watched_namespaces == ("default", "team-b")
    assert kit.operator.caches.keys(INFERENCE) == [("team-b", "tiny")]


async def test_without_any_namespace_nothing_is_taken_for_deleted() -> None:
    cluster, kit = scoped()
    await served(kit, pods=True)
    cluster.closed = frozenset({"default", "team-b"})
    with pytest.raises(Forbidden):
        await kit.resync()
    assert kit.operator.caches.keys(INFERENCE) == [KEY]
    assert kit.watched_namespaces == ("default", "team-b")
