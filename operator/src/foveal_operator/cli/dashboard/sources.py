"""Sources of the page's figures: the seam, a Prometheus, and /metrics of the processes themselves.

Used by run.py. Network: one GET for each query or reading. Never follows a redirect (a token must
not go elsewhere), never reads more than MAX_ANSWER_BYTES, never writes.
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

from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.cli.dashboard.promql.samples import (
    Labels,
    Line,
    Store,
    TooManySeriesError,
    parse,
)

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


Scrape = list[tuple[str, Labels, float]]
_STARTED = "process_start_time_seconds"


class Direct:
    """The targets' series since the first `scrape`; answers the page's expressions itself.

    Where there is no Prometheus. Each target gets the label `pod`, which a Prometheus would have
    from the cluster: the process's own name, or the target's address where there are several
    targets. A target whose processes another target shows already is left out, else they would
    count twice.

    Attributes:
        targets: addresses that are read.
        notes: what the reader of the page must know: targets left out or lost.
    """

    def __init__(self, urls: Sequence[str], token: str = "") -> None:
        self.targets = list(dict.fromkeys(urls))
        self.notes: list[str] = []
        self._token = token
        self._store = Store()
        self._left_out: list[str] = []

    @property
    def times(self) -> Sequence[float]:
        """Of all scrapes but the first, which has nothing before it."""
        return list(self._store.times)[1:] or list(self._store.times)

    def ask(self, expr: str) -> list[Line]:
        return ask(self._store, expr, self.times)

    def scrape(self, now: float) -> None:
        """Reads every target once. After the first time a target may be missing: a note says so.

        Raises:
            SourceError: at the first time, for any target; later, when none answers.
        """
        found: dict[str, Scrape] = {}
        missing: list[SourceError] = []
        for url in self.targets:
            try:
                found[url] = self._read(url)
            except SourceError as error:
                missing.append(error)
        is_first = not self._store.times
        if missing and (is_first or not found):
            raise missing[0]
        if is_first:
            self._leave_out(found)
        self.notes = [*self._left_out, *map(str, missing)]
        try:
            self._store.add(now, [one for url in found for one in self._named(url, found[url])])
        except TooManySeriesError as error:
            raise SourceError(f"{self.targets[0]} shows {error}") from error

    def _read(self, url: str) -> Scrape:
        body = get(url, self._token)
        try:
            samples = parse(body.decode("utf-8"), {})
        except ValueError as error:
            raise SourceError(f"{url} answers something other than metrics: {error}") from error
        if not any(name.startswith(("foveal_", "vllm:")) for name, _, _ in samples):
            raise SourceError(f"{url} shows no metrics of Foveal; give a frontend's or an "
                              "engine's /metrics")  # fmt: skip
        return samples

    def _leave_out(self, found: dict[str, Scrape]) -> None:
        """A frontend may show other processes of its machine beside itself."""
        known: dict[tuple[str, float], str] = {}
        sizes = {url: len(_processes(samples)) for url, samples in found.items()}
        for url in sorted(found, key=lambda one: -sizes[one]):
            processes = _processes(found[url])
            shared = [known[one] for one in processes if one in known]
            if shared:
                self._left_out.append(f"{url} shows processes that {shared[0]} shows: left out")
                del found[url]
                self.targets.remove(url)
            known.update(dict.fromkeys(processes - known.keys(), url))

    def _named(self, url: str, samples: Scrape) -> Scrape:
        address = urllib.parse.urlsplit(url).netloc
        if len(self.targets) > 1:
            return [(name, _with_pod(labels, address), value) for name, labels, value in samples]
        return [
            (name, _with_pod(labels, _own_name(labels) or address), value)
            for name, labels, value in samples
        ]


def _processes(samples: Scrape) -> set[tuple[str, float]]:
    """(name, start) of each process that the samples are about."""
    return {
        (dict(labels).get("process", ""), value)
        for name, labels, value in samples
        if name == _STARTED
    }


def _own_name(labels: Labels) -> str:
    known = dict(labels)
    return known.get("process") or known.get("engine") or ""


def _with_pod(labels: Labels, pod: str) -> Labels:
    known = dict(labels)
    return labels if "pod" in known else tuple(sorted([*labels, ("pod", pod)]))
