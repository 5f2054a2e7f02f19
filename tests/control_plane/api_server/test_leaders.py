"""Two replicas: one writes at a time, and another takes over. The proxy audits every write."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.api_server.audit import Audit
from tests.support.api_server.fault_proxy import FaultProxy
from tests.support.api_server.fork_server import ForkServer
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.replicas import (
    FLAGS,
    LEASE_SECONDS,
    does,
    holder,
    is_led,
    live_on,
    two_replicas,
    wait_over,
)
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import STEP_SECONDS, STEPS

MANY = int(os.environ.get("FOVEAL_KILLS", "100"))
CREATE, SCALE = STEPS[:2]


@pytest.fixture
def pair(sandbox: Sandbox, fork_server: ForkServer) -> Sandbox:
    return two_replicas(sandbox, fork_server)


def take_over(sandbox: Sandbox, old: str, since: float | None = None) -> float:
    """Seconds until another one leads, from now or from when the old one was told to go."""
    started = time.monotonic() if since is None else since
    wait_until(
        "another leads",
        lambda: live_on(sandbox, but=old) and holder(sandbox) not in ("", old),
        STEP_SECONDS,
    )
    return time.monotonic() - started


def end(leader: OperatorProcess, how: str) -> float:
    """When it was told to go, by SIGKILL or SIGTERM."""
    started = time.monotonic()
    os.kill(leader.pid, getattr(signal, how))
    return started


@pytest.mark.timeout(600, func_only=True)
def test_another_takes_over_when_the_leader_dies_or_leaves(pair: Sandbox) -> None:
    does(pair, CREATE)
    wait_until("one leads", lambda: live_on(pair) and is_led(pair), STEP_SECONDS)
    first = holder(pair)
    (leader,) = [o for o in pair.operators if o.name == first]
    leader.kill()
    print(f"after SIGKILL: {take_over(pair, first):.1f} s with a lease of {LEASE_SECONDS} s")
    does(pair, SCALE, but=first)
    pair.proxy.audit.forget(first)  # another life, with nothing remembered
    leader.start()
    leader.wait_ready()
    (other,) = [o for o in pair.operators if o.name != first]
    assert other.stop() == 0
    print(f"after SIGTERM: {take_over(pair, other.name):.1f} s")
    does(pair, STEPS[2])


@pytest.mark.timeout(7200, func_only=True)
@pytest.mark.parametrize(
    ("num_kills", "flags"), [(3, FLAGS), pytest.param(MANY, (), marks=pytest.mark.slow)]
)
def test_there_is_one_writer_however_often_leaders_go(
    sandbox: Sandbox, fork_server: ForkServer, num_kills: int, flags: tuple[str, ...]
) -> None:
    """In the middle of work, by SIGKILL and SIGTERM in turn; the many with the Lease as it is in
    production. Prints how long nobody led."""
    pair = two_replicas(sandbox, fork_server, flags)
    seconds: dict[str, list[float]] = {"SIGKILL": [], "SIGTERM": []}
    for number in range(num_kills):
        wait_until("one leads", lambda: live_on(pair) and is_led(pair), STEP_SECONDS)
        step = (CREATE, SCALE)[number % 2]
        step.act(pair)
        first = holder(pair)
        (leader,) = [o for o in pair.operators if o.name == first]
        how = ("SIGKILL", "SIGTERM")[number % 2]
        seconds[how].append(take_over(pair, first, since=end(leader, how)))
        assert leader.stop() >= 0 or how == "SIGKILL", leader.log_tail()
        wait_over(pair, step)
    for how, found in seconds.items():
        found.sort()
        p99 = found[min(len(found) - 1, int(0.99 * len(found)))]
        print(f"{how}: {len(found)} times, median {found[len(found) // 2]:.1f} s, p99 {p99:.1f} s")
    assert not pair.proxy.audit.violations


@pytest.mark.timeout(600, func_only=True)
def test_a_leader_that_slept_past_its_lease_writes_nothing(pair: Sandbox) -> None:
    """Stopped in the middle, it wakes up when another leads; it must end before it writes."""
    does(pair, CREATE)
    wait_until("one leads", lambda: live_on(pair) and is_led(pair), STEP_SECONDS)
    first = holder(pair)
    (leader,) = [o for o in pair.operators if o.name == first]
    leader.pause()
    try:
        take_over(pair, first)
        does(pair, SCALE, but=first)
    finally:
        leader.resume()
    wait_until("the old leader has ended", lambda: not leader.is_alive, 30.0)
    writes = [call for call, _ in pair.proxy.writes if not call.is_lease]
    assert writes[-1].client != first


def test_the_rule_of_one_writer_is_checked(pair: Sandbox) -> None:
    """The audit of these tests does see a write without the Lease."""
    assert isinstance(pair.proxy, FaultProxy)
    wait_until("one leads", lambda: holder(pair), 60.0)
    operator = pair.operator("c", "--leader-elect=false")
    operator.start()
    CREATE.act(pair)
    wait_until("it is noticed", lambda: pair.proxy.audit.violations, 60.0)
    assert all(" c: " in text for text in pair.proxy.audit.violations)
    pair.proxy.audit.violations.clear()
    operator.kill()
    pair.proxy.audit = Audit()
