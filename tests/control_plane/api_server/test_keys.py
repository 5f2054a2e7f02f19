"""The key Secret is deleted while pods run with its keys: all are replaced, none is left behind."""

from __future__ import annotations

import time

import pytest

from tests.support.api_server.programs import wait_until
from tests.support.api_server.scenarios import NO_LEASE, STEPS, run
from tests.support.api_server.world import World

SECRET = "qwen-curve"
GROUP = "foveal.dev/session-group"


def groups(world: World) -> set[str]:
    """Of the pods there are, ready or not."""
    pods = [*world.nodes.pods("engine"), *world.nodes.pods("frontend")]
    return {pod["metadata"]["labels"][GROUP] for pod in pods}


@pytest.mark.timeout(600, func_only=True)
def test_a_deleted_key_secret_replaces_all_pods(world: World) -> None:
    """Pods that start with new keys cannot talk to pods that run with the old ones."""
    world.operator("a", NO_LEASE).start()
    run(world, STEPS[0])
    before = groups(world)
    assert len(before) == 1
    world.api.delete("Secret", world.namespace, SECRET).must()
    deleted = time.monotonic()
    wait_until("keys are there again", lambda: has_keys(world), 60.0)
    try:
        wait_until(
            "all pods have them",
            lambda: (
                groups(world).isdisjoint(before)
                and world.nodes.are_ready("engine", 1)
                and world.nodes.are_ready("frontend", 1)
                and world.conditions(field="reason").get("Ready") == "Ready"
            ),
            120.0,
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{world.told()}") from None
    print(f"all pods have new keys {time.monotonic() - deleted:.1f} s after the deletion")
    assert len(groups(world)) == 1
    versions = world.versions()
    world.settled(quiet_seconds=6.0)  # a resync among them
    assert world.versions() == versions


def has_keys(world: World) -> bool:
    found = world.api.get("Secret", world.namespace, SECRET)
    return len((found or {}).get("data", {})) == 4
