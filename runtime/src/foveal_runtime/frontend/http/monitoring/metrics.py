"""/metrics of a frontend process: its own series, and those of the peers it was told about.

Peers are engines (local mode) and the other HTTP processes behind the same port; each of those
also serves its own series alone, on a Unix socket or loopback port (`own_metrics_app`, or
`/metrics?own=1`), so that whichever process is asked shows all of them and nothing twice. Counters
and histograms that have the same labels in two processes are added; of a gauge the larger value
stays (gauges that differ by process carry a `process` or `engine` label).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foveal_runtime.telemetry.metrics import CONTENT_TYPE, Metrics

logger = logging.getLogger(__name__)

_PEER_SECONDS = 2.0
_MAX_PEER_BYTES = 16 << 20


class MetricsPage:
    """`peers`: http: URLs of /metrics pages, or unix:/path of sockets that serve one. `siblings`:
    the same for the other processes behind this port, which belong to `own` too."""

    def __init__(
        self, metrics: Metrics, peers: Sequence[str] = (), siblings: Sequence[str] = ()
    ) -> None:
        self._metrics = metrics
        self._peers = tuple(peers)
        self._siblings = tuple(siblings)

    async def text(self, *, own: bool = False) -> bytes:
        """A peer that does not answer is left out and counted."""
        peers = self._siblings if own else (*self._siblings, *self._peers)
        if not peers:
            return self._metrics.exposition()
        found = await asyncio.gather(*(self._fetch(peer) for peer in peers))
        pages = [page for page in found if page is not None]
        self._metrics.set("foveal_metrics_peers_unreachable", len(found) - len(pages))
        return merge([parse(self._metrics.exposition().decode()), *pages])

    async def _fetch(self, peer: str) -> list[Family] | None:
        path = peer.removeprefix("unix:") if peer.startswith("unix:") else None
        connector = aiohttp.UnixConnector(path) if path is not None else aiohttp.TCPConnector()
        url = "http://localhost/metrics" if path is not None else peer
        timeout = aiohttp.ClientTimeout(total=_PEER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                body = await _read(response)
                return parse(body.decode()) if body is not None else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            logger.debug("metrics peer", extra={"fields": {"peer": peer, "error": str(error)}})
            return None


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
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def livez(request: Request) -> Response:
        return Response(b'{"status":"ok","detail":""}', media_type="application/json")

    return Starlette(routes=[Route("/metrics", page), Route("/livez", livez)])


SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def parse(text: str) -> list[Family]:
    """Raises ValueError for text that is not an exposition."""
    return list(text_string_to_metric_families(text))


def merge(expositions: Iterable[list[Family]]) -> bytes:
    """The union. Families whose type differs between processes keep the first one's series."""
    merged: dict[str, tuple[Family, dict[SampleKey, Sample]]] = {}
    for families in expositions:
        for family in families:
            known = merged.get(family.name)
            if known is None:
                known = merged[family.name] = (family, {})
            elif known[0].type != family.type:
                continue
            _add(known[1], family)
    out: list[Family] = []
    for family, samples in merged.values():
        union = Family(family.name, family.documentation, family.type)
        union.samples = list(samples.values())
        out.append(union)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(out))
    return generate_latest(registry)


def _add(samples: dict[SampleKey, Sample], family: Family) -> None:
    adds_up = family.type in ("counter", "histogram")
    for sample in family.samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        known = samples.get(key)
        if known is None:
            samples[key] = sample
        elif adds_up:
            samples[key] = known._replace(value=known.value + sample.value)
        else:
            samples[key] = known._replace(value=max(known.value, sample.value))
