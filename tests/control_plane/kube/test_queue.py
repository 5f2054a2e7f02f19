"""The work queue: what a key may and may not do, whatever the order of events."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foveal_operator.kube.queue import BASE_SECONDS, MAX_SECONDS, QueueCore, WorkQueue
from foveal_operator.telemetry.series import Telemetry
from tests.support.fake_clock import FakeTime

KEYS = st.sampled_from("abcd")


class QueueMachine(RuleBasedStateMachine):
    """Against a model that knows only: when is each key owed a run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core: QueueCore[str] = QueueCore(lambda: 0.5)
        self.owed: dict[str, float] = {}
        self.working: set[str] = set()

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.core.add(key, self.now)
        self.owed[key] = min(self.owed.get(key, self.now), self.now)

    @rule(key=KEYS, seconds=st.floats(0.1, 10))
    def add_after(self, key: str, seconds: float) -> None:
        self.core.add_after(key, seconds, self.now)
        self.owed[key] = min(self.owed.get(key, float("inf")), self.now + seconds)

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        due = {key for key, at in self.owed.items() if at <= self.now} - self.working
        taken = self.core.take(self.now)
        assert (taken is not None) == bool(due)
        if taken is not None:
            key, waited = taken
            assert key in due
            assert waited >= 0
            del self.owed[key]
            self.working.add(key)

    @rule()
    def finish(self) -> None:
        if self.working:
            key = sorted(self.working)[0]
            self.working.remove(key)
            assert self.core.done(key, self.now) >= 0

    @invariant()
    def holds(self) -> None:
        self.core.check_integrity()
        assert self.core.num_working == len(self.working)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_key_added_while_worked_on_runs_once_more() -> None:
    core: QueueCore[str] = QueueCore(lambda: 0.0)
    core.add("a", 0.0)
    assert core.take(0.0) == ("a", 0.0)
    for _ in range(5):
        core.add("a", 1.0)
    assert core.take(2.0) is None, "one worker at a time"
    core.done("a", 2.0)
    assert core.take(3.0) == ("a", 2.0)
    core.done("a", 3.0)
    assert core.take(99.0) is None


def test_the_backoff_doubles_to_five_minutes_and_starts_anew_after_success() -> None:
    core: QueueCore[str] = QueueCore(lambda: 0.0)
    found = [core.backoff_seconds("a") for _ in range(14)]
    assert found[:4] == [0.5, 1.0, 2.0, 4.0]
    assert found[-1] == MAX_SECONDS
    core.forget("a")
    assert core.backoff_seconds("a") == BASE_SECONDS


def test_one_keys_failures_delay_no_other() -> None:
    core: QueueCore[str] = QueueCore(lambda: 0.0)
    for _ in range(10):
        core.backoff_seconds("bad")
    assert core.backoff_seconds("good") == BASE_SECONDS


def test_jitter_only_ever_adds_and_at_most_a_fifth() -> None:
    for chance in (0.0, 0.3, 0.999):
        core: QueueCore[str] = QueueCore(lambda chance=chance: chance)
        for plain in (0.5, 1.0, 2.0):
            assert plain <= core.backoff_seconds("a") <= 1.2 * plain


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


async def test_a_waiting_worker_gets_a_delayed_key_when_it_is_due(time: FakeTime) -> None:
    queue: WorkQueue[str] = WorkQueue("q", time.clock, Telemetry())
    queue.add_after("later", 5.0)
    queue.add_after("soon", 1.0)
    worker = asyncio.ensure_future(queue.take())
    await time.pass_(0.9)
    assert not worker.done()
    await time.pass_(0.2)
    assert await worker == "soon"
    worker = asyncio.ensure_future(queue.take())
    await time.pass_(5.0)
    assert await worker == "later"


async def test_a_plain_add_overtakes_a_backoff(time: FakeTime) -> None:
    queue: WorkQueue[str] = WorkQueue("q", time.clock, Telemetry())
    queue.retry("a", at_least_seconds=100.0)
    queue.add("a")
    assert await queue.take() == "a"
    queue.done("a")
    worker = asyncio.ensure_future(queue.take())
    await time.pass_(200.0)
    assert not worker.done(), "the delayed run was the same key's: it has run"
    queue.close()
    assert await worker is None


async def test_metrics_have_the_names_of_controller_runtime(time: FakeTime) -> None:
    telemetry = Telemetry()
    queue: WorkQueue[str] = WorkQueue("q", time.clock, telemetry)
    queue.add("a")
    queue.add("a")
    assert telemetry.value("workqueue_depth", name="q") == 1
    time.now += 3.0
    await queue.take()
    queue.retry("a")
    queue.done("a")
    assert telemetry.value("workqueue_adds_total", name="q") == 2
    assert telemetry.value("workqueue_retries_total", name="q") == 1
    assert telemetry.value("workqueue_queue_duration_seconds_sum", name="q") == 3.0
