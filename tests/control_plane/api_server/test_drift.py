"""What others change is repaired because the watch tells of it, not at the next full look (G15).

The goal is two seconds; a test on a shared machine asserts no time, so it prints what it took
(`pytest -s`) and forbids the slow way: the next full look is ten minutes away.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import DRIFT, NO_LEASE, STEPS, run

DELETED = (
    ("NetworkPolicy", "qwen-frontend"), ("Service", "qwen-engine"), ("ServiceAccount", "qwen"),
    ("Deployment", "qwen-frontend"), ("StatefulSet", "qwen-engine"),
)  # fmt: skip
"""Not the Secret: nobody may read it, so no watch tells of it (test_keys.py)."""


def there(sandbox: Sandbox, kind: str, name: str) -> dict[str, Any] | None:
    obj = sandbox.api.get(kind, sandbox.namespace, name)
    return None if obj is None else sandbox.normal({**obj, "kind": kind})


@pytest.mark.timeout(300, func_only=True)
def test_each_change_and_each_deletion_is_repaired_from_the_watch(sandbox: Sandbox) -> None:
    sandbox.operator("a", NO_LEASE, "--resync-seconds=600").start()
    run(sandbox, STEPS[0])
    took: dict[str, float] = {}

    def repaired(what: str, kind: str, name: str, before: object, began: float) -> None:
        wait_until(f"{what} is repaired", lambda: there(sandbox, kind, name) == before, 60)
        took[f"{len(took)} {what}"] = time.monotonic() - began

    for kind, name, change in DRIFT:
        before, began = there(sandbox, kind, name), time.monotonic()
        written = sandbox.api.merge(kind, sandbox.namespace, name, change, manager="somebody")
        assert sandbox.normal({**written.must(), "kind": kind}) != before, "nothing was changed"
        repaired(f"{kind} {next(iter(change))}", kind, name, before, began)
        sandbox.settled(0.5)
    for kind, name in DELETED:
        before, began = there(sandbox, kind, name), time.monotonic()
        assert before is not None
        sandbox.api.delete(kind, sandbox.namespace, name).must()
        repaired(f"{kind} deleted", kind, name, before, began)
    print("\n" + "\n".join(f"{seconds:6.2f} s  {what}" for what, seconds in took.items()))
