"""The operator is killed at every write of every step; what stands there afterwards is the same.

One chain of steps, and in each step one life of the operator for every object it writes: SIGKILL
before the API server sees the write, or after it did and before the answer. The next life starts
from what the last one left. Points are numbered within their step; FOVEAL_CRASH=image:3-5 crashes
only at those, FOVEAL_CRASH=image:7 at that one alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.api_server import faults
from tests.support.api_server.calls import Call
from tests.support.api_server.fault_proxy import Answer, Fault, Forward
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.sandbox import Sandbox, difference
from tests.support.api_server.scenarios import NO_LEASE, STEPS, Children, run

FEW = frozenset({"create:1", "create:4", "create:9", "create:12", "image:1", "image:3"})
"""For each run of the fast suite: before and after, in the middle of making and of changing."""
Wants = Callable[[str], bool]


def asked_for(text: str) -> Wants:
    """`step:from-to` as a choice of points; nothing asks for all."""
    if not text:
        return lambda point: True
    step, _, numbers = text.partition(":")
    first, _, last = numbers.partition("-")
    wanted = range(int(first or 1), int(last or first or 999) + 1)
    return lambda point: point in {f"{step}:{number}" for number in wanted}


class Crasher:
    """Kills the operator once at each object it writes, before or after the write is done.

    `first_after` swaps which of two consecutive points comes after the commit; both settings
    together cover every point on both sides.
    """

    def __init__(self, operator: OperatorProcess, wants: Wants, *, first_after: bool) -> None:
        self._operator = operator
        self._wants = wants
        self._first_after = first_after
        self._is_new = faults.OncePerWrite()
        self._step, self._number = "", 0
        self.points: list[str] = []

    def begin(self, step: str) -> None:
        """The next step: every object is new again."""
        self._is_new.clear()
        self._step, self._number = step, 0

    def fault(self) -> Fault:
        return Fault(self._is_due, self._kill, times=None)

    def _is_due(self, call: Call) -> bool:
        if not self._is_new(call):
            return False
        self._number += 1
        return self._wants(f"{self._step}:{self._number}")

    async def _kill(self, call: Call, forward: Forward) -> Answer:
        after = (self._number % 2 == 1) is self._first_after
        if after:
            await forward()
        side = "after" if after else "before"
        self.points.append(f"{self._step}:{self._number} {side} {call.verb} {call.target}")
        os.kill(self._operator.pid, signal.SIGKILL)
        return faults.REFUSALS[503]


def crash(
    sandbox: Sandbox, expected: dict[str, Children], wants: Wants, *, first_after: bool
) -> int:
    """All steps. Returns how often the operator was killed."""
    crasher = Crasher(sandbox.operator("a", NO_LEASE), wants, first_after=first_after)
    sandbox.proxy.faults.append(crasher.fault())
    for step in STEPS:
        crasher.begin(step.name)
        started, num_points = time.monotonic(), len(crasher.points)
        children = run(sandbox, step)
        points = crasher.points[num_points:]
        print(f"{step.name}: {len(points)} crashes, {time.monotonic() - started:.1f} s")
        lines = difference(children, expected[step.name])
        assert not lines, f"{lines}\nafter {'; '.join(points)}"
    print("; ".join(crasher.points))
    return len(crasher.points)


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("first_after", [False, True], ids=["odd", "even"])
def test_killed_at_some_writes_it_converges(
    arena: Sandbox, expected: dict[str, Children], first_after: bool
) -> None:
    assert crash(arena, expected, FEW.__contains__, first_after=first_after) == len(FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200, func_only=True)
@pytest.mark.parametrize("first_after", [False, True], ids=["odd", "even"])
def test_killed_at_every_write_it_converges(
    arena: Sandbox, expected: dict[str, Children], first_after: bool
) -> None:
    asked = os.environ.get("FOVEAL_CRASH", "")
    num = crash(arena, expected, asked_for(asked), first_after=first_after)
    print(f"{num} crashes")
    assert num >= (1 if asked else 40)
