"""Media from http(s): and file: URLs, within limits, from allowed places only.

Called by input_processor. A host must be on the allow-list, and every address it resolves to must
be public: the check happens inside the resolver whose answer the connection uses, so a name that
changes its address between check and use gains nothing. Redirects are followed by hand, each hop
checked like the first. Never uses a proxy, cookies, credentials or content encodings.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from foveal_runtime.frontend.common.single_flight import SingleFlight
from foveal_runtime.frontend.media.addresses import IPAddress, is_host_allowed, refusal
from foveal_runtime.plan.config import MediaSources
from foveal_runtime.plan.errors import (
    FovealError,
    MediaFetchFailed,
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
)

_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)
_MAX_ATTEMPTS = 3
_RETRY_SECONDS = 0.2
_RETRIED = {429, 500, 502, 503, 504}
_CHUNK_BYTES = 256 * 1024
_MAX_URL_LENGTH = 8192
_URL_CHARS = "%:/?#[]@!$&'()*+,;="
"""That may stand in a URL, beside letters, digits and the four marks that `quote` never escapes."""

Charge = Callable[[int], None]
Resolve = Callable[[str, int], Any]


class _Retry(Exception):
    """The other side failed in a way that may pass."""


def _charge_nothing(num_bytes: int) -> None:
    """Nobody counts."""


class _Budget:
    """The size limit of one fetch, and who pays: only what is new is charged, retries are not."""

    def __init__(self, max_bytes: int, charge: Charge) -> None:
        self._max_bytes = max_bytes
        self._charge = charge
        self._charged = 0

    def announce(self, num_bytes: int) -> None:
        """The file has at least this many bytes. Raises MediaTooLarge or what `charge` raises."""
        if num_bytes > self._max_bytes:
            raise MediaTooLarge(
                f"media has {num_bytes} bytes or more, the limit is {self._max_bytes}"
            )
        if num_bytes > self._charged:
            self._charge(num_bytes - self._charged)
            self._charged = num_bytes


class Fetcher:
    """One per HTTP process. Identical URLs under way are fetched once.

    `resolve(host, port)` returns socket.getaddrinfo-like tuples; tests pass their own.
    """

    def __init__(self, sources: MediaSources, *, resolve: Resolve | None = None) -> None:
        self.sources = sources
        self.flights: SingleFlight[tuple[str, int, bytes], bytes] = SingleFlight()
        self.fetched_bytes = 0
        # By entry of the allow-list, "other" for the rest.
        self.failures = dict.fromkeys((*sources.allowed_domains, "other"), 0)
        self._resolve = resolve
        self._session: aiohttp.ClientSession | None = None

    async def fetch(
        self,
        url: str,
        *,
        max_bytes: int,
        charge: Charge = _charge_nothing,
        salt: bytes = b"",
    ) -> bytes:
        """The file behind a URL.

        `charge` is told the bytes as they are announced or arrive and may raise to stop; who joins
        a fetch under way is charged when it has landed. Only who has the same `salt` joins: a
        joined fetch would tell by its time that somebody else wants the URL. Raises MediaForbidden,
        MediaTooLarge, MediaInvalid (no such scheme) or MediaFetchFailed.
        """
        if ":" not in url:
            raise MediaInvalid(
                "media URL has no scheme; base64 needs data:<type>;base64, before it, and other "
                "URLs begin with https: or http:"
            )
        if len(url) > _MAX_URL_LENGTH:
            raise MediaInvalid(f"URL has {len(url)} characters, the limit is {_MAX_URL_LENGTH}")
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            work = self._fetch_http
        elif scheme == "file":
            work = self._fetch_file
        else:
            raise MediaInvalid(
                f"URL scheme {scheme[:16]!r} is not supported; use data:, https: or http:"
            )
        charged = 0

        def charge_more(num_bytes: int) -> None:
            nonlocal charged
            charge(num_bytes)
            charged += num_bytes

        try:
            data = await self.flights.run(
                (url, max_bytes, salt), lambda: work(url, max_bytes, charge_more)
            )
        except MediaFetchFailed:
            self._count_failure(url)
            raise
        if len(data) > charged:
            charge(len(data) - charged)
        return data

    def _count_failure(self, url: str) -> None:
        """Under the name on the allow-list that let it through: a set that a client cannot grow."""
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            host = ""
        names = self.sources.allowed_domains
        domain = next((name for name in names if is_host_allowed(host, (name,))), "other")
        self.failures[domain] = self.failures.get(domain, 0) + 1

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- file: ----------------------------------------------------------------------------------
    async def _fetch_file(self, url: str, max_bytes: int, charge: Charge) -> bytes:
        if not self.sources.file_root:
            raise MediaForbidden(
                "file: URLs are switched off: send a data: URL, or start the server with "
                "--file-root (security.mediaSources.localFiles)"
            )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise MediaInvalid("media URL is malformed") from error
        if parts.netloc not in ("", "localhost"):
            raise MediaForbidden("file: URLs cannot name a host")
        return await asyncio.to_thread(
            read_below, Path(self.sources.file_root), unquote(parts.path), max_bytes
        )

    # ---- http(s): -------------------------------------------------------------------------------
    async def _fetch_http(self, url: str, max_bytes: int, charge: Charge) -> bytes:
        budget = _Budget(max_bytes, charge)
        try:
            async with asyncio.timeout(self.sources.fetch_timeout_seconds):
                for attempt in range(_MAX_ATTEMPTS):
                    try:
                        return await self._follow(url, budget)
                    except _Retry as error:
                        if attempt + 1 == _MAX_ATTEMPTS:
                            raise MediaFetchFailed(
                                f"media could not be fetched: {error}"
                            ) from error
                        await asyncio.sleep(_RETRY_SECONDS * 2**attempt)
        except TimeoutError as error:
            raise MediaFetchFailed(
                f"media could not be fetched within {self.sources.fetch_timeout_seconds:g} s"
            ) from error
        raise AssertionError("unreachable")

    async def _follow(self, url: str, budget: _Budget) -> bytes:
        for _ in range(self.sources.max_redirects + 1):
            self.check_url(url)
            found = await self._get(url, budget)
            if isinstance(found, bytes):
                return found
            url = found
        raise MediaFetchFailed(f"media URL redirects more than {self.sources.max_redirects} times")

    def check_url(self, url: str) -> None:
        """Scheme, host and, for an address in place of a name, the address. No I/O.
        Raises MediaForbidden or MediaInvalid."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise MediaInvalid("media URL is malformed") from error
        if parts.scheme not in ("http", "https"):
            raise MediaForbidden("media URL leads to another scheme than http(s)")
        if not host:
            raise MediaInvalid("media URL has no host")
        if parts.username is not None or parts.password is not None:
            raise MediaForbidden("media URL holds credentials")
        if not is_host_allowed(host, self.sources.allowed_domains):
            raise MediaForbidden(
                f"host {host!r} is not allowed: send a data: URL, or start the server with "
                "--allowed-domain (security.mediaSources.allowedDomains)"
            )
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            # 0x7f.1, 2130706433 and 127.1 are addresses to some resolvers and names to others: what
            # ends in a number, as the URL standard has it. adac.de does not.
            if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
                raise MediaForbidden(f"host {host!r} is not a name") from None
            return
        self.check_address(address, host)

    def check_address(self, address: IPAddress, host: str) -> None:
        why = refusal(address, allow_private=self.sources.allow_private_addresses)
        if why:
            raise MediaForbidden(f"host {host!r} leads to a {why}")

    async def _get(self, url: str, budget: _Budget) -> bytes | str:
        """The body, or where a redirect leads."""
        try:
            async with self._open().get(_as_written(url), allow_redirects=False) as response:
                if response.status in (301, 302, 303, 307, 308):
                    location = response.headers.get("Location", "")
                    return urljoin(url, location)
                if response.status in _RETRIED:
                    raise _Retry(f"the server answered {response.status}")
                if response.status != 200:
                    raise MediaFetchFailed(
                        f"media could not be fetched: the server answered {response.status}"
                    )
                return await self._read(response, budget)
        except FovealError:
            raise
        except aiohttp.ClientConnectorDNSError as error:
            cause = _forbidden_cause(error)
            if cause is not None:
                raise cause from error
            raise MediaFetchFailed("media host cannot be resolved") from error
        except (aiohttp.ClientError, OSError) as error:
            cause = _forbidden_cause(error)
            if cause is not None:
                raise cause from error
            if isinstance(error, aiohttp.InvalidURL):
                raise MediaInvalid("media URL is malformed") from error
            # The error's text may hold addresses of the inside: only its kind is told.
            raise _Retry(type(error).__name__) from error

    async def _read(self, response: aiohttp.ClientResponse, budget: _Budget) -> bytes:
        budget.announce(response.content_length or 0)
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            budget.announce(len(data))
        self.fetched_bytes += len(data)
        return bytes(data)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_CheckedResolver(self), use_dns_cache=False, limit=64, limit_per_host=16
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "foveal"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def resolve(self, host: str, port: int) -> list[Any]:
        if self._resolve is not None:
            found: list[Any] = self._resolve(host, port)
            return found
        loop = asyncio.get_running_loop()
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _as_written(url: str) -> URL:
    """The URL for the connection. A signature covers its text, so escapes in it stay as they are,
    and only what no request line may hold is escaped. Raises MediaInvalid.

    Where that names another host than `check_url` was shown, it is read as a browser reads it."""
    try:
        written = URL(quote(url, safe=_URL_CHARS, errors="replace"), encoded=True)
        if (written.raw_host or "").lower() == urlsplit(url).hostname:
            return written
        return URL(url)
    except ValueError as error:
        raise MediaInvalid("media URL is malformed") from error


