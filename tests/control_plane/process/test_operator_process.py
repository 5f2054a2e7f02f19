"""The parts put together: start, waiting for the API, leading, losing, ending. One event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from foveal_operator.kube.errors import Transient
from foveal_operator.kube.kinds import CONFIG_MAP, Kind
from foveal_operator.kube.lease import LeaseSettings
from foveal_operator.kube.types import Obj
from foveal_operator.pods.probes import PodReports
from foveal_operator.process.main import STUCK_SECONDS, Operator, main
from foveal_operator.process.options import Options, parser
from foveal_operator.reconcile.observe import Settings
from foveal_operator.telemetry.series import Telemetry
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime
from tests.support.operator_rig import OPTIONAL_KINDS, resource, with_claim

FAILING = ("LIST", "StatefulSet")


async def no_reports(*_: Sequence[Obj]) -> PodReports:
    return PodReports()


class FakeEngine:
    """Watches of a replica: up from the start, until the replica says otherwise."""

    failure = ""

    def __init__(self, replica: Replica, kinds: tuple[Kind, ...]) -> None:
        self._replica, self._kinds = replica, kinds

    @property
    def is_alive(self) -> bool:
        return self._replica.are_watches_up

    def start(self) -> None:
        self._replica.starts.append(self._kinds)
        self._replica.are_watches_up = True

    def stop(self) -> None: ...

    def lookup_silent(self) -> tuple[str, ...]:
        return self._replica.silent

    def was_refused(self) -> bool:
        return False


class Replica:
    """An Operator that runs, and the watches it asked for."""

    def __init__(self, cluster: FakeCluster, time: FakeTime, name: str = "one") -> None:
        self.starts: list[tuple[Kind, ...]] = []
        self.are_watches_up = True
        self.silent: tuple[str, ...] = ()
        self.is_lost = False
        self.operator = Operator(
            cluster,
            Options(
                settings=Settings(),
                lease=LeaseSettings(namespace="foveal", identity=name),
                identity=name,
                num_workers=2,
            ),
            Telemetry(),
            clock=time.clock,
            observe_pods=no_reports,
            on_lost=self._lost,
            make_watches=lambda kinds, namespaces: FakeEngine(self, kinds),
        )
        cluster.watchers.append(self._hear)
        self.task = asyncio.ensure_future(self.operator.run())

    def _lost(self) -> None:
        self.is_lost = True
        self.task.cancel()

    def _hear(self, kind: Kind, change: str, body: Obj) -> None:
        if self.starts and kind in self.starts[-1]:
            self.operator.watch.on_event(kind, change, body)

    async def end(self) -> None:
        self.task.cancel()
        await self.operator.stop()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def cluster() -> FakeCluster:
    return with_claim(FakeCluster(missing=OPTIONAL_KINDS))


def test_help_says_every_flags_default() -> None:
    """`--renew-seconds RENEW_SECONDS` stood there alone."""
    for action in parser()._actions[1:]:
        assert action.help, action.dest
        assert "(default: " in action.help, action.dest


async def test_it_waits_for_the_definition_and_then_works(
    cluster: FakeCluster, time: FakeTime
) -> None:
    cluster.missing |= {"MultiModalInference"}
    one = Replica(cluster, time)
    await time.pass_(8)
    ready = one.operator.ready_checks(lambda: time.now)
    assert "CustomResourceDefinition" in ready["synced"]()
    cluster.missing = OPTIONAL_KINDS
    await time.pass_(8)
    assert ready["synced"]() == ""
    cluster.add(resource())
    await time.pass_(1)
    assert cluster.names("ServiceAccount") == ["tiny"]
    await one.end()


async def test_an_outage_at_the_start_is_waited_out(cluster: FakeCluster, time: FakeTime) -> None:
    for _ in range(10):
        cluster.fail(Transient("no connection"), verb="GET", kind="PodMonitor")
    one = Replica(cluster, time)
    await time.pass_(60)
    assert one.operator.watch.is_synced
    await one.end()


async def test_a_resync_that_fails_is_tried_ever_more_seldom(
    cluster: FakeCluster, time: FakeTime
) -> None:
    """At every tick, and what a broken watch may have missed was then never listed."""
    one = Replica(cluster, time)
    await time.pass_(3)
    for _ in range(1000):
        cluster.fail(Transient("no"), verb="LIST", kind="StatefulSet")
    one.operator._next_resync = time.now
    before = len(cluster.calls)
    await time.pass_(2)
    one.operator.watch._stale["ConfigMap"] = CONFIG_MAP
    await time.pass_(300)
    tried = [kind for verb, kind, _ in cluster.calls[before:] if (verb, kind) == FAILING]
    assert 5 <= len(tried) <= 10
    assert not one.operator.watch._stale
    cluster.failures.clear()
    await time.pass_(70)
    assert one.operator._next_resync - time.now > 500, "as before the failures"
    await one.end()


async def test_only_the_leader_writes_and_the_other_is_warm(
    cluster: FakeCluster, time: FakeTime
) -> None:
    one = Replica(cluster, time, "one")
    await time.pass_(3)
    two = Replica(cluster, time, "two")
    await time.pass_(3)
    cluster.add(resource())
    await time.pass_(3)
    assert one.operator.may_write()
    assert not two.operator.may_write()
    assert two.operator.caches.count(one.starts[0][0]) == 1, "it knows what the leader knows"
    lists = sum(1 for verb, *_ in cluster.calls if verb == "LIST")
    await one.end()
    cluster.watchers.pop(0)
    await time.pass_(4)
    assert two.operator.may_write()
    again = sum(1 for verb, *_ in cluster.calls if verb == "LIST") - lists
    # Each kind once, lest what a silent watch did not tell undoes newer state.
    # And one with which it found out whether it may list EndpointSlices.
    assert again == lists / 2 - 1, "as many as each replica made at its start"
    await two.end()


async def test_dead_watches_are_started_anew_and_nothing_is_missed(
    cluster: FakeCluster, time: FakeTime
) -> None:
    one = Replica(cluster, time)
    await time.pass_(3)
    cluster.watchers.clear()
    one.are_watches_up = False
    cluster.add(resource())
    assert one.operator.ready_checks(lambda: time.now)["watches"]()
    await time.pass_(5)
    assert len(one.starts) == 2
    assert cluster.names("ServiceAccount") == ["tiny"]
    await one.end()


async def test_deaf_watches_are_told_and_started_anew(cluster: FakeCluster, time: FakeTime) -> None:
    """Found on a real API server: the thread of the watches was up and watched nothing, and only
    the resync noticed, ten minutes later."""
    one = Replica(cluster, time)
    await time.pass_(3)
    cluster.watchers.clear()
    one.silent = ("multimodalinferences",)
    cluster.add(resource())
    ready = one.operator.ready_checks(lambda: time.now)
    assert ready["watches"]() == "no watch of multimodalinferences"
    assert len(one.starts) == 1
    await time.pass_(65)
    assert len(one.starts) == 2
    assert cluster.names("ServiceAccount") == ["tiny"]
    one.silent = ()
    assert ready["watches"]() == ""
    await one.end()


async def test_a_defect_is_retried_and_counted_not_fatal(
    cluster: FakeCluster, time: FakeTime
) -> None:
    one = Replica(cluster, time)
    await time.pass_(3)
    cluster.add({**resource(), "status": {"budgets": 5}})
    cluster.add({**resource(), "metadata": {"name": "other", "namespace": "default"}})
    await time.pass_(3)
    assert "other" in cluster.names("ServiceAccount"), "another resource is not held up"
    assert not one.task.done()
    await one.end()


async def test_a_stuck_pass_is_what_liveness_tells(cluster: FakeCluster, time: FakeTime) -> None:
    one = Replica(cluster, time)
    await time.pass_(3)
    check = one.operator.live_checks()["workers"]
    assert check() == ""
    one.operator.queue.core.add(("n", "stuck"), time.now)
    one.operator.queue.core.take(time.now)
    time.now += STUCK_SECONDS + 1
    assert "a pass has run for" in check()
    await one.end()


def test_wrong_flags_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bind", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert said == "foveal-operator: --bind 'nowhere' is neither HOST:PORT nor :PORT\n"
