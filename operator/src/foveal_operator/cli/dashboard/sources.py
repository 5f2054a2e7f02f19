"""Sources of the page's figures: the seam, and a Prometheus. Network: one GET for each query.

Used by job.py. Never follows a redirect (a token must not go elsewhere), never reads more
than MAX_ANSWER_BYTES, never writes.
"""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from foveal_operator.cli.dashboard.promql.samples import Line

MAX_ANSWER_BYTES = 64 << 20
TIMEOUT_SECONDS = 10.0


class SourceError(Exception):
    """No answer, or one that cannot be used. The message names the address and says why."""


class Source(Protocol):
    """Answers expressions over the page's times."""

    @property
    def times(self) -> Sequence[float]:
        """Seconds since the epoch, oldest first."""

    def ask(self, expr: str) -> list[Line]:
        """Raises SourceError."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def get(url: str, token: str = "") -> bytes:
    """The body of the answer. Raises SourceError."""
    host = urllib.parse.urlsplit(url).hostname or ""
    shown = url.partition("?")[0]
    # A proxy of the environment cannot reach this machine's own addresses.
    proxy = urllib.request.ProxyHandler({} if is_loopback(host) else None)
    opener = urllib.request.build_opener(proxy, _NoRedirect())
    request = urllib.request.Request(url, headers={"User-Agent": "foveal-dashboard"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            body: bytes = answer.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            told = f"{shown} answers {error.code} {error.reason}{_reason(error)}"
        raise SourceError(told) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise SourceError(f"{shown} does not answer: {why}") from error
    if len(body) > MAX_ANSWER_BYTES:
        raise SourceError(f"{shown} answers with more than {MAX_ANSWER_BYTES >> 20} MiB")
    return body


def _reason(error: urllib.error.HTTPError) -> str:
    """What a Prometheus says about a question it refuses; nothing otherwise."""
    if error.code in (301, 302, 303, 307, 308):
        return f" (moved to {error.headers.get('Location', '?')}: give that address)"
    try:
        said = msgspec.json.decode(error.read(4096))["error"]
        return f": {said}" if isinstance(said, str) else ""
    except (msgspec.DecodeError, KeyError, TypeError, OSError):
        return ""


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct, rename="camel"):
    result_type: str
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Data


class Prometheus:
    """Asks /api/v1/query_range over the last `since_seconds`, `num_steps` times.

    Args:
        base: its address, with a path prefix where it has one.
    """

    def __init__(
        self, base: str, *, now: float, since_seconds: float, num_steps: int, token: str = ""
    ) -> None:
        self._base, self._token = base.rstrip("/"), token
        self.step_seconds = max(1, math.ceil(since_seconds / num_steps))
        end = math.floor(now)
        steps = math.floor(since_seconds / self.step_seconds)
        first = end - steps * self.step_seconds
        self.times = [float(first + i * self.step_seconds) for i in range(steps + 1)]

    def ask(self, expr: str) -> list[Line]:
        query = urllib.parse.urlencode({
            "query": expr, "start": self.times[0], "end": self.times[-1],
            "step": self.step_seconds,
        })  # fmt: skip
        url = f"{self._base}/api/v1/query_range?{query}"
        body = get(url, self._token)
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except msgspec.DecodeError as error:
            raise SourceError(f"{self._base} does not answer as a Prometheus does: {error}; is "
                              "this its address?") from error  # fmt: skip
        return [
            Line(one.metric, tuple((time, float(value)) for time, value in one.values))
            for one in answer.data.result
        ]
