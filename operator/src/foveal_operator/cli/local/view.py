"""What `foveal up` shows: a few lines that are drawn again each second. Pure.

A terminal gets tables with bars; programs get one line for each thing that happened.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from foveal_operator.cli.local.readings import Readings, Totals
from foveal_operator.cli.output.terminal import Style, age, columns, short_bytes

State = Literal["starting", "ready", "not ready", "draining", "ended"]
_LOOKS: dict[State, tuple[str, ...]] = {
    "starting": ("yellow",),
    "ready": ("green",),
    "not ready": ("red",),
    "draining": ("yellow",),
    "ended": ("dim",),
}
_NARROW = 100


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process now. `exit_code` is None while it runs; `load` in words."""

    name: str
    role: Literal["engine", "frontend"]
    state: State
    resident_bytes: int = 0
    load: str = ""
    exit_code: int | None = None


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the screen."""

    name: str
    url: str
    model: str
    seconds: float
    processes: tuple[ProcessFigures, ...]
    totals: Totals
    tokens_per_second: float = 0.0
    is_draining: bool = False

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


def draw(picture: Picture, style: Style) -> list[str]:
    """The screen, no line wider than the terminal."""
    lines = [_title(picture, style), ""]
    lines += _processes(picture, style)
    if picture.totals.caches:
        lines += ["", *_caches(picture, style), "", *_sums(picture)]
    if not picture.has_ended:
        hint = "Ctrl-C again ends at once" if picture.is_draining else "Ctrl-C drains and ends"
        lines += ["", style.paint(hint, "dim")]
    return [style.clip(line) for line in lines]


def _title(picture: Picture, style: Style) -> str:
    ready = all(process.state == "ready" for process in picture.processes)
    if picture.has_ended:
        state = "all processes have ended"
    elif picture.is_draining:
        state = style.paint("draining: streams may finish", "yellow")
    elif ready:
        state = f"{style.paint('serving', 'green')} on {picture.url}"
    else:
        num_ready = sum(1 for process in picture.processes if process.state == "ready")
        state = f"{num_ready} of {len(picture.processes)} processes ready"
        state = style.paint(state, "yellow")
    return f"{style.bold(picture.name)}  {state}  up {age(picture.seconds)}"


def _processes(picture: Picture, style: Style) -> list[str]:
    rows = [[style.bold(head) for head in ("PROCESS", "STATE", "MEMORY", "LOAD")]]
    for process in picture.processes:
        state: str = process.state
        if process.exit_code is not None:
            state = f"ended ({process.exit_code})"
        rows.append(
            [
                process.name,
                style.paint(state, *_LOOKS[process.state]),
                short_bytes(process.resident_bytes) if process.resident_bytes else "-",
                process.load,
            ]
        )
    return columns(rows, right=frozenset({2}))


def _caches(picture: Picture, style: Style) -> list[str]:
    bar_width = 12 if style.width and style.width < _NARROW else 24
    heads = ("CACHE", "HELD", "OF", "", "HITS", "LOOKUPS", "RATIO")
    rows = [[style.bold(head) for head in heads]]
    for cache in picture.totals.caches:
        ratio = f"{cache.hits / cache.queries:.0%}" if cache.queries else "-"
        counts = [f"{cache.hits:,}", f"{cache.queries:,}"]
        rows.append(
            [
                cache.name,
                short_bytes(cache.held_bytes),
                short_bytes(cache.capacity_bytes),
                style.bar(cache.held_bytes, cache.capacity_bytes, bar_width),
                *counts,
                ratio,
            ]
        )
    return columns(rows, right=frozenset({1, 2, 4, 5, 6}))


def _sums(picture: Picture) -> list[str]:
    totals = picture.totals
    return [
        f"{totals.requests:,} answered, {totals.requests_inflight} in flight, "
        f"{totals.tokens:,} tokens ({picture.tokens_per_second:.1f}/s)",
        f"media values: {short_bytes(totals.bytes_sent)} sent to engines, "
        f"{short_bytes(totals.bytes_avoided)} not sent again",
    ]


def events(before: Picture | None, now: Picture) -> list[str]:
    """For programs: a line for each process whose state has changed."""
    old = {process.name: process.state for process in before.processes} if before else {}
    lines = []
    for process in now.processes:
        if process.state == old.get(process.name):
            continue
        code = "" if process.exit_code is None else f" with exit code {process.exit_code}"
        lines.append(f"{process.name} {_VERBS[process.state]}{code}")
    return lines


_VERBS: dict[State, str] = {
    "starting": "is starting",
    "ready": "is ready",
    "not ready": "is not ready any more",
    "draining": "is draining",
    "ended": "ended",
}


def summary(now: Picture) -> str:
    """For programs: where things stand, in one line."""
    ratios = ", ".join(f"{cache.name} {cache.hits}/{cache.queries}" for cache in now.totals.caches)
    return (
        f"{now.totals.requests} answered, {now.totals.requests_inflight} in flight, "
        f"{now.totals.tokens} tokens; hits: {ratios or 'none'}"
    )
