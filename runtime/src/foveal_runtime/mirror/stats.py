"""Plain counters of both halves of the mirror; telemetry/ turns them into metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ReceiverStats:
    """Counts since engine start. `rejects` by code; `dup_bytes` are values that came twice."""

    num_queries: int = 0
    num_hits: int = 0
    num_needs_stale: int = 0
    num_needs_pull: int = 0
    num_nofill: int = 0
    num_stray_fills: int = 0
    num_dup_values: int = 0
    dup_bytes: int = 0
    num_value_conflicts: int = 0
    num_bypass_requests: int = 0
    num_sessions_opened: int = 0
    num_binding_conflicts: int = 0
    value_bytes_received: int = 0
    rejects: dict[str, int] = field(default_factory=dict)
    session_ends: dict[str, int] = field(default_factory=dict)

    def count_reject(self, code: str) -> None:
        self.rejects[code] = self.rejects.get(code, 0) + 1

    def count_session_end(self, reason: str) -> None:
        self.session_ends[reason] = self.session_ends.get(reason, 0) + 1


@dataclass(slots=True)
class SenderStats:
    """Counts of one link since frontend start.

    Attributes:
        num_queries, num_hits: items sent, and those sent as a hash alone because believed.
        bytes_avoided: sizes of the hits. `bytes_sent` by kind: req, fill, put, shm.
        num_pulls: items sent without value for want of window. session_resets: by reason.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_pulls: int = 0
    bytes_avoided: int = 0
    num_needs: int = 0
    num_nofill: int = 0
    bytes_sent: dict[str, int] = field(
        default_factory=lambda: {"req": 0, "fill": 0, "put": 0, "shm": 0}
    )
    session_resets: dict[str, int] = field(default_factory=dict)

    def count_reset(self, reason: str) -> None:
        self.session_resets[reason] = self.session_resets.get(reason, 0) + 1
