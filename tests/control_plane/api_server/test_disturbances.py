"""Writes that fail once and events that never come: in the end the same stands there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.api_server import faults
from tests.support.api_server.fault_proxy import EventFault
from tests.support.api_server.sandbox import Sandbox, difference
from tests.support.api_server.scenarios import NO_LEASE, STEPS, Children, run

# Minutes: under make soak.
pytestmark = pytest.mark.slow

_STEPS = [step for step in STEPS if step.name in ("create", "scale", "image", "delete")]


def run_all(sandbox: Sandbox, expected: dict[str, Children]) -> None:
    sandbox.operator("a", NO_LEASE).start()
    done = []
    for step in STEPS:
        if step in _STEPS:
            children = run(sandbox, step)
            assert not difference(children, expected[step.name]), step.name
            done.append(step.name)
    assert len(done) == len(_STEPS)


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_each_write_refused_once(
    arena: Sandbox, expected: dict[str, Children], status: int
) -> None:
    arena.proxy.faults.append(faults.refuse(faults.OncePerWrite(), status, times=None))
    run_all(arena, expected)


@pytest.mark.timeout(600, func_only=True)
def test_each_answer_lost_once(arena: Sandbox, expected: dict[str, Children]) -> None:
    """The API server did it, the operator saw a timeout: nothing is made twice."""
    arena.proxy.faults.append(faults.lose_answer(faults.OncePerWrite(), times=None))
    run_all(arena, expected)


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize(
    "fault", [faults.drop_events, faults.duplicate_events, faults.expire_watch, faults.cut_watch]
)
def test_each_event_lost_once(
    arena: Sandbox,
    expected: dict[str, Children],
    fault: Callable[..., EventFault],
) -> None:
    """Dropped, told twice, or lost with the watch (410 Gone, or without a word)."""
    once = faults.OncePerEvent()
    arena.proxy.event_faults.append(fault(once, times=None))
    run_all(arena, expected)
    print(f"{len(once.seen)} events")
    assert len(once.seen) > 10
