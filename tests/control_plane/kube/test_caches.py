"""Caches and watches: no ghost, no lost object, whatever the order of news."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foveal_operator.common.clock import Clock
from foveal_operator.kube.errors import ApiError, NotFound, classify
from foveal_operator.kube.kinds import (
    BY_NAME,
    CONFIG_MAP,
    DEPLOYMENT,
    INFERENCE,
    POD,
    POD_LABEL,
    WATCHED,
)
from foveal_operator.kube.store import READ_BACK, Caches, brief, owner_of, trimmed
from foveal_operator.kube.types import Obj
from foveal_operator.kube.watches import Watch, selector_of
from foveal_operator.model import flow as model_flow
from foveal_operator.reconcile import baseline as basis
from foveal_operator.rollout import record
from foveal_operator.telemetry.series import Telemetry
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime
from tests.support.regenerate import wanted
from tests.support.samples import LEGAL

LABELS = {"app.kubernetes.io/instance": "tiny", "app.kubernetes.io/managed-by": "foveal-operator"}


def config_map(name: str, uid: str = "u", version: int = 1, instance: str = "tiny") -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name, "namespace": "default", "uid": uid, "resourceVersion": str(version),
            "labels": {**LABELS, "app.kubernetes.io/instance": instance},
        },
    }  # fmt: skip


class CacheMachine(RuleBasedStateMachine):
    """News of a real history arrive late, twice and out of order; a list puts all right."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = Caches()
        self.version = 0
        self.live: dict[str, Obj] = {}
        self.news: list[tuple[str, Obj]] = []

    @rule(name=st.sampled_from("abc"))
    def write(self, name: str) -> None:
        self.version += 1
        uid = self.live[name]["metadata"]["uid"] if name in self.live else f"u{self.version}"
        self.live[name] = config_map(name, uid, self.version)
        self.news.append(("PUT", self.live[name]))

    @rule(name=st.sampled_from("abc"))
    def delete(self, name: str) -> None:
        if name in self.live:
            self.news.append(("DELETED", self.live.pop(name)))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any piece of news, perhaps for the second time; deletions may be lost for ever."""
        if self.news:
            change, body = data.draw(st.sampled_from(self.news))
            metadata = body["metadata"]
            if change == "PUT":
                self.caches.put(CONFIG_MAP, body)
            else:
                self.caches.drop(CONFIG_MAP, "default", metadata["name"], metadata["uid"])

    @rule(extra=st.booleans())
    def list_live(self, extra: bool) -> None:
        before = self.caches.uids(CONFIG_MAP)
        listed = list(self.live.values())
        if extra:
            self.write("a")
            self.caches.put(CONFIG_MAP, self.live["a"])
        for body in listed:
            self.caches.put(CONFIG_MAP, body)
        self.caches.keep_only(CONFIG_MAP, {body["metadata"]["uid"] for body in listed}, before)
        for name, body in self.live.items():
            found = self.caches.get(CONFIG_MAP, "default", name)
            assert found is not None
            assert found["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]
        assert {name for _, name in self.caches.keys(CONFIG_MAP)} == set(self.live)

    @invariant()
    def holds(self) -> None:
        self.caches.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_late_echo_of_a_deleted_object_does_not_revive_it() -> None:
    caches = Caches()
    caches.put(CONFIG_MAP, config_map("a", "u1", 5))
    assert caches.drop(CONFIG_MAP, "default", "a", "u1")
    assert not caches.put(CONFIG_MAP, config_map("a", "u1", 4))
    assert caches.put(CONFIG_MAP, config_map("a", "u2", 9)), "a namesake is another object"


def test_a_list_that_was_wrong_hides_nothing_for_ever() -> None:
    """An object that a lagging list lacked was never seen again: it was taken for deleted."""
    caches, body = Caches(), config_map("a", "u1", 5)
    caches.put(CONFIG_MAP, body)
    caches.keep_only(CONFIG_MAP, (), caches.uids(CONFIG_MAP))
    assert caches.get(CONFIG_MAP, "default", "a") is None
    mark = caches.mark
    assert not caches.put(CONFIG_MAP, body), "an event may be a late one"
    assert caches.put(CONFIG_MAP, body, mark)
    caches.drop(CONFIG_MAP, "default", "a", "u1")
    assert not caches.put(CONFIG_MAP, body, mark), "deleted since the list was asked for"
    caches.check_integrity()


def test_an_object_that_a_watch_tells_of_again_has_only_been_out_of_its_sight() -> None:
    """One that lost its label and got it back was invisible until the next resync."""
    caches = Caches()
    caches.put(CONFIG_MAP, config_map("a", "u1", 5))
    caches.drop(CONFIG_MAP, "default", "a", "u1", "7")
    assert not caches.put(CONFIG_MAP, config_map("a", "u1", 6)), "an event may be a late one"
    assert caches.put(CONFIG_MAP, config_map("a", "u1", 7)), "as it left"
    assert caches.put(CONFIG_MAP, config_map("a", "u1", 9))
    assert caches.drop(CONFIG_MAP, "default", "a", "u1", "7") is None, "late: it is back"
    assert caches.identity(CONFIG_MAP, "default", "a") == ("u1", "9")
    assert caches.drop(CONFIG_MAP, "default", "a", "u1", "10")
    caches.check_integrity()


def test_the_owner_is_the_instance_the_labels_name() -> None:
    assert owner_of(CONFIG_MAP, config_map("a")) == ("default", "tiny")
    mmi = {"metadata": {"name": "x", "namespace": "n", "labels": LABELS}}
    assert owner_of(INFERENCE, mmi) == ("n", "x")
    assert owner_of(POD, {"metadata": {"name": "x", "namespace": "n"}}) is None


def test_an_object_that_changes_its_owner_leaves_the_old_one() -> None:
    caches = Caches()
    caches.put(CONFIG_MAP, config_map("a", version=1))
    caches.put(CONFIG_MAP, config_map("a", version=2, instance="other"))
    assert caches.owned(CONFIG_MAP, ("default", "tiny")) == []
    assert len(caches.owned(CONFIG_MAP, ("default", "other"))) == 1
    caches.check_integrity()


def test_long_texts_that_nobody_reads_are_kept_as_digests() -> None:
    """A dashboard is 40 kB; a thousand resources have one each."""
    long = "x" * 10_000
    body = {**config_map("a"), "data": {"board.json": long, "profile.json": long, "b": "short"}}
    caches, whole = Caches(), Caches(whole=True)
    for one in (caches, whole):
        one.put(CONFIG_MAP, body)
    found = (caches.get(CONFIG_MAP, "default", "a") or {})["data"]
    assert found == brief(CONFIG_MAP, body)["data"]
    assert (found["profile.json"], found["b"]) == (long, "short")
    assert found["board.json"] != long
    assert (whole.get(CONFIG_MAP, "default", "a") or {})["data"] == body["data"]


def test_what_the_operator_reads_back_is_kept_whole() -> None:
    made = (basis._KEY, record._GOOD, record._STATE, model_flow.PROFILE_KEY)
    assert frozenset(made) == READ_BACK


def test_managed_fields_are_kept_only_where_replicas_may_be_handed_over() -> None:
    fields = [
        {"manager": "hpa", "fieldsV1": {"f:spec": {"f:replicas": {}, "f:template": {}}}},
        {"manager": "kubectl", "fieldsV1": {"f:metadata": {}}},
    ]
    body = {"metadata": {"name": "a", "managedFields": fields}}
    kept = trimmed(DEPLOYMENT, body)["metadata"]["managedFields"]
    assert [entry["manager"] for entry in kept] == ["hpa"]
    assert "managedFields" not in trimmed(CONFIG_MAP, body)["metadata"]


def watch(cluster: FakeCluster, clock: Clock, keys: list[tuple[str, str]]) -> Watch:
    return Watch(cluster, Caches(), Telemetry(), clock=clock, namespaces=(), enqueue=keys.append)


async def test_a_watch_that_begins_anew_is_followed_by_a_list() -> None:
    """kopf re-lists after a 410 and tells nobody what is gone (its events have no type then)."""
    time, cluster, keys = FakeTime(), FakeCluster(), list[tuple[str, str]]()
    cluster.add({**config_map("a"), "data": {}})
    cluster.add({**config_map("b"), "data": {}})
    found = watch(cluster, time.clock, keys)
    await found.sync((INFERENCE, CONFIG_MAP))
    time.now += 60
    cluster.remove(CONFIG_MAP, "default", "a")
    keys.clear()
    body = cluster.body("ConfigMap", "b")
    found.on_event(CONFIG_MAP, None, body)
    assert keys == [], "nothing new in itself"
    await found.relist_stale()
    assert keys == [("default", "tiny")]
    calls = len(cluster.calls)
    await found.relist_stale()
    assert len(cluster.calls) == calls, "once is enough"


async def test_the_first_list_of_the_watch_costs_no_second_one() -> None:
    time, cluster, keys = FakeTime(), FakeCluster(), list[tuple[str, str]]()
    cluster.add({**config_map("a"), "data": {}})
    found = watch(cluster, time.clock, keys)
    await found.sync((INFERENCE, CONFIG_MAP))
    time.now += 1
    found.on_event(CONFIG_MAP, None, cluster.body("ConfigMap", "a"))
    calls = len(cluster.calls)
    await found.relist_stale()
    assert len(cluster.calls) == calls


async def test_a_missing_resource_definition_is_an_error_a_missing_option_is_not() -> None:
    time, keys = FakeTime(), list[tuple[str, str]]()
    found = watch(FakeCluster(missing=frozenset({"PodMonitor"})), time.clock, keys)
    await found.sync(WATCHED)
    assert found.is_synced
    found = watch(FakeCluster(missing=frozenset({"MultiModalInference"})), time.clock, keys)
    with pytest.raises(NotFound, match="not serve multimodalinferences of foveal"):
        await found.sync(WATCHED)
    assert not found.is_synced


async def test_a_list_that_expires_between_two_pages_removes_nothing() -> None:
    """It was taken for an API that is not there: all objects of the kind left the cache."""
    time, keys, template = FakeTime(), list[tuple[str, str]](), config_map("a")
    cluster, caches = FakeCluster(), Caches()
    cluster.add({**template, "apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor"})
    found = Watch(
        cluster, caches, Telemetry(), clock=time.clock, namespaces=(), enqueue=keys.append
    )
    await found.sync(WATCHED)
    cluster.fail(classify(410, {"reason": "Expired", "message": "too old"}), kind="PodMonitor")
    with pytest.raises(ApiError, match="too old"):
        await found.sync(WATCHED)
    assert caches.get(BY_NAME["PodMonitor"], "default", "a") is not None
    await found.sync(WATCHED)


def test_children_are_filtered_by_the_server() -> None:
    for kind in WATCHED:
        if kind not in (INFERENCE, POD):
            assert selector_of(kind) == "app.kubernetes.io/managed-by=foveal-operator"
    assert selector_of(INFERENCE) == ""


def test_pods_are_watched_by_a_label_that_their_workloads_select_by() -> None:
    """Another one can be taken off a pod for good: no workload replaces the pod then."""
    objects = wanted(LEGAL["minimal"])
    for workload in (*objects.of_kind("StatefulSet"), *objects.of_kind("Deployment")):
        assert POD_LABEL in workload["spec"]["selector"]["matchLabels"].items()
    jobs = objects.of_kind("Job")
    assert jobs
    for job in jobs:
        assert POD_LABEL in job["spec"]["template"]["metadata"]["labels"].items()
    assert selector_of(POD) == "app.kubernetes.io/name=foveal"
