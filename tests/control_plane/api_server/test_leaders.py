"""Two replicas: one writes at a time, and another takes over. The proxy audits every write."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest

from tests.support.api_server.audit import Audit
from tests.support.api_server.fault_proxy import FaultProxy
from tests.support.api_server.nursery import Nursery
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.scenarios import STEP_SECONDS, STEPS, Step, is_over
from tests.support.api_server.world import World

LEASE_SECONDS = 8.0
FLAGS = (f"--lease-seconds={LEASE_SECONDS}", "--renew-seconds=6", "--retry-seconds=0.5")
MANY = int(os.environ.get("FOVEAL_KILLS", "100"))
CREATE, SCALE = STEPS[:2]


def two_replicas(world: World, nursery: Nursery, flags: Sequence[str] = FLAGS) -> World:
    """a and b; the audit lets only the holder of the Lease write."""
    world.proxy.audit = Audit(needs_lease=True)
    world.nursery = nursery
    for name in ("a", "b"):
        world.operator(name, *flags).start()
    return world


@pytest.fixture
def pair(world: World, nursery: Nursery) -> World:
    return two_replicas(world, nursery)


def holder(world: World) -> str:
    """Name of the replica that holds the Lease, or ""."""
    lease = world.api.get("Lease", world.namespace, "foveal-operator")
    return str((lease or {}).get("spec", {}).get("holderIdentity") or "").partition("_")[0]


def live_on(world: World, but: str = "") -> bool:
    """Whoever has ended starts again, as a kubelet would see to: on a busy machine a replica can
    miss its short lease, and then ends at once. Always True."""
    for operator in world.operators:
        if operator.name != but and not operator.is_alive:
            world.proxy.audit.forget(operator.name)
            operator.start()
    return True


def is_led(world: World) -> bool:
    """By a replica that lives: the holder may have died and be remembered still."""
    name = holder(world)
    return any(o.name == name and o.is_alive for o in world.operators)


def take_over(world: World, old: str, since: float | None = None) -> float:
    """Seconds until another one leads, from now or from when the old one was told to go."""
    started = time.monotonic() if since is None else since
    wait_until(
        "another leads",
        lambda: live_on(world, but=old) and holder(world) not in ("", old),
        STEP_SECONDS,
    )
    return time.monotonic() - started


def end(leader: OperatorProcess, how: str) -> float:
    """When it was told to go, by SIGKILL or SIGTERM."""
    started = time.monotonic()
    os.kill(leader.pid, getattr(signal, how))
    return started


def does(world: World, step: Step, but: str = "") -> None:
    step.act(world)
    wait_over(world, step, but)


def wait_over(world: World, step: Step, but: str = "") -> None:
    try:
        wait_until(
            f"step {step.name!r} is over",
            lambda: live_on(world, but) and is_over(world, step),
            STEP_SECONDS,
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{world.told()}") from None


@pytest.mark.timeout(600, func_only=True)
def test_another_takes_over_when_the_leader_dies_or_leaves(pair: World) -> None:
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
    world: World, nursery: Nursery, num_kills: int, flags: tuple[str, ...]
) -> None:
    """In the middle of work, by SIGKILL and SIGTERM in turn; the many with the Lease as it is in
    production. Prints how long nobody led."""
    pair = two_replicas(world, nursery, flags)
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
def test_a_leader_that_slept_past_its_lease_writes_nothing(pair: World) -> None:
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


def test_the_rule_of_one_writer_is_checked(pair: World) -> None:
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