class _CheckedResolver(AbstractResolver):
    """What aiohttp connects to: only addresses that passed the check, all of them or none."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found: list[ResolveResult] = []
        for kind, _, proto, _, address in await self._fetcher.resolve(host, port):
            text = str(address[0]).partition("%")[0]
            try:
                self._fetcher.check_address(ipaddress.ip_address(text), host)
            except MediaForbidden as error:
                raise _ForbiddenAddress(error) from error
            found.append({
                "hostname": host, "host": text, "port": address[1], "family": kind,
                "proto": proto, "flags": socket.AI_NUMERICHOST,
            })  # fmt: skip
        if not found:
            raise OSError("no address")
        return found

    async def close(self) -> None:
        """Holds nothing."""


class _ForbiddenAddress(OSError):
    """Carries MediaForbidden through aiohttp, which lets only OSError out of a resolver."""

    def __init__(self, error: MediaForbidden) -> None:
        super().__init__(str(error))
        self.error = error


def _forbidden_cause(error: BaseException) -> MediaForbidden | None:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _ForbiddenAddress):
            return seen.error
        inner = getattr(seen, "os_error", None)
        seen = inner if isinstance(inner, BaseException) else seen.__cause__
    return None


def read_below(root: Path, path: str, max_bytes: int) -> bytes:
    """A regular file below `root`; neither `..` nor a symbolic link leads out of it.
    Raises MediaForbidden, MediaTooLarge or MediaFetchFailed."""
    if "\x00" in path:
        raise MediaForbidden("file: path holds a NUL")
    base = Path(os.path.realpath(root))
    wanted = Path(path)
    # file:///root/x and file:///x both mean x below the root.
    relative = wanted.relative_to(root) if wanted.is_relative_to(root) else Path(path.lstrip("/"))
    real = Path(os.path.realpath(base / relative))
    if not real.is_relative_to(base):
        raise MediaForbidden("file: path leads out of the folder of --file-root")
    try:
        handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MediaFetchFailed(f"file cannot be read: {error.strerror}") from error
    try:
        # Somebody may have swapped a directory for a link since: ask what was really opened.
        if not Path(os.readlink(f"/proc/self/fd/{handle}")).is_relative_to(base):
            raise MediaForbidden("file: path leads out of the folder of --file-root")
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise MediaForbidden("file: path is not a regular file")
        if status.st_size > max_bytes:
            raise MediaTooLarge(f"media has {status.st_size} bytes, the limit is {max_bytes}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise MediaFetchFailed(f"file cannot be read: {error.strerror}") from error
    finally:
        os.close(handle)
    if len(data) > max_bytes:
        raise MediaTooLarge(f"media has more than {max_bytes} bytes")
    return data
