"""Time and chance as a value that tests replace. Used by kube/ and process/."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec


def _boottime() -> float:
    """Seconds that also pass while the machine sleeps, where the system can tell them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def seconds(time: str | None) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 for none."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """`monotonic` seconds never go back; `wall` is UTC, only for what people read."""

    monotonic: Callable[[], float] = _boottime
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random

    def now_text(self) -> str:
        """RFC 3339, whole seconds."""
        return self.wall().strftime("%Y-%m-%dT%H:%M:%SZ")

    def now_micro(self) -> str:
        """RFC 3339 with microseconds: what Lease and Event want."""
        return self.wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
