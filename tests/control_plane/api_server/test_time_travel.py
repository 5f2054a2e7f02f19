"""A replica takes over while what it reads is of yesterday (G4): no pod is deleted or restarted.

A lagging API server is played by the proxy's `stale_reads`: the new leader's lists and gets are
answered as they were before an image was changed, and its watches tell nothing. So each of its live
reads before a deletion is wrong too; what is left are the preconditions.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.control_plane.api_server.test_leaders import (
    does,
    holder,
    is_led,
    live_on,
    two_replicas,
)
from tests.support.api_server import faults
from tests.support.api_server.calls import Call
from tests.support.api_server.nursery import Nursery
from tests.support.api_server.programs import wait_until
from tests.support.api_server.scenarios import STEPS, is_over
from tests.support.api_server.world import World

CREATE, SCALE, IMAGE = STEPS[:3]
RESOURCE = "multimodalinferences"


class Past:
    """What one client was told by each list, to be told again: `of` is a snapshot function."""

    def __init__(self, world: World, client: str) -> None:
        self._lists: dict[tuple[str, ...], dict[str, Any]] = {}
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        for call in list(world.proxy.calls):
            if call.client == client and call.verb == "list" and not call.query.get("continue"):
                self._remember(world, call)

    def _remember(self, world: World, call: Call) -> None:
        target, selector = call.target, call.query.get("labelSelector", "")
        key = (target.resource, target.namespace, selector)
        if key in self._lists:
            return
        root = f"/apis/{target.group}" if target.group else "/api"
        versions = world.api.request("GET", root).must()
        version = versions["preferredVersion"]["version"] if target.group else "v1"
        place = f"namespaces/{target.namespace}/" if target.namespace else ""
        query = {"labelSelector": selector} if selector else {}
        path = f"{root}/{version}/{place}{target.resource}"
        body = world.api.request("GET", path, **query).must()
        self._lists[key] = body
        for item in body["items"] or ():
            self._objects[target.resource, item["metadata"]["name"]] = item

    def of(self, call: Call) -> dict[str, Any] | None:
        target = call.target
        if call.verb == "get":
            return self._objects.get((target.resource, target.name))
        selector = call.query.get("labelSelector", "")
        return self._lists.get((target.resource, target.namespace, selector))


def pods(world: World) -> dict[str, str]:
    """uid by name. Not those of Jobs: a profile that is not seen is made again."""
    found = [*world.nodes.pods("engine"), *world.nodes.pods("frontend")]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in found}


def templates(world: World) -> dict[str, int]:
    """Generations of the workloads."""
    found = {}
    for kind, name in (("StatefulSet", "qwen-engine"), ("Deployment", "qwen-frontend")):
        body = world.api.get(kind, world.namespace, name)
        assert body is not None
        found[kind] = int(body["metadata"]["generation"])
    return found


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize("sees_the_resource", [True, False], ids=["children", "until-it-leads"])
def test_a_stale_view_at_a_change_of_leader_costs_no_pod(
    world: World, nursery: Nursery, sees_the_resource: bool
) -> None:
    """`children`: of all but the resource itself the past is told, and told for good.
    `until-it-leads`: of everything, as long as the replica waits; its lists afterwards are true
    (the API server's lists without a resourceVersion are: they ask a quorum)."""
    two_replicas(world, nursery)
    does(world, CREATE)
    wait_until("one leads", lambda: live_on(world) and is_led(world), 60.0)
    first = holder(world)
    second = "b" if first == "a" else "a"
    leader, standby = (next(o for o in world.operators if o.name == n) for n in (first, second))
    standby.wait_ready()
    past = Past(world, second)
    assert past.of(_list_of(world, second, "pods")), "nothing was recorded"

    def is_stale(call: Call) -> bool:
        if call.client != second or call.is_lease or call.verb not in ("get", "list"):
            return False
        if sees_the_resource:
            return call.target.resource != RESOURCE
        return world.proxy.audit.holder != second

    def is_told(call: Call, event: dict[str, Any]) -> bool:
        resource = call.target.resource
        return call.client == second and not (sees_the_resource and resource == RESOURCE)

    world.proxy.faults.append(faults.stale_reads(is_stale, past.of))
    world.proxy.event_faults.append(faults.drop_events(is_told, times=None))
    for step in (SCALE, IMAGE):
        does(world, step)
    before, generations, children = pods(world), templates(world), world.children()
    leader.kill()
    wait_until("the other leads", lambda: holder(world) == second, 60.0)
    num_writes = len(world.proxy.writes)
    _looks_around(world, second)
    assert pods(world) == before
    assert templates(world) == generations
    deleted = [
        str(call)
        for call, status in world.proxy.writes[num_writes:]
        if call.verb == "delete" and status < 300
    ]
    assert not deleted
    world.proxy.clear()
    wait_until(
        "all is as before",
        lambda: (
            live_on(world, but=first) and is_over(world, IMAGE) and world.children() == children
        ),
        60.0,
    )
    assert pods(world) == before
    # What it repeated, it could not see.
    kept = [text for text in world.proxy.audit.violations if "repeats a write" not in text]
    world.proxy.audit.violations[:] = kept


def _list_of(world: World, client: str, resource: str) -> Call:
    return next(
        call
        for call in world.proxy.calls
        if (call.client, call.verb, call.target.resource) == (client, "list", resource)
    )


def _looks_around(world: World, client: str) -> None:
    """Until it has listed everything twice since it leads."""

    def num_lists() -> int:
        return sum(
            call.client == client and call.verb == "list" and call.target.resource == "pods"
            for call in list(world.proxy.calls)
        )

    before = num_lists()
    wait_until("it has looked twice", lambda: num_lists() >= before + 2, 60.0)
    world.settled()
