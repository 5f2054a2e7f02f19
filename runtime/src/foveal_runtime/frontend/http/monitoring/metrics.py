"""/metrics of a frontend process: its own series, and those of the peers it was told about.

Peers are engines (local mode) and the other HTTP processes behind the same port; each of those also
serves its own series alone, on a Unix socket or loopback port (`own_metrics_app`, or
`/metrics?own=1`), so that whichever process is asked shows all of them and nothing twice. Requests
of users never pass here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from prometheus_client import Metric as Family
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foveal_runtime.frontend.common.single_flight import SingleFlight
from foveal_runtime.plan.local import COUNTS_VARIABLE
from foveal_runtime.telemetry.exposition import (
    TEXT,
    PageFormat,
    accepted_format,
    format_of,
    merge,
    parse,
    render,
)
from foveal_runtime.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_UNREACHABLE = "foveal_metrics_peers_unreachable"
_PEER_SECONDS = 2.0
_LATE_SECONDS = 0.1
"""For a peer that the last page did without: a process that stands still holds one page up."""
_MAX_PEER_BYTES = 16 << 20


def counts_file(socket_path: str) -> Path:
    """Where the process of this socket keeps what it has counted: beside what a local deployment
    has of the frontend, which outlives the parent of its processes and their sockets."""
    own = Path(socket_path).with_suffix(".counts")
    named = os.environ.get(COUNTS_VARIABLE)
    return Path(f"{named}.{own.stem}") if named else own


class MetricsPage:
    """`peers`: http: URLs of /metrics pages, or unix:/path of sockets that serve one. `siblings`:
    the same for the other processes behind this port, which belong to `own` too."""

    def __init__(
        self, metrics: Metrics, peers: Sequence[str] = (), siblings: Sequence[str] = ()
    ) -> None:
        self._metrics = metrics
        self._peers = tuple(peers)
        self._siblings = tuple(siblings)
        self._last: dict[str, list[Family]] = {}
        """Of each peer, what others are added to."""
        self._missed: set[str] = set()
        self._asked: dict[str, asyncio.Task[list[Family] | None]] = {}
        self._pages: SingleFlight[tuple[str, bool], bytes] = SingleFlight()

    async def response(self, request: Request, *, own: bool = False) -> Response:
        """In the format that the request accepts."""
        form = accepted_format(request.headers.get("accept", ""))
        return _answer(await self.text(form, own=own), form)

    async def text(self, form: PageFormat = TEXT, *, own: bool = False) -> bytes:
        """Who asks while a page is being made gets that one: it takes much longer to make than to
        ask for, and nobody needs a key for it."""
        make = functools.partial(self._made, form, own=own)
        return await self._pages.run((form.content_type, own), make)

    async def _made(self, form: PageFormat, *, own: bool) -> bytes:
        """A peer that does not answer is left out and counted. What it last showed and others add
        to stays: a sum that fell would be taken for a restart, and all of it for new."""
        peers = self._siblings if own else (*self._siblings, *self._peers)
        if not peers:
            return await _written(self._metrics, form)
        found = await asyncio.gather(*(self._in_time(peer, form) for peer in peers))
        missing = [peer for peer, page in zip(peers, found, strict=True) if page is None]
        pages = [page for page in found if page is not None]
        pages += map(self._last_shown, missing)
        self._metrics.set(_UNREACHABLE, len(missing))
        mine = self._metrics.families()
        self._metrics.clear(_UNREACHABLE)  # of this answer alone: a sibling may ask for the next
        return await asyncio.to_thread(merge, [mine, *pages], form)

    def _last_shown(self, peer: str) -> list[Family]:
        if peer in self._siblings:
            return self._metrics.families_in(counts_file(peer.removeprefix("unix:")))
        return self._last.get(peer, [])

    async def _in_time(self, peer: str, form: PageFormat) -> list[Family] | None:
        """Whoever is late is asked on, and waited for again once it has answered."""
        asked = self._asked.get(peer)
        if asked is None:
            asked = self._asked[peer] = asyncio.create_task(self._fetch(peer, form))
            asked.add_done_callback(lambda _: self._asked.pop(peer))
        await asyncio.wait({asked}, timeout=_LATE_SECONDS if peer in self._missed else None)
        page = asked.result() if asked.done() else None
        if page is None:
            self._missed.add(peer)
        return page

    async def _fetch(self, peer: str, form: PageFormat) -> list[Family] | None:
        path = peer.removeprefix("unix:") if peer.startswith("unix:") else None
        connector = aiohttp.UnixConnector(path) if path is not None else aiohttp.TCPConnector()
        url = "http://localhost/metrics" if path is not None else peer
        timeout = aiohttp.ClientTimeout(total=_PEER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(
                    url, allow_redirects=False, headers={"accept": form.content_type}
                ) as response,
            ):
                body = await _read(response)
                found = format_of(response.headers.get("content-type", ""))
                if body is None:
                    return None
                page = await asyncio.to_thread(lambda: parse(body.decode(), found))
                self._last[peer] = [one for one in page if self._metrics.is_shared(one.name)]
                self._missed.discard(peer)
                return page
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            logger.debug("metrics peer", extra={"fields": {"peer": peer, "error": str(error)}})
            return None


async def _written(metrics: Metrics, form: PageFormat) -> bytes:
    """Read at once and written in a thread: the event loop has better to do."""
    return await asyncio.to_thread(render, metrics.families(), form)


def _answer(body: bytes, form: PageFormat) -> Response:
    return Response(body, headers={"content-type": form.content_type})


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    if response.status != 200:
        return None
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _MAX_PEER_BYTES:
            return None
    return bytes(body)


def own_metrics_app(metrics: Metrics) -> Starlette:
    """What a process serves to its peers: its own /metrics and /livez, nothing else."""

    async def page(request: Request) -> Response:
        form = accepted_format(request.headers.get("accept", ""))
        return _answer(await _written(metrics, form), form)

    async def livez(request: Request) -> Response:
        return Response(b'{"status":"ok","detail":""}', media_type="application/json")

    return Starlette(routes=[Route("/metrics", page), Route("/livez", livez)])
