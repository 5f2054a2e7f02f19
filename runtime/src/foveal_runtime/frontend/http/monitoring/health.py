"""Health of a frontend process: alive, serving, ready. Three questions with three answers.

- /livez: this process answers; restart it when it does not.
- /health: an engine answered a round trip and makes progress while it has work.
- /readyz: send traffic here: an engine session is up, the first image is warm, not draining.
"""

from __future__ import annotations

import asyncio
import time

from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.items.interfaces import Generator, InputProcessor

_ROUND_TRIP_SECONDS = 5.0
_REUSE_SECONDS = 1.0


class Health:
    """Answers are (ok, why not). A round trip is shared by probes that ask at the same time."""

    def __init__(
        self,
        generator: Generator,
        processor: InputProcessor,
        gate: Gate,
    ) -> None:
        self._generator = generator
        self._processor = processor
        self._gate = gate
        self._flight: asyncio.Task[tuple[bool, str]] | None = None
        self._known: tuple[float, tuple[bool, str]] | None = None

    async def engine_answers(self) -> tuple[bool, str]:
        if self._known is not None and time.monotonic() - self._known[0] < _REUSE_SECONDS:
            return self._known[1]
        if self._flight is None:
            self._flight = asyncio.create_task(self._round_trip())
            self._flight.add_done_callback(self._landed)
        return await asyncio.shield(self._flight)

    def _landed(self, task: asyncio.Task[tuple[bool, str]]) -> None:
        self._flight = None
        if not task.cancelled():
            self._known = (time.monotonic(), task.result())

    async def _round_trip(self) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(_ROUND_TRIP_SECONDS):
                ok = await self._generator.health()
        except TimeoutError:
            return False, f"no engine answered within {_ROUND_TRIP_SECONDS:g} s"
        except Exception as error:
            return False, f"{type(error).__name__} while asking an engine"
        return ok, "" if ok else "no engine makes progress"

    def ready(self) -> tuple[bool, str]:
        if self._gate.draining:
            return False, "shutting down"
        if self._gate.is_choked:
            return False, "request bodies that are still arriving take every place"
        if self._generator.num_ready_engines() == 0:
            return False, "no engine with a compatible session and a loaded model"
        if not self._processor.is_warm():
            return False, "the first image is not warm yet"
        return True, ""
