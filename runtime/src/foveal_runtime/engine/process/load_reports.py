"""Reports of an engine's load: what each frontend was told last, and whose turn is next.

Used by `core`. A report goes with each message of outputs. Frontends that have nothing else to hear
get one when the load has changed, but no more than `per_second` in all: an engine with a thousand
frontends has other things to do, and so has a frontend with hundreds of engines
(docs/concepts/scale.md). A change of load reaches every frontend in the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from foveal_runtime.wire.messages import EngineLoad, LoraReport

PER_SECOND = 1_000


class LoadSnapshot(NamedTuple):
    """What is told. `lora_version`: grows with every change of the adapters."""

    num_running: int
    num_waiting: int
    kv_permille: int
    draining: bool
    lora_version: int


_NEVER: tuple[int, LoadSnapshot | None] = 0, None


class LoadReports:
    """Of one engine.

    Args:
        loras: the adapters as they are now.
        pause_seconds: between two questions whose turn it is.

    Attributes:
        per_second: reports to all who have nothing else to hear, at most.
    """

    def __init__(self, loras: Callable[[], LoraReport], pause_seconds: float) -> None:
        self._loras = loras
        self._pause_seconds = pause_seconds
        self.per_second: float = PER_SECOND
        self._stamp = 0
        self._from = 0.0
        self._told: dict[str, tuple[int, LoadSnapshot]] = {}  # by session: stamp, and what it said

    def behind(self, sessions: Iterable[str], load: LoadSnapshot) -> list[str]:
        """Sessions that know of another load than this one."""
        return [fid for fid in sessions if self._told.get(fid, _NEVER)[1] != load]

    def whose_turn(self, behind: list[str], load: LoadSnapshot, now: float) -> Collection[str]:
        """Those of `behind` to be told now: who waited longest. Of a drain all hear at once, since
        their next requests must go elsewhere."""
        if load.draining:
            return set(behind)
        if not behind or now < self._from:
            return ()
        most = max(int(self.per_second * self._pause_seconds), 1)
        turn = heapq.nsmallest(most, behind, key=lambda fid: self._told.get(fid, _NEVER)[0])
        self._from = now + len(turn) / self.per_second
        return set(turn)

    def tell(self, fid: str, load: LoadSnapshot) -> EngineLoad:
        """The report for one session, which knows from now on."""
        _, told = self._told.get(fid, _NEVER)
        self._stamp += 1
        self._told[fid] = self._stamp, load
        has_news = told is None or told.lora_version != load.lora_version
        return EngineLoad(
            self._stamp, load.num_running, load.num_waiting, load.kv_permille / 1000,
            load.draining, self._loras() if has_news else None,
        )  # fmt: skip

    def forget(self, fid: str) -> None:
        """Its session is over."""
        self._told.pop(fid, None)
