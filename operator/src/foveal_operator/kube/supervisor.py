"""Supervisor of the watches: one watch engine, restarted when it has ended or gone silent.

Used by process/main.py, over the engine of kopf_watch.py. Decides by what the engine reports, never
by what the API server says; never touches the caches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from foveal_operator.common.clock import Clock
from foveal_operator.kube.kinds import Kind

log = logging.getLogger(__name__)

# The time an engine has to bring all of its watches up, discovery and first lists included.
START_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 2.0
MAX_PAUSE_SECONDS = 300.0


class Watches(Protocol):
    """One life of the watches over a set of kinds."""

    @property
    def is_alive(self) -> bool: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def lookup_silent(self) -> tuple[str, ...]:
        """Names of what no watch is known to follow now."""
        ...


class WatchKeeper:
    """Args:
    make: an engine for these kinds, not started.
    """

    def __init__(self, make: Callable[[tuple[Kind, ...]], Watches], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._engine: Watches | None = None
        self.kinds: tuple[Kind, ...] = ()
        self._started = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self.num_restarts = 0

    def start(self, kinds: tuple[Kind, ...]) -> None:
        """Watches these kinds from now on, and no others."""
        self.stop()
        self.kinds = kinds
        self._started = self._clock.monotonic()
        self._engine = self._make(kinds)
        self._engine.start()

    def stop(self) -> None:
        """Asks the engine to end and does not wait: it has nothing to save."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def lookup_trouble(self) -> str:
        """What is not watched, in words; "" while all is."""
        if self._engine is None:
            return "the watches have not been started"
        if not self._engine.is_alive:
            return "the watches have ended"
        silent = self._engine.lookup_silent()
        return f"no watch of {', '.join(silent)}" if silent else ""

    def restart_if_due(self) -> bool:
        """Call every few seconds once started. True when the watches were started anew.

        A dead engine is replaced at once, a deaf one after START_SECONDS; the next time not before
        a pause that doubles up to MAX_PAUSE_SECONDS and is short again once all was well.
        """
        trouble = self.lookup_trouble()
        if not trouble:
            self._pause_seconds = FIRST_PAUSE_SECONDS
            return False
        age = self._clock.monotonic() - self._started
        is_alive = self._engine is not None and self._engine.is_alive
        if age < max(self._pause_seconds, START_SECONDS if is_alive else 0.0):
            return False
        log.error("%s: restarting the watches", trouble)
        self._pause_seconds = min(MAX_PAUSE_SECONDS, 2.0 * self._pause_seconds)
        self.num_restarts += 1
        self.start(self.kinds)
        return True
