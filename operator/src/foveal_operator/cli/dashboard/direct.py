"""Reads /metrics of frontends and engines, and answers the page's expressions itself.

Used by command.py where there is no Prometheus. Each target gets the label `pod`, which a
Prometheus would have from the cluster: the process's own name, or the target's address where there
are several targets. A target whose processes another target shows already is left out, else they
would count twice.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence

from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.cli.dashboard.promql.samples import (
    Labels,
    Line,
    Store,
    TooManySeriesError,
    parse,
)
from foveal_operator.cli.dashboard.sources import SourceError, get

Scrape = list[tuple[str, Labels, float]]
_STARTED = "process_start_time_seconds"


class Direct:
    """The targets' series since the first `scrape`.

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
