"""A replica takes over while what it reads is of yesterday (G4): no pod is deleted or restarted.

A lagging API server is played by the proxy's `stale_reads`: the new leader's lists and gets are
answered as they were before an image was changed, and its watches tell nothing. So each of its live
reads before a deletion is wrong too; what is left are the preconditions.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_server import faults
from tests.support.api_server.calls import Call
from tests.support.api_server.fork_server import ForkServer
from tests.support.api_server.programs import wait_until
from tests.support.api_server.replicas import (
    does,
    holder,
    is_led,
    live_on,
    two_replicas,
)
from tests.support.api_server.sandbox import Sandbox, difference
from tests.support.api_server.scenarios import STEPS, is_over

CREATE, SCALE, IMAGE = STEPS[:3]
RESOURCE = "multimodalinferences"


class Past:
    """What one client was told by each list, to be told again: `of` is a snapshot function."""

    def __init__(self, sandbox: Sandbox, client: str) -> None:
        self._lists: dict[tuple[str, ...], dict[str, Any]] = {}
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        for call in list(sandbox.proxy.calls):
            if call.client == client and call.verb == "list" and not call.query.get("continue"):
                self._remember(sandbox, call)

    def _remember(self, sandbox: Sandbox, call: Call) -> None:
        target, selector = call.target, call.query.get("labelSelector", "")
        key = (target.resource, target.namespace, selector)
        if key in self._lists:
            return
        root = f"/apis/{target.group}" if target.group else "/api"
        versions = sandbox.api.request("GET", root).must()
        version = versions["preferredVersion"]["version"] if target.group else "v1"
        place = f"namespaces/{target.namespace}/" if target.namespace else ""
        query = {"labelSelector": selector} if selector else {}
        path = f"{root}/{version}/{place}{target.resource}"
        body = sandbox.api.request("GET", path, **query).must()
        self._lists[key] = body
        for item in body["items"] or ():
            self._objects[target.resource, item["metadata"]["name"]] = item

    def of(self, call: Call) -> dict[str, Any] | None:
        target = call.target
        if call.verb == "get":
            return self._objects.get((target.resource, target.name))
        selector = call.query.get("labelSelector", "")
        return self._lists.get((target.resource, target.namespace, selector))


def pods(sandbox: Sandbox) -> dict[str, str]:
    """uid by name. Not those of Jobs: a profile that is not seen is made again."""
    found = [*sandbox.nodes.pods("engine"), *sandbox.nodes.pods("frontend")]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in found}


def templates(sandbox: Sandbox) -> dict[str, int]:
    """Generations of the workloads."""
    found = {}
    for kind, name in (("StatefulSet", "qwen-engine"), ("Deployment", "qwen-frontend")):
        body = sandbox.api.get(kind, sandbox.namespace, name)
        assert body is not None
        found[kind] = int(body["metadata"]["generation"])
    return found


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize("sees_the_resource", [True, False], ids=["children", "until-it-leads"])
def test_a_stale_view_at_a_change_of_leader_costs_no_pod(
    sandbox: Sandbox, fork_server: ForkServer, sees_the_resource: bool
) -> None:
    """`children`: of all but the resource itself the past is told, and told for good.
    `until-it-leads`: of everything, as long as the replica waits; its lists afterwards are true
    (the API server's lists without a resourceVersion are: they ask a quorum)."""
    two_replicas(sandbox, fork_server)
    does(sandbox, CREATE)
    wait_until("one leads", lambda: live_on(sandbox) and is_led(sandbox), 60.0)
    first = holder(sandbox)
    second = "b" if first == "a" else "a"
    leader, standby = (next(o for o in sandbox.operators if o.name == n) for n in (first, second))
    standby.wait_ready()
    past = Past(sandbox, second)
    assert past.of(_list_of(sandbox, second, "pods")), "nothing was recorded"

    def is_stale(call: Call) -> bool:
        if call.client != second or call.is_lease or call.verb not in ("get", "list"):
            return False
        if sees_the_resource:
            return call.target.resource != RESOURCE
        return sandbox.proxy.audit.holder != second

    def is_told(call: Call, event: dict[str, Any]) -> bool:
        resource = call.target.resource
        return call.client == second and not (sees_the_resource and resource == RESOURCE)

    sandbox.proxy.faults.append(faults.stale_reads(is_stale, past.of))
    sandbox.proxy.event_faults.append(faults.drop_events(is_told, times=None))
    for step in (SCALE, IMAGE):
        does(sandbox, step)
    before, generations, children = pods(sandbox), templates(sandbox), sandbox.children()
    leader.kill()
    wait_until("the other leads", lambda: holder(sandbox) == second, 60.0)
    num_writes = len(sandbox.proxy.writes)
    _looks_around(sandbox, second)
    assert pods(sandbox) == before
    assert templates(sandbox) == generations
    deleted = [
        str(call)
        for call, status in sandbox.proxy.writes[num_writes:]
        if call.verb == "delete" and status < 300
    ]
    assert not deleted
    sandbox.proxy.clear()
    wait_until(
        "all is as before",
        lambda: (
            live_on(sandbox, but=first)
            and is_over(sandbox, IMAGE)
            and not difference(sandbox.children(), children)
        ),
        60.0,
    )
    assert pods(sandbox) == before
    # What it repeated, it could not see.
    kept = [text for text in sandbox.proxy.audit.violations if "repeats a write" not in text]
    sandbox.proxy.audit.violations[:] = kept


def _list_of(sandbox: Sandbox, client: str, resource: str) -> Call:
    return next(
        call
        for call in sandbox.proxy.calls
        if (call.client, call.verb, call.target.resource) == (client, "list", resource)
    )


def _looks_around(sandbox: Sandbox, client: str) -> None:
    """Until it has listed everything twice since it leads."""

    def num_lists() -> int:
        return sum(
            call.client == client and call.verb == "list" and call.target.resource == "pods"
            for call in list(sandbox.proxy.calls)
        )

    before = num_lists()
    wait_until("it has looked twice", lambda: num_lists() >= before + 2, 60.0)
    sandbox.settled()
