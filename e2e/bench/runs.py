"""Paired, alternating runs: every trace, every round, every server, one after the other.

A round is one seed: all servers see the same requests, right after each other, and the order turns
around from round to round, so that a machine that gets slower or a neighbour that comes and goes
meets all alike. A new round is a new seed, or caches would make it another trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from e2e.bench import counters, processes
from e2e.bench.client import Replay, Reply
from e2e.bench.pictures import PictureKind, data_url
from e2e.bench.report.result import Result, summarize
from e2e.bench.servers import Server
from e2e.bench.trace import Trace, make_trace, poisson_starts

WARM_SEED = 999_999


class Load(NamedTuple):
    """`rate` 0: as many conversations at a time as `concurrency` says; else arrivals a second.

    A kind may say its own: `text@32` has 32 conversations at a time, and at least 64 requests.
    """

    kinds: tuple[str, ...]
    num_requests: int = 24
    concurrency: int = 4
    rate: float = 0.0
    max_tokens: int = 16
    num_words: int = 50
    picture: PictureKind = PictureKind()

    def trace(self, kind: str, seed: int, num_requests: int = -1) -> Trace:
        """Of the same seed, each concurrency has other pictures and texts."""
        plain, own = split_kind(kind)
        num = self.num_requests if num_requests < 0 else num_requests
        if num:
            num = max(num, 2 * own)
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


class Step(NamedTuple):
    """One run to come."""

    kind: str
    round: int
    seed: int
    server: int


def schedule(kinds: Sequence[str], num_rounds: int, num_servers: int, seed: int) -> list[Step]:
    """All runs in order: rounds outside, traces inside, servers turned around every round."""
    steps = []
    for number in range(num_rounds):
        order = list(range(num_servers))
        if number % 2:
            order.reverse()
        for kind in kinds:
            steps += [Step(kind, number, seed + number, server) for server in order]
    return steps


class Progress:
    """What the bench says while it works; the default says nothing."""

    def stage(self, title: str, total: int) -> None:
        """A new stage of `total` steps begins."""

    def advance(self) -> None:
        """One step is done."""


def run_all(
    servers: Sequence[Server], load: Load, num_rounds: int, seed: int, progress: Progress
) -> Iterator[Result]:
    """Runs everything on servers that are up; yields results as they come."""
    for server in servers:  # first requests load lazily in every server
        trace = load.trace(load.kinds[0], WARM_SEED, 4)
        run_one(server, trace, load, WARM_SEED, draw_all(trace, load, progress), progress)
    urls: dict[int, str] = {}
    drawn_for: tuple[str, int] | None = None
    for step in schedule(load.kinds, num_rounds, len(servers), seed):
        trace = load.trace(step.kind, step.seed)
        if drawn_for != (step.kind, step.seed):
            urls, drawn_for = draw_all(trace, load, progress), (step.kind, step.seed)
        result = run_one(servers[step.server], trace, load, step.seed, urls, progress)
        result.round = step.round
        yield result


def draw_all(trace: Trace, load: Load, progress: Progress) -> dict[int, str]:
    """Data URLs of all pictures of the trace."""
    pictures = trace.pictures
    progress.stage(f"{trace.name}: drawing pictures", len(pictures))
    urls = {}
    for picture in pictures:
        urls[picture] = data_url(picture, load.picture)
        progress.advance()
    return urls


def run_one(
    server: Server, trace: Trace, load: Load, seed: int, urls: dict[int, str], progress: Progress
) -> Result:
    """One trace on one server, with what it cost."""
    progress.stage(f"{trace.name}, seed {seed}: {server.name}", trace.num_requests)
    starts = poisson_starts(seed, len(trace.conversations), load.rate) if load.rate else []
    hits = counters.read_hits(server.metrics())
    sockets = counters.engine_sockets(server.pid) if server.spec.engine_ports else None
    cpu = processes.cpu_seconds(server.pid)
    replies, seconds = _replay(server, trace, urls, load, starts, lambda _: progress.advance())
    spent = processes.cpu_between(cpu, processes.cpu_seconds(server.pid))
    after = counters.engine_sockets(server.pid) if server.spec.engine_ports else None
    return msgspec.convert(
        {
            "server": server.name,
            "trace": trace.name,
            "seed": seed,
            "round": 0,
            "cpu_seconds": spent,
            "pss_bytes": processes.pss_bytes(server.pid),
            "wire_bytes": counters.bytes_between(sockets, after),
            "hit_rates": counters.hit_rates(hits, counters.read_hits(server.metrics())),
            **summarize(replies, seconds),
        },
        Result,
    )


def _replay(
    server: Server, trace: Trace, urls: dict[int, str], load: Load, starts: list[float],
    on_reply: Callable[[Reply], None],
) -> tuple[list[Reply], float]:  # fmt: skip
    replay = Replay(server.spec.target, trace, urls, on_reply)
    concurrency = 0 if starts else split_kind(trace.name)[1] or load.concurrency
    return asyncio.run(replay.run(concurrency, starts))
