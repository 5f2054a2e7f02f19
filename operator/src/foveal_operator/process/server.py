"""/livez, /readyz and /metrics of the operator. Reads, never changes anything.

Made by main.py with functions that answer: each returns "" when all is well, or why not.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from foveal_operator.telemetry.series import CONTENT_TYPE, Telemetry

Check = Callable[[], str]


class ProbeServer:
    """Args:
    live: a failing one asks the kubelet for a restart: only what a restart would cure.
    ready: a failing one says that this replica does not do its work, such as in an outage.
    before_scrape: brings gauges up to date.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        live: Mapping[str, Check],
        ready: Mapping[str, Check],
        before_scrape: Callable[[], None] = lambda: None,
    ) -> None:
        self._telemetry = telemetry
        self._before_scrape = before_scrape
        app = web.Application()
        app.router.add_get("/livez", _prober(live))
        app.router.add_get("/readyz", _prober({**live, **ready}))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)

    async def start(self, host: str, port: int) -> int:
        """On `host`, or on every address when it is "". Returns the port, which the system chooses
        when 0 was asked for. Raises OSError."""
        await self._runner.setup()
        if host:
            await web.TCPSite(self._runner, host, port).start()
        else:
            await web.SockSite(self._runner, _on_all_addresses(port)).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """All, or with `?name[]=...` (as Prometheus' own client does it) only what is named."""
        self._before_scrape()
        answer = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await answer.prepare(request)
        for piece in self._telemetry.exposition(request.query.getall("name[]", [])):
            await answer.write(piece)
            await asyncio.sleep(0)
        await answer.write_eof()
        return answer


def _on_all_addresses(port: int) -> socket.socket:
    """One socket for IPv4 and IPv6; for IPv4 alone where the kernel has no IPv6."""
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port))
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


def _prober(checks: Mapping[str, Check]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """One line for each check, like the API server's own; 503 when any of them fails."""

    async def answer(_: web.Request) -> web.Response:
        found = {name: check() for name, check in checks.items()}
        failed = any(found.values())
        lines = [f"[-]{n} {why}" if why else f"[+]{n} ok" for n, why in found.items()]
        lines.append("failed" if failed else "ok")
        return web.Response(text="\n".join(lines) + "\n", status=503 if failed else 200)

    return answer
