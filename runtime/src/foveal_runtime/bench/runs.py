"""Paired, alternating runs: every trace, every round, every server, one after the other.

A round is one seed: all servers see the same requests, right after each other, and the order turns
around from round to round, so that a machine that gets slower or a neighbour that comes and goes
meets all alike. A new round is a new seed, or caches would make it another trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import sleep as rest
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from foveal_runtime.bench.client import REQUEST_SECONDS, Replay, Reply, Target, get
from foveal_runtime.bench.images import ImageKind, data_url
from foveal_runtime.bench.result import RunResult, summarize
from foveal_runtime.bench.traces import USUAL_REQUESTS, Trace, make_trace, poisson_starts

WARM_SEED = 999_999
AGAIN_SEED = 1_000_000_000


class BenchLoad(NamedTuple):
    """`concurrency`: conversations at a time, 0: no limit. `rate`: arrivals a second, 0: at once.

    A kind may say its own: `text@32` has 32 conversations at a time, and at least 64 requests.
    `saved`: replayed instead of kinds; at its own times when both `rate` and `concurrency` are 0.
    """

    kinds: tuple[str, ...]
    num_requests: int = 24
    concurrency: int = 4
    rate: float = 0.0
    max_tokens: int = 16
    num_words: int = 50
    image: ImageKind = ImageKind()
    saved: Trace | None = None
    timeout_seconds: float = REQUEST_SECONDS

    def trace(self, kind: str, seed: int, num_requests: int = -1) -> Trace:
        """Of the same seed, each concurrency has other images and texts."""
        plain, own = split_kind(kind)
        num = self.num_requests if num_requests < 0 else num_requests
        if num or own:
            num = max(num or USUAL_REQUESTS.get(plain, 24), 2 * own)
        seed += 10_000 * own
        made = make_trace(plain, seed, num, num_words=self.num_words, max_tokens=self.max_tokens)
        return made._replace(name=kind)


def split_kind(kind: str) -> tuple[str, int]:
    """Name and concurrency of `text@32`; 0 where none is said. Raises ValueError."""
    plain, _, own = kind.partition("@")
    number = int(own) if own else 0
    if number < 0 or (own and not number):
        raise ValueError(f"{kind}: the concurrency must be at least 1")
    return plain, number


class PlannedRun(NamedTuple):
    """One run to come."""

    kind: str
    round: int
    seed: int
    server: int


def schedule(
    kinds: Sequence[str], num_rounds: int, num_servers: int, seed: int
) -> list[PlannedRun]:
    """All runs in order: rounds outside, traces inside, servers turned around every round."""
    steps = []
    for number in range(num_rounds):
        order = list(range(num_servers))
        if number % 2:
            order.reverse()
        for kind in kinds:
            steps += [PlannedRun(kind, number, seed + number, server) for server in order]
    return steps


class RunProgress:
    """What is told while runs go on; the default says nothing."""

    def stage(self, title: str, total: int) -> None:
        """A new stage of `total` steps begins."""

    def advance(self) -> None:
        """One step is done."""


REST_SECONDS = 2.0
"""Between two servers: vLLM keeps a core busy for a second after its last answer, which the next
one would have to share (24 November 2026)."""

Costs = Mapping[str, Any]
Meter = Callable[[Target], Callable[[], Costs]]
"""Called before a run; what it returns is called after it, for fields of its RunResult."""


def no_costs(target: Target) -> Callable[[], Costs]:
    return dict


def run_all(
    targets: Sequence[Target],
    load: BenchLoad,
    num_rounds: int,
    seed: int,
    progress: RunProgress,
    meter: Meter = no_costs,
) -> Iterator[RunResult]:
    """Runs everything on servers that are up; yields results as they come."""
    saved, kinds = load.saved, load.kinds
    for target in targets:  # first requests load lazily in every server
        trace = load.trace("text" if saved else kinds[0], WARM_SEED, 4)
        run_one(target, trace, load, WARM_SEED, draw_all(trace, load, progress), progress, no_costs)
    urls: dict[int, str] = {}
    drawn_for: tuple[str, int] | None = None
    for step in schedule((saved.name,) if saved else kinds, num_rounds, len(targets), seed):
        target = targets[step.server]
        # A server beside itself would answer the second time from what it remembers of the first.
        before = [other.urls for other in targets[: step.server]].count(target.urls)
        seed_here = step.seed + AGAIN_SEED * before
        trace = saved or load.trace(step.kind, seed_here)
        if drawn_for != (step.kind, seed_here):
            urls, drawn_for = draw_all(trace, load, progress), (step.kind, seed_here)
        if len(targets) > 1:
            rest(REST_SECONDS)
        result = run_one(target, trace, load, seed_here, urls, progress, meter)
        result.round = step.round
        yield result


def draw_all(trace: Trace, load: BenchLoad, progress: RunProgress) -> dict[int, str]:
    """Data URLs of all images of the trace."""
    images = trace.images
    if images:
        progress.stage(f"{trace.name}: drawing images", len(images))
    urls = {}
    for image in images:
        urls[image] = data_url(image, load.image)
        progress.advance()
    return urls


def run_one(
    target: Target,
    trace: Trace,
    load: BenchLoad,
    seed: int,
    urls: dict[int, str],
    progress: RunProgress,
    meter: Meter,
) -> RunResult:
    """One trace on one server, with what it cost."""
    progress.stage(f"{trace.name}, seed {seed}: {target.name}", trace.num_requests)
    before = read_hits(metrics(target))
    costs = meter(target)
    replies, seconds = _replay(target, trace, urls, load, seed, lambda _: progress.advance())
    return msgspec.convert(
        {
            "server": target.name,
            "trace": trace.name,
            "seed": seed,
            "round": 0,
            **costs(),
            "hit_rates": hit_rates(before, read_hits(metrics(target))),
            **summarize(replies, seconds),
        },
        RunResult,
    )


def metrics(target: Target) -> str:
    """The text of the server's /metrics; "" where there is none."""
    try:
        return get(target, "/metrics", 10).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException):
        return ""


