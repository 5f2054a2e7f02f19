"""A replica takes over with an old view of the world: nothing is undone, deleted or restarted."""

from __future__ import annotations

import asyncio
import copy

import pytest

from foveal_operator.kube.kinds import INFERENCE, POD
from tests.support.operator_rig import Kit, resource
from tests.support.served_resource import add_pod, served


async def lead(kit: Kit) -> None:
    """The standby has got the lease and works until it rests."""
    await kit.operator._lead()
    for _ in range(400):
        await asyncio.sleep(0)
    await kit.operator.workers.stop(1.0)


@pytest.mark.parametrize("seconds", [60.0, 0.5])
async def test_a_standby_whose_watch_was_silent_undoes_nothing(seconds: float) -> None:
    """Its caches said the spec of a minute ago, and it applied that: frontends rolled back. Then it
    listed anew, but not if it had just done so, before the last leader's last writes."""
    leader = Kit()
    standby = Kit(leader.cluster)
    leader.cluster.watchers = [leader._hear, standby._hear]
    await standby.start()
    await served(leader, pods=True)
    standby.hears = False

    leader.cluster.edit(
        INFERENCE, "default", "tiny",
        lambda body: body["spec"].update(frontend={**body["spec"]["frontend"], "replicas": 2}),
    )  # fmt: skip
    await leader.settle()
    leader.cluster.remove(POD, "default", "tiny-frontend-0")
    for _ in range(2):
        add_pod(leader.cluster, "frontend")
    await leader.settle()
    before = copy.deepcopy(leader.cluster.objects)
    writes = len(leader.cluster.writes)

    standby.time.now += seconds
    await lead(standby)
    assert leader.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 2
    assert leader.cluster.writes[writes:] == []
    assert leader.cluster.objects.keys() == before.keys()


async def test_late_events_never_replace_what_is_newer() -> None:
    """A watch that tells the past (a lagging API server) changes no decision."""
    kit = Kit()
    past: list[tuple[object, str, dict[str, object]]] = []
    kit.cluster.watchers.append(lambda *event: past.append(copy.deepcopy(event)))
    await served(kit, pods=True)
    changed = {**resource()["spec"]["frontend"], "cpu": "2"}
    kit.cluster.edit(
        INFERENCE, "default", "tiny", lambda body: body["spec"].update(frontend=changed)
    )
    await kit.settle()
    writes = len(kit.cluster.writes)
    again = list(past)
    for kind, change, body in again:
        if change != "DELETED":
            kit.operator.watch.on_event(kind, change, copy.deepcopy(body))  # type: ignore[arg-type]
    await kit.settle()
    assert kit.cluster.writes[writes:] == []
    kit.operator.caches.check_integrity()
