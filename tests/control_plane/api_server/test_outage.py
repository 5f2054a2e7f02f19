"""The API server is away: refused, failing or silent. The process lives on and catches up."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.support.api_server import faults
from tests.support.api_server.calls import Call
from tests.support.api_server.fault_proxy import Fault
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox, difference
from tests.support.api_server.scenarios import (
    NO_LEASE,
    STEP_SECONDS,
    STEPS,
    Children,
    is_over,
    run,
)

# make soak takes five minutes for each.
OUTAGE_SECONDS = float(os.environ.get("FOVEAL_OUTAGE_SECONDS", "12"))
MAX_CALLS_A_SECOND = 20


def every(call: Call) -> bool:
    return True


def answered(make: Callable[[], Fault]) -> Callable[[Sandbox], None]:
    """The outage that a fault is. Open watches are cut as well: a client that is told nothing must
    come back by itself."""

    def begin(sandbox: Sandbox) -> None:
        cut = faults.cut_watch(lambda call, event: event["type"] != "BOOKMARK", times=None)
        sandbox.proxy.faults.append(make())
        sandbox.proxy.event_faults.append(cut)

    return begin


OUTAGES: dict[str, Callable[[Sandbox], None]] = {
    "refused": lambda sandbox: sandbox.proxy.close_doors(),
    "503": answered(lambda: faults.refuse(every, 503, times=None)),
    "403": answered(lambda: faults.refuse(every, 403, times=None)),
    "429": answered(lambda: faults.refuse(every, 429, times=None)),
    "silence": answered(lambda: faults.black_hole(every)),
}


def most_in_a_second(calls: Iterable[Call]) -> tuple[int, str]:
    """The most calls about one kind that came within a second, and which kind. Not what asks which
    kinds there are: each of those calls is about a group."""
    seconds = Counter(
        (call.target.resource, int(call.at)) for call in calls if call.target.resource
    )
    ((kind, _), num), *_ = seconds.most_common(1) or [(("nothing", 0), 0)]
    return num, kind


@pytest.mark.timeout(1200, func_only=True)
@pytest.mark.parametrize(
    "outage",
    [
        *("503", "silence"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("refused", "403", "429")),
    ],
)
def test_an_outage_is_survived_and_caught_up_with(
    arena: Sandbox, expected: dict[str, Children], outage: str
) -> None:
    """Prints how often the operator asked meanwhile, how soon all was caught up with, and how many
    calls came at once."""
    sandbox = arena
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    run(sandbox, STEPS[0])
    OUTAGES[outage](sandbox)
    STEPS[1].act(sandbox)
    calls_before, until = len(sandbox.proxy.calls), time.monotonic() + OUTAGE_SECONDS
    wait_until("the outage is over", lambda: time.monotonic() > until, OUTAGE_SECONDS + 30)
    rate = (len(sandbox.proxy.calls) - calls_before) / OUTAGE_SECONDS
    assert operator.is_alive, operator.log_tail()
    assert operator.ask("/livez")[0] == 200
    sandbox.proxy.clear()
    if outage == "refused":
        sandbox.proxy.open_doors()
    returned, num_before = time.monotonic(), len(sandbox.proxy.calls)
    wait_until("it is caught up with", lambda: is_over(sandbox, STEPS[1]), STEP_SECONDS)
    back = time.monotonic() - returned
    most, kind = most_in_a_second(sandbox.proxy.calls[num_before:])
    children = run(sandbox, STEPS[1])
    print(
        f"{outage}, {OUTAGE_SECONDS:.0f} s: {rate:.1f} calls a second, back after {back:.1f} s, "
        f"then at most {most} calls in a second about one kind ({kind})"
    )
    assert not difference(children, expected[STEPS[1].name])
    assert rate <= MAX_CALLS_A_SECOND
    assert most <= MAX_CALLS_A_SECOND


@pytest.mark.timeout(600, func_only=True)
def test_watches_that_fail_at_their_start_are_started_anew(sandbox: Sandbox) -> None:
    """Found by chance: one refused discovery call left kopf's thread alive and deaf for ever; only
    the resync noticed anything."""
    sandbox.proxy.faults.append(
        faults.refuse(lambda call: call.verb == "get" and not call.target.resource, 415)
    )
    operator = sandbox.operator("a", NO_LEASE, "--resync-seconds=15")
    operator.start()
    run(sandbox, STEPS[0])
    watched = {call.target.resource for call in sandbox.proxy.calls if call.verb == "watch"}
    assert "multimodalinferences" in watched


@pytest.mark.timeout(300, func_only=True)
def test_readiness_names_what_is_not_watched(sandbox: Sandbox) -> None:
    """A thread that runs is no proof of a watch."""
    no_pods = faults.refuse(
        lambda call: call.verb == "watch" and call.target.resource == "pods", 403, times=None
    )
    sandbox.proxy.faults.append(no_pods)
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    wait_until("only pods are missing", lambda: "no watch of pods\n" in operator.ask("/readyz")[1])
    assert operator.ask("/readyz")[0] == 503
    assert operator.ask("/livez")[0] == 200
    sandbox.proxy.clear()
    operator.wait_ready()
