"""Requests that may have killed an engine: tried again one at a time, and kept out once convicted.

Owned by the engine client. All requests of an engine that died are suspects. A suspect goes on
alone, that is, as the only suspect of this process; when its engine dies too, it was the cause: it
ends with an error, its like is refused for a while, and whoever else was lost with that engine is
charged with nothing. What has got on for a few tokens is a suspect no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable

from foveal_runtime.frontend.engines.run import EngineRun
from foveal_runtime.plan.errors import RequestQuarantined

QUARANTINE_SECONDS = 600.0
MAX_HELD = 4096
MAX_EXPLAINED = 256
NUM_PROOFS = 2
"""Outputs of a new attempt that clear a suspect."""

Life = tuple[str, int]
"""(endpoint, boot) of an engine."""


class Quarantine:
    """Attributes: `num_convicted` counts since the start."""

    def __init__(
        self,
        *,
        turn_seconds: float = 30.0,
        seconds: float = QUARANTINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turn_seconds = turn_seconds
        self._seconds = seconds
        self._clock = clock
        self._held: OrderedDict[bytes, float] = OrderedDict()
        self._turn = asyncio.Lock()
        self._holder: EngineRun | None = None
        self._on_trial: dict[Life, EngineRun] = {}
        self._explained: OrderedDict[Life, None] = OrderedDict()
        self.num_convicted = 0

    # ---- what is kept out -----------------------------------------------------------------------
    def __len__(self) -> int:
        now = self._clock()
        while self._held and next(iter(self._held.values())) <= now:
            self._held.popitem(last=False)
        return len(self._held)

    def check(self, run: EngineRun) -> None:
        """Raises RequestQuarantined for the like of a request that killed engines."""
        if len(self) and run.key in self._held:
            left = self._held[run.key] - self._clock()
            raise RequestQuarantined(
                "engines died while they ran this request, the same content with the same options; "
                f"it is refused for another {max(1, round(left))} s"
            )

    def convict(self, run: EngineRun) -> None:
        self.num_convicted += 1
        self._held[run.key] = self._clock() + self._seconds
        self._held.move_to_end(run.key)
        if len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def clear(self) -> int:
        """Forgets everything that is kept out; returns how much it was."""
        num_held = len(self)
        self._held.clear()
        return num_held

    # ---- suspects -------------------------------------------------------------------------------
    async def wait_for_turn(self, run: EngineRun) -> None:
        """Before a suspect's next attempt. One that has waited for very long goes on beside the
        suspect whose turn it is, rather than fail."""
        if run.is_suspect and self._holder is not run:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._turn_seconds):
                    await self._turn.acquire()
                    self._holder = run

    def sent(self, run: EngineRun, life: Life) -> None:
        if self._holder is run:
            self._on_trial[life] = run
            run.num_proofs = 0

    def got_on(self, run: EngineRun) -> None:
        run.num_proofs += 1
        if run.is_suspect and run.num_proofs >= NUM_PROOFS:
            run.acquit()
            self.leave(run)

    def lost(self, run: EngineRun, life: Life) -> None:
        """The engine's session ended with the run in it, unplanned."""
        if life in self._explained or self._on_trial.get(life, run) is not run:
            run.num_losses += 1  # another request was on trial there
            return
        if life in self._on_trial:
            self._explained[life] = None
            if len(self._explained) > MAX_EXPLAINED:
                self._explained.popitem(last=False)
        run.on_lost(*life)
        self.leave(run)

    def leave(self, run: EngineRun) -> None:
        """The run's turn is over, if it had one."""
        for life in [life for life, other in self._on_trial.items() if other is run]:
            del self._on_trial[life]
        if self._holder is run:
            self._holder = None
            self._turn.release()
