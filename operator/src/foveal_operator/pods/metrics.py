"""The few series of a pod's /metrics that status and rollouts need, and what they add up to. Pure.

Names are plan.metrics'. Used by probes.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from foveal_runtime.plan.fetch_progress import FETCH_TOTAL_BYTES, FETCHED_BYTES, percent
from foveal_runtime.plan.metrics import by_name

SESSIONS = by_name("foveal_mirror_sessions").name
ENGINES_READY = by_name("foveal_engines_ready").name
RUNNING = by_name("vllm:num_requests_running").name
WAITING = by_name("vllm:num_requests_waiting").name
QUERIES = by_name("foveal_mirror_queries").name
NEEDS = by_name("foveal_mirror_needs").name
BUDGET = by_name("foveal_budget_bytes").name
PEAK = by_name("foveal_memory_peak_bytes").name
BUILD = by_name("foveal_build_info").name
_WANTED = (SESSIONS, ENGINES_READY, RUNNING, WAITING, QUERIES, NEEDS, BUDGET, PEAK, BUILD,
           FETCHED_BYTES, FETCH_TOTAL_BYTES)  # fmt: skip

WINDOW_SECONDS = 600.0
MIN_QUERIES = 1000
"""A rate over fewer is noise: the denominator is at least this."""
MAX_SAMPLES = 64


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of one pod.

    Attributes:
        engines_ready: of each process of a frontend pod, engines it has a session with.
        sessions: of an engine; None = it did not say.
        load: requests in an engine, running or waiting.
        measured: bytes by name of status.budgets; the larger of several processes.
        num_queries, num_stale: since the pod started.
        fetched_bytes, fetch_total_bytes: of a fetch Job's download; 0 = not known.
        version: of the runtime; "" = it did not say.
    """

    engines_ready: tuple[int, ...] = ()
    sessions: int | None = None
    load: int = 0
    measured: dict[str, int] = {}
    num_queries: int = 0
    num_stale: int = 0
    peak_bytes: int = 0
    fetched_bytes: int = 0
    fetch_total_bytes: int = 0
    version: str = ""


class History:
    """Counters of one pod over the last minutes, a bounded number of samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=MAX_SAMPLES)

    def add(self, now: float, figures: Figures) -> None:
        """A restarted container begins at zero again, and so does its history."""
        if self._samples and figures.num_queries < self._samples[-1][1]:
            self._samples.clear()
        if self._samples and figures.num_stale < self._samples[-1][2]:
            self._samples.clear()
        self._samples.append((now, figures.num_queries, figures.num_stale))
        while now - self._samples[0][0] > WINDOW_SECONDS and len(self._samples) > 1:
            self._samples.popleft()

    @property
    def growth(self) -> tuple[int, int]:
        """(queries, stale hints) over the window."""
        if not self._samples:
            return 0, 0
        first, last = self._samples[0], self._samples[-1]
        return last[1] - first[1], last[2] - first[2]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One pod with what it said; figures None = unknown."""

    pod: str
    group: str
    is_ready: bool
    figures: Figures | None
    history: History | None


