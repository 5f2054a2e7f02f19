"""Parts of a rollout one by one: replicas and autoscalers, ConfigMaps to keep, hopeless engines."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.manifests.workloads import is_handed_over, live_replicas
from foveal_operator.rollout import RolloutView, decide
from foveal_operator.rollout.record import Record, State, read_record
from foveal_operator.rollout.steps import engine_step
from foveal_operator.rollout.view import Pod
from tests.support.regenerate import FACTS, planned
from tests.support.samples import LEGAL
from tests.support.sim_cluster import SimCluster, Wish

MANAGER = "foveal-operator"


def owned_by(*managers: str, replicas: int = 3) -> Obj:
    fields = [{"manager": name, "fieldsV1": {"f:spec": {"f:replicas": {}}}} for name in managers]
    rest = {"manager": "someone", "fieldsV1": {"f:spec": {"f:paused": {}}}}
    return {"metadata": {"managedFields": [*fields, rest]}, "spec": {"replicas": replicas}}


def test_an_autoscaler_owns_replicas_once_it_has_written_them() -> None:
    assert not is_handed_over(None)
    assert not is_handed_over(owned_by(MANAGER))
    assert not is_handed_over(owned_by())
    assert is_handed_over(owned_by("kube-controller-manager"))
    assert is_handed_over(owned_by(MANAGER, "kube-controller-manager"))
    assert live_replicas(owned_by(replicas=7)) == 7
    assert live_replicas({"spec": {}}) == 1
    assert live_replicas(None) is None


def scaled_view(live: int, facts: ClusterFacts) -> RolloutView:
    inference, budgets = planned(LEGAL["scaled"])
    objects = desired(inference, budgets, facts)
    (engines,), (frontends,) = objects.of_kind("StatefulSet"), objects.of_kind("Deployment")

    def running(body: Obj) -> Obj:
        metadata = {**body["metadata"], "resourceVersion": "77", "generation": 1}
        spec = {**body["spec"], "replicas": live}
        return {**body, "metadata": metadata, "spec": spec, "status": {"observedGeneration": 1}}

    return RolloutView(
        inference=inference,
        stateful_set=engines,
        deployment=frontends,
        live_stateful_set=running(engines),
        live_deployment=running(frontends),
        now=1.0,
    )


@pytest.mark.parametrize("live", [1, 5])
def test_before_the_hand_over_the_live_value_is_applied_if_it_still_is_the_live_one(
    live: int,
) -> None:
    """What was read may be older than the autoscaler's last write: the API server must refuse."""
    decision = decide(scaled_view(live, FACTS))
    for body in (decision.stateful_set, decision.deployment):
        assert body is not None
        assert body["spec"]["replicas"] == live
        assert body["metadata"]["resourceVersion"] == "77"


def test_no_replicas_at_all_are_not_handed_over() -> None:
    """Found by generated transitions: from `replicas: 0` to an autoscaler nothing ever started. A
    HorizontalPodAutoscaler takes 0 as switched off."""
    decision = decide(scaled_view(0, FACTS))
    scaling = planned(LEGAL["scaled"])[0].spec.frontend.autoscaling
    assert scaling is not None
    assert decision.deployment is not None
    assert decision.deployment["spec"]["replicas"] == scaling.min_replicas > 0


def test_after_the_hand_over_replicas_are_left_out() -> None:
    facts = msgspec.structs.replace(FACTS, frontends_handed_over=True, engines_handed_over=True)
    decision = decide(scaled_view(5, facts))
    for body in (decision.stateful_set, decision.deployment):
        assert body is not None
        assert "replicas" not in body["spec"]
        assert "resourceVersion" not in body["metadata"]


def test_no_surge_while_an_autoscaler_owns_the_number_of_engines() -> None:
    facts = msgspec.structs.replace(FACTS, engines_handed_over=True)
    view = scaled_view(2, facts)
    old = {"foveal.dev/revision": "old"}
    pods = tuple(
        {"metadata": {"name": f"qwen-engine-{i}", "uid": str(i), "labels": old}} for i in range(2)
    )
    decision = decide(msgspec.structs.replace(view, engine_pods=pods, free_devices=9))
    assert decision.strategy.startswith("FreeFirst: the autoscaler owns")
    assert decision.stateful_set is not None
    assert "replicas" not in decision.stateful_set["spec"]


