"""Leader election: never two writers, quick hand-over, and an end on the monotonic clock."""

from __future__ import annotations

import asyncio
import random

import pytest

from foveal_operator.kube.errors import Transient
from foveal_operator.kube.kinds import LEASE, Kind
from foveal_operator.kube.lease import Elector, LeaseSettings
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime


class Replica:
    """One elector as a task. A lost lease ends it, as it ends the process."""

    def __init__(self, cluster: FakeCluster, time: FakeTime, name: str) -> None:
        self.name = name
        self.has_started = False
        self.is_lost = False
        settings = LeaseSettings(namespace="foveal", identity=name)
        self.elector = Elector(cluster, settings, clock=time.clock, on_lost=self._lost)
        self.task = asyncio.ensure_future(self.elector.run(self._started))

    async def _started(self) -> None:
        self.has_started = True

    def _lost(self) -> None:
        self.is_lost = True
        self.task.cancel()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class HangingCluster(FakeCluster):
    """Answers no Lease call while `hangs`."""

    hangs = False

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj | None:
        if self.hangs and kind is LEASE:
            await asyncio.Event().wait()
        return await super().get(kind, namespace, name)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def holder(cluster: FakeCluster) -> str:
    return str(cluster.body("Lease", "foveal-operator", "foveal")["spec"]["holderIdentity"])


async def test_the_first_leads_and_the_second_waits(time: FakeTime) -> None:
    cluster = FakeCluster()
    one = Replica(cluster, time, "one")
    await time.pass_(1)
    two = Replica(cluster, time, "two")
    await time.pass_(120)
    assert one.has_started
    assert one.elector.may_write()
    assert not two.has_started
    assert not two.elector.may_write()
    assert holder(cluster) == "one"
    spec = cluster.body("Lease", "foveal-operator", "foveal")["spec"]
    assert spec["renewTime"].endswith("Z")
    assert spec["leaseDurationSeconds"] == 15
    await one.end()
    await two.end()


async def test_after_a_release_the_second_leads_within_three_seconds(time: FakeTime) -> None:
    cluster = FakeCluster()
    one, two = Replica(cluster, time, "one"), Replica(cluster, time, "two")
    await time.pass_(30)
    leader, other = (one, two) if one.has_started else (two, one)
    await leader.end()
    await leader.elector.release()
    assert not leader.elector.may_write()
    assert holder(cluster) == ""
    await time.pass_(3)
    assert other.elector.may_write()
    await other.end()


async def test_after_a_kill_the_second_leads_when_the_lease_has_run_out(time: FakeTime) -> None:
    cluster = FakeCluster()
    one = Replica(cluster, time, "one")
    await time.pass_(1)
    two = Replica(cluster, time, "two")
    await time.pass_(10)
    await one.end()
    await time.pass_(11)
    assert not two.has_started, "what was seen to be renewed is not taken early"
    await time.pass_(9)
    assert two.elector.may_write()
    assert cluster.body("Lease", "foveal-operator", "foveal")["spec"]["leaseTransitions"] == 1
    await two.end()


async def test_a_stopped_process_may_not_write_when_it_goes_on(time: FakeTime) -> None:
    """SIGSTOP past the lease, SIGCONT: the gate is shut before any other line runs."""
    cluster = FakeCluster()
    one = Replica(cluster, time, "one")
    await time.pass_(5)
    time.freeze(60)
    assert not one.elector.may_write()
    await time.pass_(0.1)
    assert one.is_lost
    await one.end()


async def test_a_renewal_that_hangs_cannot_prolong_the_right_to_write(time: FakeTime) -> None:
    cluster = HangingCluster()
    one = Replica(cluster, time, "one")
    await time.pass_(5)
    cluster.hangs = True
    await time.pass_(5.8)
    assert not one.is_lost, "renewed at second 4.5, good until second 14.5"
    await time.pass_(3.8)
    assert one.is_lost
    assert not one.elector.may_write()
    await one.end()


async def test_a_slow_start_of_the_work_does_not_cost_the_lease(time: FakeTime) -> None:
    """Regression: renewals waited for the start, so a leader that waited for the API lost."""
    cluster = FakeCluster()
    settings = LeaseSettings(namespace="foveal", identity="one")
    elector = Elector(cluster, settings, clock=time.clock, on_lost=lambda: None)
    task = asyncio.ensure_future(elector.run(asyncio.Event().wait))  # type: ignore[arg-type]
    await time.pass_(120)
    assert elector.may_write()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_leader_that_cannot_work_does_not_go_on_leading(time: FakeTime) -> None:
    """It renewed its lease for ever, nobody worked, and no log said why."""

    async def breaks() -> None:
        raise RuntimeError("can't start new thread")

    settings = LeaseSettings(namespace="foveal", identity="one")
    elector = Elector(FakeCluster(), settings, clock=time.clock, on_lost=lambda: None)
    task = asyncio.ensure_future(elector.run(breaks))
    await time.pass_(5)
    assert task.done()
    assert isinstance(task.exception(), RuntimeError)


async def test_an_outage_shorter_than_the_deadline_is_survived(time: FakeTime) -> None:
    cluster = FakeCluster()
    one = Replica(cluster, time, "one")
    await time.pass_(4.1)
    for _ in range(3):
        cluster.fail(Transient("no connection"), kind="Lease")
    await time.pass_(30)
    assert one.elector.may_write()
    assert not one.is_lost
    await one.end()


async def test_a_lease_taken_by_another_ends_the_leader_at_once(time: FakeTime) -> None:
    cluster = FakeCluster()
    one = Replica(cluster, time, "one")
    await time.pass_(5)

    def steal(lease: Obj) -> None:
        lease["spec"]["holderIdentity"] = "thief"

    cluster.edit(LEASE, "foveal", "foveal-operator", steal)
    await time.pass_(2.1)
    assert one.is_lost
    await one.end()


@pytest.mark.parametrize("seed", range(8))
async def test_never_two_writers_whatever_dies_stands_still_or_fails(
    seed: int, time: FakeTime
) -> None:
    """Three replicas under kills, releases and API failures, by chance; the seed is the name."""
    chance = random.Random(seed)
    cluster = FakeCluster()
    replicas = [Replica(cluster, time, f"r{index}") for index in range(3)]
    born = 3
    led: set[str] = set()
    for _ in range(120):
        await time.pass_(chance.uniform(0.1, 4.0))
        writers = [r for r in replicas if r.elector.may_write()]
        assert len(writers) <= 1, [r.name for r in writers]
        led |= {r.name for r in writers}
        event = chance.random()
        if event < 0.1:
            for _ in range(chance.randint(1, 6)):
                cluster.fail(Transient("no connection"), kind="Lease")
        elif event < 0.2 and writers:
            await writers[0].end()
            if chance.random() < 0.5:
                await writers[0].elector.release()
            replicas.remove(writers[0])
        for dead in [r for r in replicas if r.task.done()]:
            replicas.remove(dead)
        while len(replicas) < 3:
            replicas.append(Replica(cluster, time, f"r{born}"))
            born += 1
    assert len(led) > 1
    for replica in replicas:
        await replica.end()


@pytest.mark.parametrize(
    ("lease", "renew", "retry"), [(10, 10, 2), (15, 2, 2), (15, 10, 0), (5, 10, 2)]
)
def test_durations_under_which_two_could_lead_are_refused(
    lease: float, renew: float, retry: float
) -> None:
    settings = LeaseSettings(
        namespace="n", identity="i", lease_seconds=lease, renew_seconds=renew, retry_seconds=retry
    )
    with pytest.raises(ValueError, match="lease seconds must exceed"):
        settings.check()
