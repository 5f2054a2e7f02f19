"""The operator is killed at every write of every step; what stands there afterwards is the same.

One chain of steps, and in each step one life of the operator for every object it writes: SIGKILL
before the API server sees the write, or after it did and before the answer. The next life starts
from what the last one left.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.control_plane.api_server import faults
from tests.control_plane.api_server.calls import Call
from tests.control_plane.api_server.fault_proxy import Answer, Fault, Forward
from tests.control_plane.api_server.operator_process import OperatorProcess
from tests.control_plane.api_server.scenarios import NO_LEASE, STEPS, Children, run
from tests.control_plane.api_server.world import World, difference


class Crasher:
    """Kills the operator once at each object it writes, before or after the write is done.

    `first_after` swaps which of two consecutive points comes after the commit; both settings
    together cover every point on both sides.
    """

    def __init__(self, operator: OperatorProcess, *, first_after: bool) -> None:
        self._operator = operator
        self._first_after = first_after
        self.is_new = faults.OncePerWrite()
        self.points: list[str] = []

    def fault(self) -> Fault:
        return Fault(self.is_new, self._kill, times=None)

    async def _kill(self, call: Call, forward: Forward) -> Answer:
        after = (len(self.points) % 2 == 0) is self._first_after
        if after:
            await forward()
        self.points.append(f"{'after' if after else 'before'} {call.verb} {call.target}")
        os.kill(self._operator.pid, signal.SIGKILL)
        return faults.REFUSALS[503]


@pytest.mark.timeout(1200, func_only=True)
@pytest.mark.parametrize(
    "first_after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["odd", "even"]
)
def test_killed_at_every_write_it_converges(
    world: World, expected: dict[str, Children], first_after: bool
) -> None:
    crasher = Crasher(world.operator("a", NO_LEASE), first_after=first_after)
    world.proxy.faults.append(crasher.fault())
    for step in STEPS:
        crasher.is_new.clear()
        started, num_points = time.monotonic(), len(crasher.points)
        children = run(world, step)
        points = len(crasher.points) - num_points
        print(f"{step.name}: {points} crashes, {time.monotonic() - started:.0f} s")
        assert not difference(children, expected[step.name]), crasher.points[num_points:]
    print(f"{len(crasher.points)} crashes: {'; '.join(crasher.points)}")
    assert len(crasher.points) >= 20
