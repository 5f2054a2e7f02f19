"""The file, the tables and the verdict of a whole bench run, made of results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from foveal_runtime.bench.result import RunResult
from foveal_runtime.bench.stats import Spread, paired_ratio
from foveal_runtime.plan.config import MIB


class ServerFacts(msgspec.Struct, kw_only=True):
    """A server apart from any trace. The rest is of servers that the bench started; `command`: by
    what. `idle_cpu_cores`: CPU seconds a second with nothing to do."""

    name: str
    urls: list[str] = []
    model: str = ""
    command: list[str] = []
    start_seconds: float = 0.0
    idle_cpu_cores: float = 0.0
    rest_pss_bytes: dict[str, int] = {}


class Report(msgspec.Struct, kw_only=True):
    """What the JSON file holds. `machine` and `versions`: facts to read the figures by."""

    date: str
    command: list[str]
    machine: dict[str, str]
    versions: dict[str, str]
    options: dict[str, object]
    servers: list[ServerFacts]
    results: list[RunResult]

    def of(self, trace: str, server: str) -> list[RunResult]:
        """Its results in the order of rounds."""
        found = [r for r in self.results if r.trace == trace and r.server == server]
        return sorted(found, key=lambda result: result.round)

    @property
    def traces(self) -> list[str]:
        return list(dict.fromkeys(result.trace for result in self.results))

    @property
    def names(self) -> list[str]:
        return [server.name for server in self.servers]


def dumps(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report))


def loads(data: bytes) -> Report:
    return msgspec.json.decode(data, type=Report)


class Table(msgspec.Struct):
    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.columns) + " |"]
        lines.append("|---" * min(2, len(self.columns)) + "|---:" * (len(self.columns) - 2) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"


def tables(report: Report) -> list[Table]:
    found = [_server_table(report)] if any(s.command for s in report.servers) else []
    found += [_speed_table(report), _cost_table(report)]
    if len(report.names) > 1:
        found.append(_ratio_table(report))
    return found


def _server_table(report: Report) -> Table:
    rows = [
        [
            s.name,
            f"{s.start_seconds:.0f}",
            f"{sum(s.rest_pss_bytes.values()) / MIB:.0f}",
            ", ".join(f"{r} {b / MIB:.0f}" for r, b in sorted(s.rest_pss_bytes.items())),
            f"{s.idle_cpu_cores:.3f}",
        ]
        for s in report.servers
    ]
    return Table("Servers", ["server", "start s", "PSS MiB", "of which", "idle cores"], rows)


Metric = Callable[[RunResult], float]


def _middle(results: Sequence[RunResult], value: Metric) -> float:
    return statistics.median(value(result) for result in results)


def _rows(report: Report, row: Callable[[list[RunResult]], list[str]]) -> list[list[str]]:
    cells = [report.of(trace, name) for trace in report.traces for name in report.names]
    return [[r[0].trace, r[0].server, *row(r)] for r in cells if r]


def _speed_table(report: Report) -> Table:
    columns = ["trace", "server", "req/s", "tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p90",
               "p99", "longest", "errors"]  # fmt: skip
    return Table("Speed: medians over rounds, times in ms", columns, _rows(report, _speed_row))


def _speed_row(results: list[RunResult]) -> list[str]:
    def percentile_of(name: str, percent: str) -> str:
        return f"{_middle(results, lambda r: getattr(r, name).get(percent, float('nan'))):.0f}"

    return [
        f"{_middle(results, lambda r: r.requests_per_second):.2f}",
        f"{_middle(results, lambda r: r.output_tokens_per_second):.1f}",
        *(percentile_of("ttft_ms", p) for p in ("p50", "p90", "p99")),
        *(percentile_of("itl_ms", p) for p in ("p50", "p90", "p99", "max")),
        str(sum(r.num_errors for r in results)),
    ]


def _cost_table(report: Report) -> Table:
    """Columns about processes only where their costs were seen."""
    is_seen = any(result.cpu_seconds for result in report.results)
    seen = ["CPU s/req", "of which", "kB wire/req", "PSS MiB"] if is_seen else []
    columns = ["trace", "server", *seen, "prompt tokens", "cached", "hit rates"]
    title = "Cost: medians over rounds" if is_seen else "Caches: medians over rounds"
    row = (lambda r: [*_process_row(r), *_cache_row(r)]) if is_seen else _cache_row
    return Table(title, columns, _rows(report, row))


def _process_row(results: list[RunResult]) -> list[str]:
    roles = sorted({role for result in results for role in result.cpu_seconds})
    per_role = {role: _middle(results, _cpu_of(role)) for role in roles}
    wire = [r.wire_bytes / r.num_requests / 1000 for r in results if r.wire_bytes is not None]
    return [
        f"{_middle(results, lambda r: r.total_cpu_seconds / r.num_requests):.3f}",
        ", ".join(f"{role} {cpu:.3f}" for role, cpu in per_role.items() if cpu >= 0.0005),
        f"{statistics.median(wire):.2f}" if wire else "",
        f"{_middle(results, lambda r: sum(r.pss_bytes.values()) / MIB):.0f}",
    ]


def _cache_row(results: list[RunResult]) -> list[str]:
    """Tokens as `usage` of the replies says."""
    tokens = sum(r.num_prompt_tokens for r in results)
    cached = sum(r.num_cached_tokens for r in results)
    hits = [f"{cache} {_middle(results, _hits_of(cache)):.0%}" for cache in results[0].hit_rates]
    return [str(tokens), f"{cached / tokens:.0%}" if tokens else "", ", ".join(hits)]


def _cpu_of(role: str) -> Metric:
    return lambda result: result.cpu_seconds.get(role, 0.0) / result.num_requests


def _hits_of(cache: str) -> Metric:
    return lambda result: result.hit_rates.get(cache, 0.0)


RATIOS: dict[str, Metric] = {
    "req/s": lambda r: r.requests_per_second,
    "TTFT p50": lambda r: r.ttft_ms.get("p50", math.nan),
    "ITL p50": lambda r: r.itl_ms.get("p50", math.nan),
    "ITL p99": lambda r: r.itl_ms.get("p99", math.nan),
    "longest gap": lambda r: r.itl_ms.get("max", math.nan),
    "CPU s": lambda r: r.total_cpu_seconds,
}


def ratios(report: Report) -> dict[tuple[str, str], dict[str, Spread | None]]:
    """The first server over each other one, by (trace, other), over the rounds both ran."""
    first, *others = report.names
    found = {}
    for trace in report.traces:
        ours = {r.round: r for r in report.of(trace, first)}
        for other in others:
            pairs = [(ours[r.round], r) for r in report.of(trace, other) if r.round in ours]
            found[trace, other] = {
                name: paired_ratio([value(a) for a, _ in pairs], [value(b) for _, b in pairs])
                for name, value in RATIOS.items()
            }
    return found


def _ratio_table(report: Report) -> Table:
    rows = [
        [trace, other, *("" if spread is None else str(spread) for spread in by_name.values())]
        for (trace, other), by_name in ratios(report).items()
    ]
    title = f"{report.names[0]} over the other, paired by round: median (lowest to highest)"
    # What no pair has, such as CPU seconds of servers elsewhere, needs no column.
    columns = [i for i in range(len(RATIOS) + 2) if i < 2 or any(row[i] for row in rows)]
    names = ["trace", "other", *RATIOS]
    return Table(title, [names[i] for i in columns], [[row[i] for i in columns] for row in rows])


def problems(report: Report) -> list[str]:
    """What is wrong, not what is slow: errors, and replies that servers disagree on, where they
    should not: greedy and in float32 (else ties flip with the order of sums)."""
    found = [
        f"{r.server}, {r.trace}, seed {r.seed}: {r.num_errors} errors, e.g. {r.errors[0]}"
        for r in report.results
        if r.num_errors
    ]
    if not report.options.get("equal_replies"):
        return found
    by_run: dict[tuple[str, int], list[RunResult]] = {}
    for result in report.results:
        if not result.num_errors:
            by_run.setdefault((result.trace, result.seed), []).append(result)
    for (trace, seed), results in by_run.items():
        reference = results[0]
        for other in results[1:]:
            if other.texts_digest != reference.texts_digest:
                num = sum(a != b for a, b in zip(reference.texts, other.texts, strict=True))
                found.append(
                    f"{trace}, seed {seed}: {num} of {len(other.texts)} replies of {other.server} "
                    f"differ from those of {reference.server}"
                )
    return found
