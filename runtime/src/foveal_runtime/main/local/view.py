"""The live view of a local deployment: tables or a status line on a terminal, lines for programs.

A terminal gets what is drawn again each second; programs get one line for each thing that happened.
The figures are read from the processes' /metrics: a family that is missing reads as nothing.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from foveal_runtime.plan.quantity import short_bytes

CACHES = (("processor", "host"), ("ipc", "host"), ("encoder", "device"), ("encoder", "host"),
          ("kv", "device"))  # fmt: skip

_HELD = ("active", "cached")


class Readings:
    """The series of one process at one time."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        # Nothing here reads histograms; their buckets are three quarters of the text.
        kept = "".join(one for one in text.splitlines(keepends=True) if "_bucket{" not in one)
        try:
            for family in text_string_to_metric_families(kept):
                for sample in family.samples:
                    found = self._series.setdefault(sample.name, [])
                    found.append((sample.labels, float(sample.value)))
        except ValueError:
            # Cut off in the middle: what came before it is good.
            return

    def __bool__(self) -> bool:
        return bool(self._series)

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of a family that carry these labels; 0 when there are none."""
        return sum(
            value for found, value in self._series.get(name, ()) if labels.items() <= found.items()
        )

    def least(self, name: str) -> float:
        """The smallest of a family's series: what every process behind one port agrees on."""
        return min((value for _, value in self._series.get(name, ())), default=0.0)

    def has(self, name: str, **labels: str) -> bool:
        return any(labels.items() <= found.items() for found, _ in self._series.get(name, ()))


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One cache over all processes. Queries and hits are items; tokens for kv."""

    name: str
    held_bytes: int
    capacity_bytes: int
    queries: int
    hits: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole deployment has done since it began."""

    requests_inflight: int = 0
    requests: int = 0
    tokens: int = 0
    bytes_sent: int = 0
    bytes_avoided: int = 0
    sessions: int = 0
    caches: tuple[CacheFigures, ...] = ()


def totals(readings: Iterable[Readings], kv_bytes: int) -> Totals:
    """Sums over all processes; each family has one exporter, so nothing counts twice.

    `kv_bytes`: the KV pools of all engines.
    """
    seen = [one for one in readings if one]

    def total(name: str, **labels: str) -> int:
        return int(sum(one.total(name, **labels) for one in seen))

    return Totals(
        requests_inflight=total("foveal_requests_inflight"),
        requests=total("vllm:request_success_total"),
        tokens=total("vllm:generation_tokens_total"),
        bytes_sent=total("foveal_mirror_value_bytes_sent_total"),
        bytes_avoided=total("foveal_mirror_value_bytes_avoided_total"),
        sessions=total("foveal_mirror_sessions"),
        caches=tuple(
            _cache(seen, name, tier, kv_bytes)
            for name, tier in CACHES
            if any(one.has("foveal_cache_capacity_bytes", cache=name, tier=tier) for one in seen)
            or (name == "kv" and any(one.has("foveal_kv_blocks") for one in seen))
        ),
    )


def _cache(seen: list[Readings], name: str, tier: str, kv_bytes: int) -> CacheFigures:
    def total(family: str) -> int:
        return int(sum(one.total(family, cache=name, tier=tier) for one in seen))

    held, capacity = total("foveal_cache_bytes"), total("foveal_cache_capacity_bytes")
    if name == "kv" and not capacity:
        # Engines count blocks; what all of them weigh, the documents say. Of two pools the fuller.
        capacity = kv_bytes
        for pool in ("foveal_kv_blocks", "foveal_kv_window_blocks"):
            cached = sum(one.total(pool, state=state) for one in seen for state in _HELD)
            blocks = sum(one.total(pool) for one in seen)
            held = max(held, int(kv_bytes * cached / blocks) if blocks else 0)
    queries = total("foveal_cache_queries_total")
    if tier == "host" and name == "encoder":
        # The host tier is asked when the device's has not got it.
        queries = int(
            sum(
                one.total("foveal_cache_queries_total", cache=name)
                - one.total("foveal_cache_hits_total", cache=name, tier="device")
                for one in seen
            )
        )
    return CacheFigures(
        name=name if tier == "device" or name != "encoder" else "encoder-host",
        held_bytes=held,
        capacity_bytes=capacity,
        queries=queries,
        hits=total("foveal_cache_hits_total"),
    )