class PodReports(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of one resource said last. Fields match status.Observed and RolloutView.

    Attributes:
        sessions: engine pod -> its sessions.
        load: engine pod -> requests in it.
        sessions_up, sessions_wanted: (frontend process, engine) pairs that are ready; -1 = unknown.
        silent: ready frontends of which no answer is known.
        stale_rate: stale hints per query over the last minutes.
        measured: bytes by name of status.budgets, the largest over pods.
        peaks: pod -> its self-reported peak memory in bytes.
        versions: pod -> version of its runtime.
        downloads: pod of a fetch Job -> percent of the model that it has.
        waits: pod -> why its volumes are not there (events.py).
        refused: KIND/NAME of a workload without pods -> why they cannot be created (events.py).
    """

    sessions: dict[str, int] = {}
    load: dict[str, int] = {}
    sessions_up: int = -1
    sessions_wanted: int = -1
    silent: tuple[str, ...] = ()
    stale_rate: float = 0.0
    measured: dict[str, int] = {}
    peaks: dict[str, int] = {}
    versions: dict[str, str] = {}
    downloads: dict[str, int] = {}
    waits: dict[str, str] = {}
    refused: dict[str, str] = {}


def read_figures(text: str) -> Figures:
    """Raises ValueError for text that is no exposition."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    engines_ready: dict[str, int] = {}
    measured: dict[str, int] = {}
    sessions: int | None = None
    version = ""
    load = num_queries = num_stale = peak_bytes = fetched_bytes = fetch_total_bytes = 0
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            name, labels, value = sample.name.removesuffix("_total"), sample.labels, sample.value
            if not 0 <= value < 2**53:  # also refuses what is not a number
                raise ValueError(f"{name} is {value}")
            if name == SESSIONS:
                sessions = int(value)
            elif name == ENGINES_READY:
                engines_ready[labels.get("process", "")] = int(value)
            elif name in (RUNNING, WAITING):
                load += int(value)
            elif name == QUERIES:
                num_queries += int(value)
            elif name == NEEDS and labels.get("why") == "stale":
                num_stale += int(value)
            elif name == BUDGET and labels.get("source") == "measured":
                part = labels.get("part", "")[:32]
                measured[part] = max(measured.get(part, 0), int(value))
            elif name == BUILD:
                version = labels.get("version", "")[:32]
            elif name == PEAK:
                peak_bytes = max(peak_bytes, int(value))
            elif name == FETCHED_BYTES:
                fetched_bytes = int(value)
            elif name == FETCH_TOTAL_BYTES:
                fetch_total_bytes = int(value)
    return Figures(
        engines_ready=tuple(engines_ready.values()),
        sessions=sessions,
        load=load,
        measured=measured,
        num_queries=num_queries,
        num_stale=num_stale,
        peak_bytes=peak_bytes,
        fetched_bytes=fetched_bytes,
        fetch_total_bytes=fetch_total_bytes,
        version=version,
    )


def report(
    engines: Sequence[Seen], frontends: Sequence[Seen], jobs: Sequence[Seen] = ()
) -> PodReports:
    """All pods together. A pod that said nothing counts nowhere; pods of Jobs count nowhere but
    in `downloads`."""
    everyone = [*engines, *frontends]
    known = {seen.pod: seen.figures for seen in everyone if seen.figures is not None}
    up, wanted = _pairs(engines, frontends)
    measured: dict[str, int] = {}
    for figures in known.values():
        for part, size in figures.measured.items():
            measured[part] = max(measured.get(part, 0), size)
    growth = [seen.history.growth for seen in everyone if seen.history is not None]
    num_queries, num_stale = sum(g[0] for g in growth), sum(g[1] for g in growth)
    names = {seen.pod for seen in engines}
    return PodReports(
        sessions={
            pod: figures.sessions
            for pod, figures in known.items()
            if pod in names and figures.sessions is not None
        },
        load={pod: figures.load for pod, figures in known.items() if pod in names},
        sessions_up=up,
        sessions_wanted=wanted,
        silent=tuple(seen.pod for seen in frontends if seen.is_ready and seen.figures is None),
        stale_rate=num_stale / max(num_queries, MIN_QUERIES),
        measured=measured,
        peaks={pod: figures.peak_bytes for pod, figures in known.items() if figures.peak_bytes},
        versions={pod: figures.version for pod, figures in known.items() if figures.version},
        downloads={seen.pod: done for seen in jobs if (done := _downloaded(seen)) is not None},
    )


def _downloaded(seen: Seen) -> int | None:
    if seen.figures is None:
        return None
    return percent(seen.figures.fetched_bytes, seen.figures.fetch_total_bytes)


def _pairs(engines: Sequence[Seen], frontends: Sequence[Seen]) -> tuple[int, int]:
    """(up, wanted) over ready frontends that answered and ready engines of their group."""
    up = wanted = 0
    answered = [f for f in frontends if f.is_ready and f.figures and f.figures.engines_ready]
    if not answered:
        return -1, -1
    for seen in answered:
        assert seen.figures is not None
        mine = sum(1 for engine in engines if engine.is_ready and engine.group == seen.group)
        for ready in seen.figures.engines_ready:
            # A session may outlive an engine's readiness for a moment; it counts no more then.
            up += min(ready, mine)
            wanted += mine
    return up, wanted
