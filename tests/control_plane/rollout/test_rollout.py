"""Rollouts over a simulated cluster: what never happens, and where every road ends."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import msgspec
import pytest

from foveal_operator.rollout import RolloutDecision, decide, needs_devices
from foveal_operator.rollout.record import State, begin
from foveal_operator.rollout.steps import OUTAGE
from foveal_operator.rollout.view import template_revision
from foveal_operator.status.report import report
from foveal_operator.status.verdicts import Observed
from tests.support.sim_cluster import (
    DEADLINE_SECONDS,
    QUOTA_EXCEEDED,
    TICK_SECONDS,
    SimCluster,
    SimPod,
    Wish,
    desired_of,
)

DEADLINE_TICKS = int(DEADLINE_SECONDS / TICK_SECONDS)


def revisions(wish: Wish) -> tuple[str, str]:
    objects = desired_of(wish)[1]
    return (
        template_revision(objects.of_kind("StatefulSet")[0]),
        template_revision(objects.of_kind("Deployment")[0]),
    )


def is_settled(cluster: SimCluster, wish: Wish) -> bool:
    """Exactly what `wish` asks for serves."""
    engine, frontend = revisions(wish)
    engines, frontends = cluster.role("engine"), cluster.role("frontend")
    return (
        len(engines) == wish.engines
        and len(frontends) == wish.frontends
        and all(pod.ready and pod.revision == engine for pod in engines)
        and all(pod.ready and pod.revision == frontend for pod in frontends)
    )


def check_always(cluster: SimCluster, decision: RolloutDecision) -> None:
    """What holds at every moment, whatever happens."""
    surge = 1 if decision.strategy.startswith("Surge") else 0
    if decision.stateful_set is not None:
        assert decision.stateful_set["spec"]["replicas"] <= cluster.wish.engines + surge
    if decision.in_progress:
        assert decision.next_check_seconds is not None
    if decision.delete_pods and not surge:
        assert decision.strategy.startswith("FreeFirst"), decision.strategy
    if cluster.random.random() < 0.2:
        check_status(cluster, decision)


def check_status(cluster: SimCluster, decision: RolloutDecision) -> None:
    """A role is never called ready while a replica of its current revision does not serve."""
    _, objects = desired_of(cluster.wish)
    observed = Observed(
        now="2026-01-01T00:00:00Z",
        deployment=cluster.deployment,
        stateful_set=cluster.stateful_set,
        frontend_pods=tuple(pod.raw() for pod in cluster.role("frontend")),
        engine_pods=tuple(pod.raw() for pod in cluster.role("engine")),
        rollout=decision,
    )
    engine, frontend = revisions(cluster.wish)
    status = report(desired_of(cluster.wish)[0], None, None, objects, observed, cluster.generation)
    conditions = {condition.type: condition.status for condition in status.conditions}
    if conditions["EnginesReady"] == "True":
        assert all(
            p.ready and p.revision == engine for p in cluster.role("engine") if p.ends_in is None
        )
    if conditions["FrontendsReady"] == "True":
        mine = [p for p in cluster.role("frontend") if p.revision == frontend and p.ready]
        assert len(mine) >= cluster.wish.frontends


def run(
    cluster: SimCluster,
    wish: Wish,
    *,
    ticks: int = 400,
    floor: int | None = None,
    crashes: float = 0.0,
) -> RolloutDecision:
    """Until `wish` has settled. Serving engines never number less than `floor` on the way."""
    for _ in range(ticks):
        max_writes = cluster.random.randint(0, 3) if cluster.random.random() < crashes else 99
        decision = cluster.reconcile(max_writes)
        check_always(cluster, decision)
        cluster.tick()
        if floor is not None:
            assert len(cluster.serving_engines()) >= floor, cluster.events
            assert any(pod.ready for pod in cluster.role("frontend")) or not floor
        if is_settled(cluster, wish) and not decision.in_progress:
            return cluster.reconcile()
    pytest.fail(f"not settled: {decision.message} {cluster.pods} {cluster.events}")


def started(seed: int, wish: Wish, num_devices: int = 99) -> SimCluster:
    cluster = SimCluster(random.Random(seed), num_devices, wish)
    run(cluster, wish)
    return cluster


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("change", [{"image": "good-2"}, {"engine_note": "other"}])
@pytest.mark.parametrize("engines", [2, 3])
def test_free_first_keeps_all_engines_but_one(
    seed: int, change: dict[str, str], engines: int
) -> None:
    wish = Wish(engines=engines, frontends=1 + seed % 3)
    cluster = started(seed, wish, num_devices=engines)
    after = replace(wish, **change)
    cluster.ask(after)
    decision = run(cluster, after, floor=engines - 1, crashes=0.3)
    assert decision.strategy == "FreeFirst: there is no spare device; at most 1 of the engines " + (
        "is down at a time"
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("change", [{"image": "good-2"}, {"engine_note": "other"}])
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_surge_keeps_all_engines(seed: int, change: dict[str, str], engines: int) -> None:
    wish = Wish(engines=engines, frontends=1 + seed % 3)
    cluster = started(seed, wish, num_devices=engines + 1)
    after = replace(wish, **change)
    cluster.ask(after)
    decision = run(cluster, after, floor=engines, crashes=0.3)
    assert decision.strategy.startswith("Surge: a device is free")


def test_the_outage_of_the_only_engine_is_in_status_before_it_begins() -> None:
    wish = Wish(engines=1, frontends=1)
    cluster = started(1, wish, num_devices=1)
    after = replace(wish, image="good-2")
    cluster.ask(after)
    first = cluster.reconcile(max_writes=2)  # dies before it can write the status
    assert first.strategy.endswith(OUTAGE)
    assert OUTAGE in first.message
    assert not first.delete_pods
    cluster.tick()
    cluster.tick()
    for _ in range(3):
        assert not cluster.reconcile(max_writes=0).delete_pods
        cluster.tick()
    run(cluster, after)
    assert [event.split()[0] for event in cluster.events] == ["delete"]


def test_a_change_of_frontends_touches_no_engine() -> None:
    wish = Wish(engines=2, frontends=3)
    cluster = started(3, wish, num_devices=2)
    before = {pod.name: pod.uid for pod in cluster.role("engine")}
    after = replace(wish, frontend_note="other")
    cluster.ask(after)
    decision = run(cluster, after, floor=2)
    assert {pod.name: pod.uid for pod in cluster.role("engine")} == before
    assert decision.strategy == ""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("devices", [2, 3])
def test_a_bad_image_costs_one_engine_at_most_and_is_rolled_back(seed: int, devices: int) -> None:
    wish = Wish(engines=2, frontends=2)
    cluster = started(seed, wish, num_devices=devices)
    cluster.ask(replace(wish, image="bad-1"))
    rolled_back = 0
    for _ in range(DEADLINE_TICKS + 60):
        max_writes = cluster.random.randint(0, 3) if cluster.random.random() < 0.2 else 99
        decision = cluster.reconcile(max_writes)
        check_always(cluster, decision)
        cluster.tick()
        assert len(cluster.serving_engines()) >= devices - 1
        rolled_back += decision.rolled_back
    assert rolled_back
    assert decision.deadline_exceeded
    assert not decision.in_progress
    assert is_settled(cluster, wish)
    assert "raise rollout.progressDeadlineSeconds (now 600), to try again" in decision.message
    after = replace(wish, image="good-3")
    cluster.ask(after)
    decision = run(cluster, after, floor=1)
    assert not decision.rolled_back
    assert not decision.deadline_exceeded


def test_a_revision_that_was_given_up_is_tried_again_with_more_time() -> None:
    """As its runbook says. Another edit that changes no template does not bring it back."""
    wish = Wish(engines=2)
    cluster = started(3, wish, num_devices=2)
    after = replace(wish, image="bad-1")

    def asked_for(wish: Wish) -> set[str]:
        """Images of the engines that are made while nothing fails."""
        cluster.ask(wish)
        found = set()
        for _ in range(DEADLINE_TICKS + 60):
            decision = cluster.reconcile()
            cluster.tick()
            if not decision.rolled_back:
                found |= {one.template["spec"]["containers"][0]["image"] for one in engines()}
        assert decision.rolled_back
        return found

    def engines() -> list[SimPod]:
        return cluster.role("engine")

    assert "registry.example/bad-1" in asked_for(after)
    assert asked_for(replace(after, frontends=3)) == set()
    assert asked_for(replace(after, deadline=DEADLINE_SECONDS - 60)) == set()
    longer = replace(after, deadline=DEADLINE_SECONDS + 60)
    assert "registry.example/bad-1" in asked_for(longer)
    assert asked_for(replace(longer, frontends=3)) == set()


def test_a_record_of_an_earlier_release_is_tried_again_with_more_time() -> None:
    failed = State(revision="a/b", failed=True)
    kept = begin(failed, "a/b", 2, 100.0, 600.0)
    assert kept.failed, "nothing has been said of its deadline"
    assert begin(kept, "a/b", 3, 100.0, 600.0) == kept
    again = begin(kept, "a/b", 3, 100.0, 601.0)
    assert (again.failed, again.since_seconds) == (False, 100.0)


def test_a_bad_image_stays_where_it_is_without_auto_rollback() -> None:
    wish = Wish(engines=2, auto_rollback=False)
    cluster = started(5, wish, num_devices=2)
    cluster.ask(replace(wish, image="bad-1"))
    for _ in range(DEADLINE_TICKS + 20):
        decision = cluster.reconcile()
        cluster.tick()
    assert decision.deadline_exceeded
    assert not decision.rolled_back
    assert len(cluster.serving_engines()) == 1
    cluster.ask(wish)
    run(cluster, wish, floor=1)


def test_a_first_revision_that_never_comes_up_has_nothing_to_go_back_to() -> None:
    cluster = SimCluster(random.Random(1), 2, Wish(image="bad-1"))
    for _ in range(DEADLINE_TICKS + 5):
        decision = cluster.reconcile()
        check_always(cluster, decision)
        cluster.tick()
    assert decision.deadline_exceeded
    assert not decision.rolled_back
    good = Wish(image="good-2")
    cluster.ask(good)
    run(cluster, good)


def test_deciding_changes_nothing_of_what_it_reads() -> None:
    wish = Wish(engines=2)
    cluster = started(8, wish, num_devices=2)
    cluster.ask(replace(wish, image="good-2"))
    for _ in range(12):
        view = cluster.view()
        before = copy.deepcopy(view)
        assert decide(view) == decide(view)
        assert view == before
        cluster.reconcile()
        cluster.tick()


def test_paused_leaves_every_object_alone() -> None:
    wish = Wish()
    cluster = started(1, wish)
    cluster.ask(replace(wish, image="good-2", paused=True))
    decision = cluster.reconcile()
    assert decision.stateful_set is decision.deployment is decision.record is None
    assert not decision.delete_pods
    assert decision.message.startswith("paused")
    after = replace(wish, image="good-2")
    cluster.now += 10 * DEADLINE_SECONDS
    cluster.ask(after)
    decision = run(cluster, after, floor=1)
    assert not decision.deadline_exceeded


def test_a_pause_in_the_middle_does_not_count_against_the_deadline() -> None:
    wish = Wish(engines=2)
    cluster = started(2, wish, num_devices=2)
    after = replace(wish, image="good-2")
    cluster.ask(after)
    for _ in range(4):
        cluster.reconcile()
        cluster.tick()
    cluster.ask(replace(after, paused=True))
    cluster.now += 10 * DEADLINE_SECONDS
    cluster.reconcile()
    cluster.ask(after)
    assert not run(cluster, after).deadline_exceeded


def test_on_delete_waits_for_the_user() -> None:
    wish = Wish(engines=2, strategy="OnDelete")
    cluster = started(4, wish, num_devices=2)
    after = replace(wish, engine_note="other")
    cluster.ask(after)
    for _ in range(2 * DEADLINE_TICKS):
        decision = cluster.reconcile()
        cluster.tick()
        assert not decision.delete_pods
        assert not decision.deadline_exceeded
    assert "qwen-engine-0, qwen-engine-1" in decision.message
    for name in ("qwen-engine-1", "qwen-engine-0"):
        cluster.pods[name].ends_in = 1
        for _ in range(20):
            cluster.reconcile()
            cluster.tick()
    run(cluster, after)


def test_auto_goes_on_without_the_extra_engine_when_no_node_takes_it() -> None:
    wish = Wish(engines=2)
    cluster = started(6, wish, num_devices=3)
    after = replace(wish, engine_note="other")
    cluster.ask(after)
    cluster.reconcile()
    cluster.num_devices = 2  # somebody else was faster
    decision = run(cluster, after, floor=1)
    assert decision.strategy.startswith("FreeFirst: the spare device was taken")


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(
    ("is_queue", "why"), [(False, "the quota has no room for"), (True, "the queue admits no other")]
)
def test_auto_goes_on_without_the_extra_engine_when_a_quota_or_a_queue_is_full(
    engines: int, is_queue: bool, why: str
) -> None:
    """A device was free, but not for this namespace: no engine was ever replaced, and a quota then
    ended every rollout by its deadline."""
    wish = Wish(engines=engines)
    cluster = started(8, wish)
    cluster.quota, cluster.is_queue = engines, is_queue
    after = replace(wish, engine_note="other")
    cluster.ask(after)
    decision = run(cluster, after, floor=engines - 1 or None)
    assert decision.strategy.startswith(f"FreeFirst: {why}")
    assert not decision.deadline_exceeded


@pytest.mark.parametrize(
    ("memory", "refusal"),
    [("1Gi", QUOTA_EXCEEDED), ("", 'admission webhook "exceeded quota" denied the request: no')],
)
def test_no_engine_goes_for_one_that_would_be_refused_in_its_place(
    memory: str, refusal: str
) -> None:
    """For its own size, or by something that counts nothing: serving would have ended."""
    wish = Wish(engines=1)
    cluster = started(9, wish)
    cluster.quota, cluster.refusal = 1, refusal
    for pod in cluster.role("engine"):
        pod.template = copy.deepcopy(pod.template)
        requests = pod.template["spec"]["containers"][0]["resources"]["requests"]
        requests["memory"] = memory or requests["memory"]
    cluster.ask(replace(wish, engine_note="other"))
    for _ in range(DEADLINE_TICKS // 2):
        decision = cluster.reconcile()
        cluster.tick()
        assert not decision.delete_pods
    assert decision.strategy.startswith("Surge")


def test_without_a_record_a_rollout_goes_on_but_knows_no_way_back() -> None:
    wish = Wish(engines=2)
    cluster = started(7, wish, num_devices=2)
    assert cluster.record is not None
    cluster.record["data"] = {"state.json": "not json", "good.json": "[]"}
    after = replace(wish, image="good-2")
    cluster.ask(after)
    run(cluster, after, floor=1)


@pytest.mark.parametrize("seed", range(30))
def test_every_road_converges(seed: int) -> None:
    """Random wishes, random trouble, an operator that dies: whatever was done, the last wish wins,
    and no deletion ever takes an engine below what the strategy promises."""
    rng = random.Random(seed)
    wish = Wish(engines=rng.randint(1, 3), frontends=rng.randint(1, 3))
    cluster = started(seed, wish, num_devices=rng.choice([3, 4]))
    cluster.knows_devices = rng.random() < 0.7
    for _ in range(rng.randint(1, 4)):
        change: dict[str, object] = {
            "image": rng.choice(["good-1", "good-2", "bad-1"]),
            "engines": rng.randint(1, 3),
            "frontends": rng.randint(1, 4),
            "engine_note": rng.choice(["", "a", "bad"]),
            "frontend_note": rng.choice(["", "b", "bad"]),
            "strategy": rng.choice(["Auto", "Surge", "FreeFirst"]),
        }
        for key in rng.sample(sorted(change), rng.randint(1, 3)):
            wish = replace(wish, **{key: change[key]})  # type: ignore[arg-type]
        cluster.ask(wish)
        for _ in range(rng.randint(1, 140)):
            _pass_under_trouble(cluster, trouble=0.01)
    wish = replace(wish, image="good-3", engine_note="", frontend_note="", strategy="Auto")
    cluster.ask(wish)
    run(cluster, wish, crashes=0.2)


def _pass_under_trouble(cluster: SimCluster, trouble: float) -> None:
    view = cluster.view()
    if not needs_devices(view):
        none, many = (msgspec.structs.replace(view, free_devices=n) for n in (None, 9))
        assert decide(none) == decide(many)
    before = {pod.name for pod in cluster.serving_engines()}
    max_writes = cluster.random.randint(0, 3) if cluster.random.random() < 0.2 else 99
    decision = cluster.reconcile(max_writes)
    check_always(cluster, decision)
    taken = {name for name, _ in decision.delete_pods} & before
    if taken:
        engines = cluster.wish.engines
        floor = engines if decision.strategy.startswith("Surge") else engines - 1
        assert len(before - taken) >= floor, (decision, view.announced)
    cluster.tick(trouble)