SUMMARY_SECONDS = 30.0
State = Literal["starting", "ready", "not ready", "draining", "waiting", "ended"]
_COLOURS: dict[State, str] = {
    "starting": "yellow",
    "ready": "green",
    "not ready": "red",
    "draining": "yellow",
    "waiting": "red",
    "ended": "dim",
}
_VERBS: dict[State, str] = {
    "starting": "is starting",
    "ready": "is ready",
    "not ready": "is not ready any more",
    "draining": "is draining",
    "waiting": "waits for its restart",
    "ended": "ended",
}


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process now. `exit_code` is None while it runs; `load` in words."""

    name: str
    state: State
    resident_bytes: int = 0
    load: str = ""
    exit_code: int | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown at one time."""

    name: str
    url: str
    model: str
    seconds: float
    has_page: bool = False
    processes: tuple[ProcessFigures, ...]
    totals: Totals
    tokens_per_second: float = 0.0
    is_draining: bool = False

    @property
    def is_up(self) -> bool:
        return all(process.state == "ready" for process in self.processes)

    @property
    def has_ended(self) -> bool:
        return all(process.state == "ended" for process in self.processes)


def load_of(role: str, readings: Readings) -> str:
    """What a process is doing, in words; "" when it said nothing."""
    if not readings:
        return ""
    if role == "engine":
        running = readings.total("vllm:num_requests_running")
        waiting = readings.total("vllm:num_requests_waiting")
        usage = readings.total("vllm:kv_cache_usage_perc")
        return f"{running:.0f} running, {waiting:.0f} waiting, KV {usage:.0%} in use"
    inflight = readings.total("foveal_requests_inflight")
    engines = readings.least("foveal_engines_ready")
    answered = readings.total("vllm:request_success_total")
    return f"{inflight:.0f} in flight, {answered:.0f} answered, engines up: {engines:.0f}"


class Screen(Console):
    """A console that goes quiet when nobody reads it any more (`| tee` after Ctrl-C), where Rich's
    own ends the process: the streams of a server may then still finish."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "w") as nowhere:  # takes what is still in the buffer, too
            os.dup2(nowhere.fileno(), self.file.fileno())


class View:
    """Use as a context manager: the last state stays on the screen and the cursor comes back.

    Args:
        style: "tables" (all processes and caches) or "line" (processes while they start, then one
            status line).
    """

    def __init__(self, console: Console, style: str = "tables") -> None:
        self._console = console
        self._style = style
        self._last: Snapshot | None = None
        self._summed: tuple[float, str] = (0.0, "")
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def shows_figures(self, seconds: float) -> bool:
        """Whether anything that is counted would be seen in a snapshot of that time."""
        return self._live is not None or seconds - self._summed[0] >= SUMMARY_SECONDS

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, now: Snapshot) -> None:
        before, self._last = self._last, now
        if self._live is not None:  # first: a line that is said is printed above what is drawn
            self._live.update(line(now) if self._style == "line" else tables(now))
        if self._live is None or self._style == "line":
            self._report(before, now)
        if self._live is not None:
            self._live.refresh()

    def _report(self, before: Snapshot | None, now: Snapshot) -> None:
        for text in events(before, now):
            if self._live is None or not text.endswith(_VERBS["starting"]):
                self.say(text)
        if now.is_up and not (before and before.is_up):
            self.say(
                f"serving {now.model} on {now.url} ({_pages(now)}API documentation at /docs, "
                "metrics at /metrics); Ctrl-C stops"
            )
        if self._live is None and self.shows_figures(now.seconds):
            text = summary(now)
            if text != self._summed[1]:
                self.say(text)
            self._summed = (now.seconds, text)


def _pages(now: Snapshot) -> str:
    return f"chat page: {now.url.removesuffix('/v1')}/, " if now.has_page else ""


def tables(now: Snapshot) -> RenderableType:
    """All processes and caches."""
    parts: list[RenderableType] = [_title(now), "", _processes(now)]
    if now.totals.caches:
        parts += ["", _caches(now), "", *_sums(now)]
    if not now.has_ended:
        hint = "Ctrl-C again ends at once" if now.is_draining else "Ctrl-C drains and ends"
        parts += ["", Text(hint, style="dim")]
    return Group(*parts)


def line(now: Snapshot) -> RenderableType:
    """What each process does while they start, then one line of figures."""
    if now.is_up or now.is_draining or now.has_ended:
        text = f"{_up(now)} · {summary(now)}"
        return Group(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
    return _processes(now)


def _up(now: Snapshot) -> str:
    return f"up {datetime.timedelta(seconds=int(now.seconds))}"


def _title(now: Snapshot) -> Text:
    if now.has_ended:
        state = ("all processes have ended", "")
    elif now.is_draining:
        state = ("draining: streams may finish", "yellow")
    elif now.is_up:
        state = ("serving", "green")
    else:
        num_ready = sum(1 for process in now.processes if process.state == "ready")
        state = (f"{num_ready} of {len(now.processes)} processes ready", "yellow")
    where = f" on {now.url}" if now.is_up and not now.is_draining else ""
    return Text.assemble((now.name, "bold"), "  ", state, f"{where}  {_up(now)}")


def _table(*heads: str, right: tuple[str, ...] = ()) -> Table:
    """Only the last column is cut where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=True)
    table.columns[-1].ratio = 1
    return table


