"""The other HTTP processes behind a frontend's port.

Each process listens on a Unix socket that only its own user can open. There it shows its own
series, and takes the order to empty its processor cache, so that whichever process answers an
administrator empties all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from foveal_runtime.frontend.http.monitoring.metrics import own_metrics_app
from foveal_runtime.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

RESET_PATH = "/reset_processor_cache"
_SECONDS = 5.0


def socket_path(folder: str, index: int) -> str:
    return str(Path(folder) / f"{index}.sock")


class Siblings:
    """The other processes; `paths` are their sockets."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)

    @property
    def metrics_peers(self) -> tuple[str, ...]:
        return tuple(f"unix:{path}" for path in self.paths)

    async def reset_processor_caches(self) -> int:
        """Returns how many did it. One that is just starting has an empty cache anyway."""
        done = await asyncio.gather(*(self._reset(path) for path in self.paths))
        return sum(done)

    async def _reset(self, path: str) -> bool:
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(path),
                    timeout=aiohttp.ClientTimeout(total=_SECONDS),
                ) as session,
                session.post(f"http://localhost{RESET_PATH}") as answer,
            ):
                return answer.status == 204
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("a process of this frontend did not empty its cache: %s", error)
            return False


def sibling_app(metrics: Metrics, reset: Callable[[], None]) -> Starlette:
    """What this process serves to its siblings."""
    app = own_metrics_app(metrics)

    async def empty(request: Request) -> Response:
        reset()
        return Response(status_code=204)

    app.add_route(RESET_PATH, empty, methods=["POST"])
    return app