def test_nothing_is_done_where_no_pods_are_asked_for() -> None:
    view = scaled_view(2, FACTS)
    decision = decide(msgspec.structs.replace(view, stateful_set=None, deployment=None))
    assert decision.stateful_set is decision.deployment is decision.record is None
    assert not decision.delete_pods
    assert decision.next_check_seconds is None


def test_config_maps_of_running_pods_and_of_the_last_good_revision_are_kept() -> None:
    wish = Wish(engines=2)
    cluster = SimCluster(random.Random(1), 2, wish)
    for _ in range(40):
        decision = cluster.reconcile()
        cluster.tick()
    assert not decision.in_progress
    first = decision.keep
    assert len(first) == 3  # both documents and the record
    # A change of the deadline changes no document, one of the model length does.
    cluster.ask(replace(wish, image="bad-1"))
    for _ in range(10):
        decision = cluster.reconcile()
        cluster.tick()
    assert decision.in_progress
    assert first <= decision.keep
    good = read_record(cluster.record).good
    assert good is not None
    assert ("ConfigMap", good.engine["spec"]["volumes"][0]["configMap"]["name"]) in decision.keep


def pod(ordinal: int, revision: str = "old", **facts: Any) -> Pod:
    return Pod(
        name=f"e-{ordinal}",
        uid=str(ordinal),
        ordinal=ordinal,
        revision=revision,
        group="g",
        is_terminating=facts.pop("is_terminating", False),
        is_ready=facts.get("serves", True),
        serves=facts.pop("serves", True),
        **facts,
    )


def deleted(*pods: Pod, engines: int = 3, applied: int | None = None, **rules: Any) -> list[int]:
    rules = {"strategy": "FreeFirst", "num_surge": 0, "max_unavailable": 1, **rules}
    step = engine_step(
        pods,
        "new",
        num_engines=engines,
        num_applied=engines if applied is None else applied,
        **rules,
    )
    return [one.ordinal for one in step.delete]


def test_the_idle_go_first_and_the_broken_before_them() -> None:
    assert deleted(pod(0, load=5), pod(1, load=0), pod(2, load=9)) == [1]
    assert deleted(pod(0, load=5), pod(1, load=0), pod(2, load=9, serves=False)) == [2]
    assert deleted(pod(0), pod(1), pod(2)) == [2]


def test_one_on_its_way_stops_all_others() -> None:
    assert deleted(pod(0), pod(1), pod(2, "new", serves=False)) == []
    assert deleted(pod(0), pod(1), pod(2, is_terminating=True)) == []
    assert deleted(pod(0), pod(1)) == []
    assert deleted(pod(0), pod(1), pod(2, "new")) == [1]
    assert deleted(pod(0), pod(1), pod(2, "new", serves=False), max_unavailable=2) == [1]


def test_a_serving_engine_is_never_spared_for_a_broken_floor() -> None:
    """With one engine already down for its own reasons, no serving one is taken."""
    assert deleted(pod(0), pod(1, serves=False), pod(2), engines=3) == [1]
    assert deleted(pod(0), pod(1, serves=False), engines=2, strategy="Surge", num_surge=1) == [1]
    surged = (pod(0), pod(1), pod(2, "new"))
    assert deleted(*surged, engines=2, applied=3, strategy="Surge", num_surge=1) == [1]
    starting = (pod(0), pod(1), pod(2, "new", serves=False))
    assert deleted(*starting, engines=2, applied=3, strategy="Surge", num_surge=1) == []


def test_where_nothing_serves_the_hopeless_go_at_once() -> None:
    broken = [pod(i, serves=False, is_hopeless=True) for i in range(3)]
    assert deleted(*broken) == [0, 1, 2]
    passing = [pod(i, serves=False) for i in range(3)]
    assert deleted(*passing) == [2]
    assert deleted(*broken, strategy="OnDelete") == []


def test_a_record_that_says_nothing_is_an_empty_one() -> None:
    assert read_record(None) == Record()
    assert read_record({"data": {"state.json": "{", "good.json": "{}"}}) == Record()
    assert read_record({"data": {"state.json": '{"revision":"a/b"}'}}).state == State(
        revision="a/b"
    )
