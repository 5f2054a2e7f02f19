"""The book of requests that killed engines: one per process, equal everywhere at rest.

Held by each frontend (shared by its senders) and by each engine's receiver, and told with the
mirror's messages. Books are joined, never replaced: joining is commutative, associative and
idempotent, so that neither order, loss nor repetition of messages matters. Times are wall-clock
seconds of whoever noted them; nothing here reads a clock.
"""

from __future__ import annotations

from foveal_runtime.mirror.messages import Refusals
from foveal_runtime.plan.errors import RequestQuarantined

MAX_REFUSALS = 1024
QUARANTINE_SECONDS = 600.0


class RefusalBook:
    """Attributes: `entries`: request key → (when it was convicted, its shape). `cleared_at`: what
    was noted until then is forgotten, wherever it comes from."""

    def __init__(self) -> None:
        self.cleared_at = 0.0
        self.entries: dict[bytes, tuple[float, str]] = {}

    def snapshot(self) -> Refusals:
        found = sorted((key, at, shape) for key, (at, shape) in self.entries.items())
        return Refusals(self.cleared_at, tuple(found))

    def check(self, key: bytes, now: float, seconds: float = QUARANTINE_SECONDS) -> None:
        """Raises RequestQuarantined for the like of a request that killed engines."""
        if key not in self.entries:
            return
        left = self.entries[key][0] + seconds - now
        if left > 0:
            raise RequestQuarantined(
                "engines died while they ran this request, the same content with the same options; "
                f"it is refused for another {max(1, round(left))} s"
            )

    def join(self, told: Refusals) -> bool:
        """Takes in another book; True when something in it was new."""
        before = self.cleared_at, dict(self.entries)
        self.cleared_at = max(self.cleared_at, told.cleared_at)
        for key, at, shape in told.entries:
            self.entries[key] = max((at, shape), self.entries.get(key, (0.0, "")))
        kept = [(at, key, shape) for key, (at, shape) in self.entries.items()
                if at > self.cleared_at]  # fmt: skip
        newest = sorted(kept, reverse=True)[:MAX_REFUSALS]
        self.entries = {key: (at, shape) for at, key, shape in newest}
        return before != (self.cleared_at, self.entries)
