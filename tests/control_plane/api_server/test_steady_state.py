"""At rest nothing is written; what others change is repaired; the user's object is left alone."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.support.api_server.operator_process import RESYNC_SECONDS
from tests.support.api_server.programs import wait_until
from tests.support.api_server.scenarios import (
    NO_LEASE,
    STEP_SECONDS,
    STEPS,
    Children,
    is_over,
    run,
)
from tests.support.api_server.world import KIND, World, difference

CREATE = STEPS[0]
# make soak stays away for ten minutes.
ABSENCE_SECONDS = float(os.environ.get("FOVEAL_ABSENCE_SECONDS", "0"))


def num_writes(world: World) -> int:
    """But those to the Lease."""
    return sum(not call.is_lease for call, _ in world.proxy.writes)


@pytest.mark.timeout(600, func_only=True)
def test_at_rest_and_over_a_restart_nothing_is_written(world: World) -> None:
    operator = world.operator("a", NO_LEASE)
    operator.start()
    run(world, CREATE)
    versions, writes = world.versions(), num_writes(world)
    user = {k: v for k, v in (world.resource() or {}).items() if k != "status"}
    rest_until = time.monotonic() + 2.5 * RESYNC_SECONDS
    wait_until("two resyncs have passed", lambda: time.monotonic() > rest_until, 60)
    assert num_writes(world) == writes
    operator.kill()
    world.proxy.audit.forget("a")
    operator.start()
    operator.wait_ready()
    world.settled(quiet_seconds=RESYNC_SECONDS + 1.0)
    assert world.versions() == versions
    after = {k: v for k, v in (world.resource() or {}).items() if k != "status"}
    for obj in (user, after):  # the status is ours: its manager and the version may move
        obj["metadata"] = {k: v for k, v in obj["metadata"].items() if k not in MOVES}
    assert after == user


MOVES = ("managedFields", "resourceVersion")
DRIFT: list[tuple[str, str, Any]] = [
    ("Deployment", "qwen-frontend", {"spec": {"replicas": 5}}),
    ("Deployment", "qwen-frontend", {"spec": {"template": {"metadata": {"labels": {"x": "y"}}}}}),
    ("StatefulSet", "qwen-engine", {"spec": {"template": {"spec": {"priority": None}}}}),
    ("Service", "qwen", {"spec": {"ports": [{"name": "http", "port": 1, "targetPort": 1}]}}),
    ("NetworkPolicy", "qwen-engine", {"spec": {"ingress": []}}),
    ("ServiceAccount", "qwen", {"automountServiceAccountToken": True}),
]


@pytest.mark.timeout(600, func_only=True)
def test_what_others_change_is_repaired_and_what_is_not_ours_is_left(world: World) -> None:
    world.operator("a", NO_LEASE).start()
    wanted = run(world, CREATE)
    for kind, name, change in DRIFT:
        world.api.merge(kind, world.namespace, name, change, manager="somebody").must()
    for kind, name in (("NetworkPolicy", "qwen-frontend"), ("Service", "qwen-engine")):
        world.api.delete(kind, world.namespace, name).must()
    # A label and an annotation that we never set belong to whoever set them.
    note = {"metadata": {"annotations": {"example.org/note": "theirs"}}}
    world.api.merge("Service", world.namespace, "qwen", note, manager="somebody").must()

    def repaired() -> bool:
        children = world.children()
        children.get("Service/qwen", {}).get("metadata", {}).pop("annotations", None)
        template = children["Deployment/qwen-frontend"]["spec"]["template"]
        template["metadata"]["labels"].pop("x", None)
        return not difference(children, wanted)

    try:
        wait_until("drift is repaired", repaired, 30)
    except TimeoutError as error:
        what = difference(world.children(), wanted)
        raise AssertionError(f"{error}\n{what}\n{world.told()}") from None
    service = world.api.get("Service", world.namespace, "qwen")
    assert service is not None
    assert service["metadata"]["annotations"]["example.org/note"] == "theirs"


@pytest.mark.timeout(1800, func_only=True)
def test_without_an_operator_a_resource_can_be_deleted_and_changed(
    arena: World, expected: dict[str, Children]
) -> None:
    """No finalizer: deletion never waits for us. Changes made meanwhile are caught up with; prints
    how soon."""
    world = arena
    operator = world.operator("a", NO_LEASE)
    operator.start()
    run(world, CREATE)
    operator.kill()
    STEPS[1].act(world)
    until = time.monotonic() + ABSENCE_SECONDS
    wait_until("the absence is over", lambda: time.monotonic() > until, ABSENCE_SECONDS + 30)
    world.proxy.audit.forget("a")
    operator.start()
    returned = time.monotonic()
    wait_until("it is caught up with", lambda: is_over(world, STEPS[1]), STEP_SECONDS)
    seconds = time.monotonic() - returned
    print(f"away for {ABSENCE_SECONDS:.0f} s, caught up {seconds:.1f} s after its start")
    assert not difference(run(world, STEPS[1]), expected[STEPS[1].name])
    operator.kill()
    world.api.delete(KIND, world.namespace, "qwen").must()
    world.api.wait(KIND, world.namespace, "qwen", lambda obj: obj is None)
    wait_until("nothing of it is left", lambda: not world.children(), 60)
