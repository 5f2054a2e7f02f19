"""Requests that may have killed an engine: tried again one at a time, and kept out once convicted.

Owned by the engine client. An engine that dies in the middle of its work tells, itself or through
its next process, which requests it may have died of; the others go on as if nothing had happened.
One that was the only suspect of an engine that failed by itself is convicted at once; any other
suspect goes on alone, that is, as the only suspect of this process, and is convicted when its next
engine dies too. Until the evidence is here, those that were new to the engine wait for it; where it
never comes, all of the engine's requests are suspects. What has got on for a few tokens is a
suspect no longer. Convictions are shared by all frontends (`mirror.refusals`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from foveal_runtime.frontend.engines.run import EngineRun, Fate, Life
from foveal_runtime.mirror.messages import Death, Refusals
from foveal_runtime.mirror.refusals import QUARANTINE_SECONDS, RefusalBook

EVIDENCE_SECONDS = 10.0
"""How long a request that was new to an engine which died waits to hear what it died of."""
MAX_EXPLAINED = 256
NUM_PROOFS = 2
"""Outputs of a new attempt that clear a suspect."""


_SUDDEN_ENDS = ("disconnected", "unknown_session")
"""Ends of sessions after which the next process may tell more."""


class Held(NamedTuple):
    """One kind of request that is refused now: for administrators."""

    key: bytes
    shape: str
    seconds_left: float


class Quarantine:
    """Attributes: `num_convicted` counts since the start; `book` is what all frontends share."""

    def __init__(
        self,
        *,
        turn_seconds: float = 30.0,
        seconds: float = QUARANTINE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._turn_seconds = turn_seconds
        self.evidence_seconds = min(EVIDENCE_SECONDS, turn_seconds / 3)
        self._seconds = seconds
        self._clock = clock
        self.book = RefusalBook()
        self._turn = asyncio.Lock()
        self._holder: EngineRun | None = None
        self._on_trial: dict[Life, EngineRun] = {}
        self._explained: OrderedDict[Life, None] = OrderedDict()
        self._deaths: OrderedDict[Life, Death | None] = OrderedDict()
        self._runs: dict[Life, set[EngineRun]] = {}  # that each engine has, or had when it ended
        self.num_convicted = 0

    # ---- what is kept out -----------------------------------------------------------------------
    def held(self) -> list[Held]:
        now = self._clock()
        return [
            Held(key, shape, at + self._seconds - now)
            for key, (at, shape) in self.book.entries.items()
            if at + self._seconds > now
        ]

    def __len__(self) -> int:
        return len(self.held())

    @property
    def num_deaths(self) -> int:
        """That are remembered."""
        return len(self._deaths)

    def check(self, run: EngineRun) -> None:
        """Raises RequestQuarantined for the like of a request that killed engines."""
        if self.book.entries:
            self.book.check(run.key, self._clock(), self._seconds)

    def convict(self, run: EngineRun) -> None:
        self.num_convicted += 1
        since = math.nextafter(self.book.cleared_at, math.inf)  # whatever clock cleared it
        self._note(run.key, max(self._clock(), since), run.shape)

    def _note(self, key: bytes, at: float, shape: str = "") -> None:
        self.book.join(Refusals(entries=((key, at, shape),)))

    def clear(self) -> int:
        """Forgets everything that is kept out, here and (once told) everywhere; returns how much
        it was."""
        num_held = len(self)
        newest = max((at for at, _ in self.book.entries.values()), default=0.0)
        self.book.join(Refusals(cleared_at=max(self._clock(), newest)))
        return num_held

    # ---- evidence -------------------------------------------------------------------------------
    def on_death(self, life: Life, death: Death | None) -> None:
        """An engine told how it ended; None: it did not know. Every frontend that hears of an only
        suspect keeps it out at once."""
        if self._deaths.get(life, ()) == death:
            return
        self._deaths[life] = death
        if len(self._deaths) > MAX_EXPLAINED:
            self._deaths.popitem(last=False)
        if death is not None and is_certain(death):
            self._note(death.suspects[0], min(death.at, self._clock()))

    def fate_of(
        self, run: EngineRun, life: Life, lost_at: float, boot: int | None, *, may_tell: bool
    ) -> Fate:
        """What became of an engine whose link broke. One that cannot be reached for as long as a
        request would wait for any engine is taken for dead.

        Args:
            boot: of the life that the endpoint has now; None: it cannot be reached.
            may_tell: the endpoint is still one of ours.
        """
        death = self._deaths.get(life)
        if death is not None:
            if run.key not in death.suspects:
                return "other"
            return "guilty" if is_certain(death) else "dead"
        if life in self._deaths:
            return "dead"
        if boot is not None:
            return "alive" if boot == life[1] else "dead"
        if may_tell and self.waits_for(run, life, lost_at):
            return "awaited"
        return "unknown" if time.monotonic() - lost_at < self._turn_seconds else "dead"

    def waits_for(self, run: EngineRun, life: Life, lost_at: float) -> bool:
        """Evidence may still come, and the run is new enough to be the likeliest suspect."""
        return (
            life in run.awaiting
            and life not in self._deaths
            and time.monotonic() - lost_at < self.evidence_seconds
        )

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
        self._forget(run)
        run.life, run.num_proofs = life, 0
        self._runs.setdefault(life, set()).add(run)
        if self._holder is run:
            self._on_trial[life] = run

    def got_on(self, run: EngineRun) -> None:
        run.num_proofs += 1
        if run.is_suspect and run.num_proofs >= NUM_PROOFS:
            run.acquit()
            self._leave_turn(run)

    def lost(self, run: EngineRun, life: Life, reason: str) -> None:
        """The engine's session ended with the run in it, unplanned."""
        is_new = run.num_proofs < NUM_PROOFS
        others = self._runs.get(life, ())
        death = self._deaths.get(life)
        is_named = death is not None and run.key in death.suspects
        if not is_named and (
            life in self._explained
            or self._on_trial.get(life, run) is not run
            or (not is_new and any(one.num_proofs < NUM_PROOFS for one in others))
        ):
            run.num_losses += 1  # another request is likelier to be the cause
            return
        if life in self._on_trial:
            self._explained[life] = None
            if len(self._explained) > MAX_EXPLAINED:
                self._explained.popitem(last=False)
        run.on_lost(*life)
        if is_new and reason in _SUDDEN_ENDS:
            run.awaiting.add(life)
        self._leave_turn(run)

    def leave(self, run: EngineRun) -> None:
        """The run is over, and its turn, if it had one."""
        self._forget(run)
        self._leave_turn(run)

    def _forget(self, run: EngineRun) -> None:
        runs = self._runs.get(run.life) if run.life else None
        if runs is not None and run.life is not None:
            runs.discard(run)
            if not runs:
                del self._runs[run.life]

    def _leave_turn(self, run: EngineRun) -> None:
        for life in [life for life, other in self._on_trial.items() if other is run]:
            del self._on_trial[life]
        if self._holder is run:
            self._holder = None
            self._turn.release()


def is_certain(death: Death) -> bool:
    """It failed by itself, and one request alone can be the cause."""
    return death.is_own and len(death.suspects) == 1