def _processes(now: Snapshot) -> Table:
    table = _table("PROCESS", "STATE", "MEMORY", "LOAD", right=("MEMORY",))
    for process in now.processes:
        state: str = process.state
        if process.exit_code is not None and state == "ended":
            state = f"ended ({process.exit_code})"
        table.add_row(
            process.name,
            Text(state, style=_COLOURS[process.state]),
            short_bytes(process.resident_bytes) if process.resident_bytes else "-",
            Text(process.load),
        )
    return table


def _caches(now: Snapshot) -> Table:
    table = _table("CACHE", "HELD", "OF", "", "HITS", "LOOKUPS", "RATIO",
                   right=("HELD", "OF", "HITS", "LOOKUPS", "RATIO"))  # fmt: skip
    for cache in now.totals.caches:
        table.add_row(
            cache.name,
            short_bytes(cache.held_bytes),
            short_bytes(cache.capacity_bytes),
            ProgressBar(max(1, cache.capacity_bytes), cache.held_bytes, width=16),
            f"{cache.hits:,}",
            f"{cache.queries:,}",
            f"{cache.hits / cache.queries:.0%}" if cache.queries else "-",
        )
    return table


def _sums(now: Snapshot) -> list[str]:
    totals = now.totals
    return [
        f"{totals.requests:,} answered, {totals.requests_inflight} in flight, "
        f"{totals.tokens:,} tokens ({now.tokens_per_second:.1f}/s)",
        f"media values: {short_bytes(totals.bytes_sent)} sent to engines, "
        f"{short_bytes(totals.bytes_avoided)} not sent again",
    ]


def events(before: Snapshot | None, now: Snapshot) -> list[str]:
    """A line for each process whose state has changed."""
    old = {process.name: process.state for process in before.processes} if before else {}
    lines = []
    for process in now.processes:
        if process.state in (old.get(process.name), "waiting"):
            continue
        code = f" with exit code {process.exit_code}" if process.state == "ended" else ""
        lines.append(f"{process.name} {_VERBS[process.state]}{code}")
    return lines


def summary(now: Snapshot) -> str:
    """Where things stand, in one line."""
    ratios = ", ".join(
        f"{one.name} {one.hits}/{one.queries}" for one in now.totals.caches if one.queries
    )
    return (
        f"{now.totals.requests} answered, {now.totals.requests_inflight} in flight, "
        f"{now.totals.tokens} tokens ({now.tokens_per_second:.1f}/s); hits: {ratios or 'none'}"
    )