def _replay(
    target: Target,
    trace: Trace,
    urls: dict[int, str],
    load: BenchLoad,
    seed: int,
    on_reply: Callable[[Reply], None],
) -> tuple[list[Reply], float]:
    own = 0 if load.saved else split_kind(trace.name)[1]
    concurrency = own or load.concurrency
    starts: Sequence[float] = ()
    if load.rate:
        starts = poisson_starts(seed, len(trace.conversations), load.rate)
    elif not concurrency:
        starts = trace.starts
    replay = Replay(target, trace, urls, on_reply, load.timeout_seconds)
    return asyncio.run(replay.run(concurrency, starts))


HITS: dict[str, tuple[str, str, dict[str, str]]] = {
    "media": ("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total", {}),
    "prefix": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", {}),
    "processor": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "processor"}),
    "ipc": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "ipc"}),
    "encoder": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "encoder"}),
}
"""By cache: the counter of hits, that of lookups, labels of both. vLLM and Foveal export the same
names for the same things; a server without /metrics has no rows here."""

Counts = dict[str, tuple[float, float]]


def read_hits(exposition: str) -> Counts:
    """(hits, lookups) by cache, as /metrics counts them; without those it does not mention."""
    sums: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    with contextlib.suppress(ValueError):  # a page that is something else
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                sums.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(name: str, labels: Mapping[str, str]) -> float:
        return sum(v for have, v in sums[name] if labels.items() <= have.items())

    found: Counts = {}
    for cache, (hits, lookups, labels) in HITS.items():
        if hits in sums and lookups in sums:
            found[cache] = (total(hits, labels), total(lookups, labels))
    return found


def hit_rates(before: Counts, after: Counts) -> dict[str, float]:
    """Hits per lookup between two readings; caches without lookups are left out."""
    rates = {}
    for cache, (hits, lookups) in after.items():
        old_hits, old_lookups = before.get(cache, (0.0, 0.0))
        if lookups > old_lookups:
            rates[cache] = (hits - old_hits) / (lookups - old_lookups)
    return rates
