"""One HTTP exchange with the API server: bytes out, bytes in. Used by cluster.py alone.

The official client loads the configuration (kubeconfig, service account, its rotating token); its
request path costs several times what the request itself does, so requests go straight through
aiohttp. Never retries, never looks into a body.
"""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from foveal_operator.kube.errors import Transient

Answer = tuple[int, Mapping[str, str], bytes]
USER_AGENT = "foveal-operator"
_JSON = "application/json"


def _proxy_of_environment(base: str) -> str | None:
    """HTTPS_PROXY and the like, unless NO_PROXY names the host, or a network that it is in."""
    parts, proxies = urllib.parse.urlsplit(base), urllib.request.getproxies()
    if not parts.hostname or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    if _is_in_network(parts.hostname, proxies.get("no", "")):
        return None
    return proxies.get(parts.scheme)


def _is_in_network(host: str, listed: str) -> bool:
    """Go's clients know networks in NO_PROXY, so clusters name their Services' network there;
    Python's library compares names only."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in listed.split(","):
        with contextlib.suppress(ValueError):
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return False


class Exchange:
    """Args:
    configuration: the official client's, as it loaded it.
    num_connections: at most so many at a time.
    """

    def __init__(self, configuration: Any, *, num_connections: int, timeout_seconds: float) -> None:
        self._configuration = configuration
        self._num_connections = num_connections
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._base = str(configuration.host).rstrip("/")
        self._proxy = configuration.proxy or _proxy_of_environment(self._base)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, method: str, target: str, data: bytes | None = None, content: str = _JSON
    ) -> Answer:
        """`target` is path and query, quoted. Raises Transient when there is no answer."""
        session = self._session
        if session is None:  # made inside the loop that it lives in
            session = self._session = self._open()
        headers = {"Accept": _JSON, "User-Agent": USER_AGENT}
        # Asked for every time: the client's hook reads a rotated token anew.
        token = await self._configuration.get_api_key_with_prefix("BearerToken", "authorization")
        if token:
            headers["Authorization"] = token
        if data is not None:
            headers["Content-Type"] = content
        try:
            async with session.request(
                method,
                URL(self._base + target, encoded=True),
                data=data,
                headers=headers,
                timeout=self._timeout,
                proxy=self._proxy,
                proxy_headers=self._configuration.proxy_headers,
                server_hostname=self._configuration.tls_server_name or None,
                skip_auto_headers=("Content-Type",),
            ) as answer:
                return answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            path = target.partition("?")[0]
            raise Transient(f"{method} {path}: {error or type(error).__name__}") from error

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=self._num_connections, ssl=self._ssl())
        # Not trust_env: it reads ~/.netrc before each request, in a thread.
        return aiohttp.ClientSession(connector=connector)

    def _ssl(self) -> ssl.SSLContext:
        """As the official client builds it."""
        found = self._configuration
        context = ssl.create_default_context(cafile=found.ssl_ca_cert, cadata=found.ca_cert_data)
        if found.cert_file:
            context.load_cert_chain(found.cert_file, keyfile=found.key_file)
        if not found.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if found.disable_strict_ssl_verification:
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context
