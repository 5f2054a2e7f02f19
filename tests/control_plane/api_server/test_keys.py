"""The key Secret is deleted while pods run with its keys: all are replaced, none is left behind."""

from __future__ import annotations

import time

import pytest

from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import NO_LEASE, STEPS, run

SECRET = "qwen-curve"
GROUP = "foveal.dev/session-group"


def groups(sandbox: Sandbox) -> set[str]:
    """Of the pods there are, ready or not."""
    pods = [*sandbox.nodes.pods("engine"), *sandbox.nodes.pods("frontend")]
    return {pod["metadata"]["labels"][GROUP] for pod in pods}


@pytest.mark.timeout(600, func_only=True)
def test_a_deleted_key_secret_replaces_all_pods(sandbox: Sandbox) -> None:
    """Pods that start with new keys cannot talk to pods that run with the old ones."""
    sandbox.operator("a", NO_LEASE).start()
    run(sandbox, STEPS[0])
    before = groups(sandbox)
    assert len(before) == 1
    sandbox.api.delete("Secret", sandbox.namespace, SECRET).must()
    deleted = time.monotonic()
    wait_until("keys are there again", lambda: has_keys(sandbox), 60.0)
    try:
        wait_until(
            "all pods have them",
            lambda: (
                groups(sandbox).isdisjoint(before)
                and sandbox.nodes.are_ready("engine", 1)
                and sandbox.nodes.are_ready("frontend", 1)
                and sandbox.conditions(field="reason").get("Ready") == "Ready"
            ),
            120.0,
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{sandbox.told()}") from None
    print(f"all pods have new keys {time.monotonic() - deleted:.1f} s after the deletion")
    assert len(groups(sandbox)) == 1
    versions = sandbox.versions()
    sandbox.settled(quiet_seconds=6.0)  # a resync among them
    assert sandbox.versions() == versions


def has_keys(sandbox: Sandbox) -> bool:
    found = sandbox.api.get("Secret", sandbox.namespace, SECRET)
    return len((found or {}).get("data", {})) == 4
