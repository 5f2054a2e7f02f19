"""Changes of a resource under load, and what is seen while its pods are replaced."""

from __future__ import annotations

import time
from typing import NamedTuple

from tests.support.node import commands
from tests.support.node.questions import asking


def ready(role: str, name: str = "tiny") -> list[str]:
    """Names of the pods of a role that are Ready."""
    found = commands.pods(role, name).items()
    return [
        pod_name for pod_name, pod in found
        if any(c["type"] == "Ready" and c["status"] == "True"
               for c in pod["status"].get("conditions", []))
    ]  # fmt: skip


class Roll(NamedTuple):
    """What was seen while pods were replaced: answers, and how many pods there were and served."""

    answered: int
    most_pods: int
    least_ready: int


def roll(url: str, spec: commands.Obj, role: str, name: str = "tiny") -> Roll:
    """Changes the spec under load, until no old pod of the role is left. No request may fail: what
    an engine was doing goes on elsewhere."""
    old = commands.uids(commands.pods(role, name))
    counts = [(len(old), len(ready(role, name)))]
    started = time.monotonic()

    def is_done() -> bool:
        counts.append((len(commands.pods(role, name)), len(ready(role, name))))
        now = commands.uids(commands.pods(role, name))
        return commands.is_current(name) and not old & now and len(now) == len(old)

    with asking(url) as asker:
        commands.patch(name, spec)
        commands.until("Ready with the change, no old pods", is_done, 800)
    found = Roll(asker.answered, max(n for n, _ in counts), min(n for _, n in counts))
    print(f"{role}s rolled in {time.monotonic() - started:.0f} s: {found}")
    assert asker.failures == []
    assert found.answered > 0
    return found
