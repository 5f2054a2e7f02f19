"""What pods say of themselves over HTTP: sessions, cache sizes, memory. Bounded, never an error.

Called by the reconciler; one PodProber lives as long as the operator and asks no pod more often
than its interval. A pod that does not answer in time is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

Obj = Mapping[str, Any]
Fetch = Callable[[str, float], Awaitable[str]]
"""(url, timeout in seconds) -> body. Raises OSError, TimeoutError or ValueError."""


class PodReports(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of one resource said last. Fields match status.Observed and RolloutView.

    Attributes:
        sessions: engine pod -> its sessions.
        load: engine pod -> requests in it.
        sessions_up, sessions_wanted: (frontend process, engine) pairs; -1 = not known.
        stale_rate: stale hints per query since the last two answers of each frontend.
        measured: bytes by budget name of status.budgets, the largest over pods.
        peaks: pod -> its self-reported peak memory in bytes.
        unknown: pods that should have answered and did not.
    """

    sessions: dict[str, int] = {}
    load: dict[str, int] = {}
    sessions_up: int = -1
    sessions_wanted: int = -1
    stale_rate: float = 0.0
    measured: dict[str, int] = {}
    peaks: dict[str, int] = {}
    unknown: tuple[str, ...] = ()


class PodProber:
    """Asks pods' /metrics, a bounded number at a time.

    Args:
        fetch: the seam; `aiohttp_fetch(session)` in the operator, a fake in tests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        clock: Callable[[], float],
        max_in_flight: int = 16,
        interval_seconds: float = 15.0,
        timeout_seconds: float = 2.0,
    ) -> None:
        raise NotImplementedError

    async def observe_pods(
        self, engine_pods: Sequence[Obj], frontend_pods: Sequence[Obj]
    ) -> PodReports:
        """The latest answers of these pods, at most `interval_seconds` old. Never raises."""
        raise NotImplementedError

    def forget(self, pod_uids: set[str]) -> None:
        """Drops what is kept of pods that are gone."""
        raise NotImplementedError
