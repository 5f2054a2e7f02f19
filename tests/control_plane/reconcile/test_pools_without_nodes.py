"""A pod that waits for a node which is not there yet: who says so, and what it means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foveal_operator.api.workloads import Engine
from foveal_operator.kube.kinds import NODE
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.pods.scheduling import awaiting_nodes, has_no_node
from foveal_operator.reconcile.inventory import Inventory
from foveal_operator.rollout import RolloutView, decide
from foveal_operator.rollout.record import Good, Record, record_body
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime
from tests.support.nodes import (
    FULL,
    GPU,
    NO_SELECTOR,
    STARTS,
    STARTS_UNNAMED,
    control_plane,
    node,
    pod,
    unschedulable,
)
from tests.support.operator_rig import Kit, resource
from tests.support.served_resource import add_pod, finish_profile, served
from tests.support.sim_cluster import DEADLINE_SECONDS, START, Wish, desired_of


async def test_a_node_that_came_since_the_last_list_is_there() -> None:
    """Nodes are listed every half hour: a full pool was called one without nodes until then."""
    cluster, time = FakeCluster(), FakeTime()
    cluster.add(node("cpu"))
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    waiting = unschedulable(pod("e", 1), "0/2 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert await inventory.awaiting(Engine(), [waiting], []) == {"e"}
    cluster.add(node("new", 4))
    await time.pass_(16)
    assert await inventory.awaiting(Engine(), [waiting], []) == set()


async def test_a_node_that_has_gone_since_the_last_list_is_there_no_more() -> None:
    cluster, time = FakeCluster(), FakeTime()
    cluster.add(control_plane())
    cluster.add(node("gpu", 4))
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    cluster.remove(NODE, "", "gpu")
    await time.pass_(16)
    waiting = unschedulable(pod("e", 1), STARTS_UNNAMED)
    assert await inventory.awaiting(Engine(), [waiting], []) == {"e"}


async def test_budgets_that_lack_a_device_fit_a_minute_after_it_has_come() -> None:
    """Only the next full look found it, up to eleven minutes later; meanwhile the resource was
    Stalled, for which tools give up on it."""
    kit = Kit()
    kit.cluster.add(node("cpu"))
    await kit.start()
    kit.cluster.add(resource(engine={}))
    await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    assert kit.condition("BudgetFits") == ("False", "BudgetMisfit")
    before = len(kit.cluster.calls)
    for _ in range(100):
        kit.time.now += 3
        await kit.settle()
    lists = [kind for verb, kind, _ in kit.cluster.calls[before:] if verb == "LIST"]
    assert lists.count("Node") == 5, "once a minute"
    kit.cluster.add(node("gpu", 1, mib=81_920))
    kit.time.now += 61
    await kit.settle()
    assert kit.condition("BudgetFits") == ("True", "Fits")


@pytest.mark.parametrize(
    ("text", "none"),
    [
        (NO_SELECTOR, True),
        ("no nodes available to schedule pods", True),
        (FULL, False),
        (STARTS, False),
        ("0/2 nodes are available: 2 Insufficient memory.", False),
        ("", False),
    ],
)
def test_the_scheduler_says_whether_any_node_is_meant_for_a_pod(text: str, none: bool) -> None:
    assert has_no_node(text) is none


def test_a_device_that_no_node_has_is_waited_for_and_a_full_one_is_not() -> None:
    waiting = unschedulable(pod("a", 1), "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert awaiting_nodes([waiting], [node("cpu")], {GPU: 1}) == {"a"}
    assert awaiting_nodes([waiting], [node("gpu", 4)], {GPU: 1}) == frozenset()
    assert awaiting_nodes([waiting], [], {GPU: 1}) == frozenset(), "nodes are not known"
    assert awaiting_nodes([pod("a", 1)], [node("cpu")], {GPU: 1}) == frozenset()


def rollout_view(now: float, conditions: list[Obj], awaiting: frozenset[str]) -> RolloutView:
    inference, found = desired_of(Wish(engines=1, frontends=1))
    (engines,), (frontends,) = found.of_kind("StatefulSet"), found.of_kind("Deployment")
    labels = engines["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": "qwen-engine-0", "uid": "1", "labels": labels}
    metadata["creationTimestamp"] = "2023-11-14T22:13:20Z"  # START
    engine = {"metadata": metadata, "status": {"phase": "Pending", "conditions": conditions}}
    return RolloutView(
        inference=inference,
        stateful_set=engines,
        deployment=frontends,
        live_stateful_set=engines,
        live_deployment=frontends,
        engine_pods=(engine,),
        awaiting=awaiting,
        now=now,
    )


def after(view: RolloutView, now: float, conditions: list[Obj], awaiting: frozenset[str]) -> Any:
    """The next decision, on the record of the one before."""
    record = decide(view).record
    later = rollout_view(now, conditions, awaiting)
    return decide(msgspec.structs.replace(later, record=record))


def test_the_deadline_waits_for_a_node_and_begins_with_it() -> None:
    """A rollout into a pool that was scaled to zero failed while its nodes were being made."""
    none = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x"}]
    begun = rollout_view(START, none, frozenset())
    late = START + 3 * DEADLINE_SECONDS
    assert after(begun, late, none, frozenset()).deadline_exceeded, "nodes are there, and full"
    waits = after(begun, late, none, frozenset({"qwen-engine-0"}))
    assert not waits.deadline_exceeded
    came = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2023-11-14T22:43:20Z"}
    ]
    assert not after(begun, late + 30, came, frozenset()).deadline_exceeded, "it loads now"
    assert after(begun, late + 2 * DEADLINE_SECONDS, came, frozenset()).deadline_exceeded


@pytest.mark.parametrize("auto_rollback", [True, False])
def test_with_a_good_revision_the_deadline_waits_for_no_node(auto_rollback: bool) -> None:
    """A mistyped nodeSelector left the resource between two revisions for ever."""
    none = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x"}]
    waiting = frozenset({"qwen-engine-0"})
    begun = rollout_view(START, none, waiting)
    assert begun.stateful_set is not None
    assert begun.deployment is not None
    old = [
        {**body["spec"]["template"], "metadata": {"labels": {REVISION_LABEL: f"old-{index}"}}}
        for index, body in enumerate((begun.stateful_set, begun.deployment))
    ]
    good = Record(good=Good(revision="old-0/old-1", engine=old[0], frontend=old[1]))
    view = msgspec.structs.replace(begun, record=record_body(good, "qwen", begun.stateful_set))
    spec = view.inference.spec
    rollout = msgspec.structs.replace(spec.rollout, auto_rollback=auto_rollback)
    spec = msgspec.structs.replace(spec, rollout=rollout)
    view = msgspec.structs.replace(
        view, inference=msgspec.structs.replace(view.inference, spec=spec)
    )
    record = decide(view).record
    late = START + 3 * DEADLINE_SECONDS
    found = decide(msgspec.structs.replace(view, record=record, now=late))
    assert (found.deadline_exceeded, found.rolled_back) == (auto_rollback, auto_rollback)


async def test_a_pool_without_nodes_is_told_and_goes_on_by_itself() -> None:
    kit = Kit()
    kit.cluster.add(control_plane())
    await served(kit)
    add_pod(kit.cluster, "frontend")
    engine = add_pod(kit.cluster, "engine", ready=False)
    name = engine["metadata"]["name"]
    status = unschedulable(engine, NO_SELECTOR)["status"]
    edit = kit.cluster.edit
    kinds = {kind.name: kind for kind in kit.watched}
    edit(kinds["Pod"], "default", name, lambda body: body.update(status=status), "scheduler")
    await kit.settle()
    assert kit.condition("EnginesReady") == ("False", "NoNodeYet")
    assert kit.condition("Reconciling") == ("True", "NoNodeYet")
    (said,) = [c["message"] for c in kit.status()["conditions"] if c["type"] == "EnginesReady"]
    assert "Wait for the cluster autoscaler, add such a node" in said
    kit.time.now += 7200
    await kit.resync()
    assert kit.condition("Stalled") == ("", ""), "two hours later it still waits"
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    edit(kinds["Pod"], "default", name, lambda body: body.update(status=ready), "kubelet")
    await kit.settle()
    assert kit.condition("Ready") == ("True", "Ready")
