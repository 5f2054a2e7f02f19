"""At rest nothing is written; what others change is repaired; the user's object is left alone."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.api_server.operator_process import RESYNC_SECONDS
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import KIND, Sandbox, difference
from tests.support.api_server.scenarios import (
    DRIFT,
    NO_LEASE,
    STEP_SECONDS,
    STEPS,
    Children,
    is_over,
    run,
)

CREATE = STEPS[0]
# make soak stays away for ten minutes.
ABSENCE_SECONDS = float(os.environ.get("FOVEAL_ABSENCE_SECONDS", "0"))


def num_writes(sandbox: Sandbox) -> int:
    """But those to the Lease."""
    return sum(not call.is_lease for call, _ in sandbox.proxy.writes)


@pytest.mark.timeout(600, func_only=True)
def test_at_rest_and_over_a_restart_nothing_is_written(sandbox: Sandbox) -> None:
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    run(sandbox, CREATE)
    versions, writes = sandbox.versions(), num_writes(sandbox)
    user = {k: v for k, v in (sandbox.resource() or {}).items() if k != "status"}
    rest_until = time.monotonic() + 2.5 * RESYNC_SECONDS
    wait_until("two resyncs have passed", lambda: time.monotonic() > rest_until, 60)
    assert num_writes(sandbox) == writes
    operator.kill()
    sandbox.proxy.audit.forget("a")
    operator.start()
    operator.wait_ready()
    sandbox.settled(quiet_seconds=RESYNC_SECONDS + 1.0)
    assert sandbox.versions() == versions
    after = {k: v for k, v in (sandbox.resource() or {}).items() if k != "status"}
    for obj in (user, after):  # the status is ours: its manager and the version may move
        obj["metadata"] = {k: v for k, v in obj["metadata"].items() if k not in MOVES}
    assert after == user


MOVES = ("managedFields", "resourceVersion")


@pytest.mark.timeout(600, func_only=True)
def test_what_others_change_is_repaired_and_what_is_not_ours_is_left(sandbox: Sandbox) -> None:
    sandbox.operator("a", NO_LEASE).start()
    wanted = run(sandbox, CREATE)
    for kind, name, change in DRIFT:
        sandbox.api.merge(kind, sandbox.namespace, name, change, manager="somebody").must()
    for kind, name in (("NetworkPolicy", "qwen-frontend"), ("Service", "qwen-engine")):
        sandbox.api.delete(kind, sandbox.namespace, name).must()
    # A label and an annotation that we never set belong to whoever set them.
    note = {"metadata": {"annotations": {"example.org/note": "theirs"}}}
    label = {"spec": {"template": {"metadata": {"labels": {"x": "y"}}}}}
    for kind, name, change in (("Service", "qwen", note), ("Deployment", "qwen-frontend", label)):
        sandbox.api.merge(kind, sandbox.namespace, name, change, manager="somebody").must()

    def repaired() -> bool:
        children = sandbox.children()
        children.get("Service/qwen", {}).get("metadata", {}).pop("annotations", None)
        template = children["Deployment/qwen-frontend"]["spec"]["template"]
        was_left = template["metadata"]["labels"].pop("x", "") == "y"
        return was_left and not difference(children, wanted)

    try:
        wait_until("drift is repaired", repaired, 30)
    except TimeoutError as error:
        what = difference(sandbox.children(), wanted)
        raise AssertionError(f"{error}\n{what}\n{sandbox.told()}") from None
    service = sandbox.api.get("Service", sandbox.namespace, "qwen")
    assert service is not None
    assert service["metadata"]["annotations"]["example.org/note"] == "theirs"


@pytest.mark.timeout(1800, func_only=True)
def test_without_an_operator_a_resource_can_be_deleted_and_changed(
    arena: Sandbox, expected: dict[str, Children]
) -> None:
    """No finalizer: deletion never waits for us. Changes made meanwhile are caught up with; prints
    how soon."""
    sandbox = arena
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    run(sandbox, CREATE)
    operator.kill()
    STEPS[1].act(sandbox)
    until = time.monotonic() + ABSENCE_SECONDS
    wait_until("the absence is over", lambda: time.monotonic() > until, ABSENCE_SECONDS + 30)
    sandbox.proxy.audit.forget("a")
    operator.start()
    returned = time.monotonic()
    wait_until("it is caught up with", lambda: is_over(sandbox, STEPS[1]), STEP_SECONDS)
    seconds = time.monotonic() - returned
    print(f"away for {ABSENCE_SECONDS:.0f} s, caught up {seconds:.1f} s after its start")
    assert not difference(run(sandbox, STEPS[1]), expected[STEPS[1].name])
    operator.kill()
    sandbox.api.delete(KIND, sandbox.namespace, "qwen").must()
    sandbox.api.wait(KIND, sandbox.namespace, "qwen", lambda obj: obj is None)
    wait_until("nothing of it is left", lambda: not sandbox.children(), 60)
