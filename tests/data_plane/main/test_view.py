"""The live view of a local deployment: tables, the status line, and lines for programs."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from foveal_runtime.main.local.launch import Supervisor
from foveal_runtime.main.local.view import (
    ProcessFigures,
    Readings,
    Screen,
    Snapshot,
    Totals,
    View,
    line,
    load_of,
    tables,
    totals,
)

ENGINE = """\
vllm:num_requests_running{model_name="m",engine="e"} 3.0
vllm:num_requests_waiting{model_name="m",engine="e"} 1.0
vllm:kv_cache_usage_perc{model_name="m",engine="e"} 0.25
vllm:generation_tokens_total{model_name="m",engine="e"} 900.0
foveal_mirror_sessions{process="e"} 1.0
foveal_kv_blocks{process="e",state="active"} 10.0
foveal_kv_blocks{process="e",state="cached"} 20.0
foveal_kv_blocks{process="e",state="free"} 90.0
foveal_cache_queries_total{process="e",cache="kv",tier="device",modality=""} 1200.0
foveal_cache_hits_total{process="e",cache="kv",tier="device",modality=""} 600.0
foveal_cache_bytes{process="e",cache="ipc",tier="host"} 5242880.0
foveal_cache_capacity_bytes{process="e",cache="ipc",tier="host"} 1073741824.0
foveal_cache_bytes{process="e",cache="encoder",tier="device"} 524288.0
foveal_cache_capacity_bytes{process="e",cache="encoder",tier="device"} 1048576.0
foveal_cache_queries_total{process="e",cache="encoder",tier="device",modality="image"} 8.0
foveal_cache_hits_total{process="e",cache="encoder",tier="device",modality="image"} 2.0
"""
FRONTEND = """\
foveal_requests_inflight{process="f"} 4.0
foveal_engines_ready{process="f/0"} 1.0
foveal_engines_ready{process="f/1"} 1.0
vllm:request_success_total{model_name="m",engine="e",finished_reason="stop"} 11.0
vllm:request_success_total{model_name="m",engine="e",finished_reason="length"} 1.0
foveal_mirror_value_bytes_sent_total{process="f",engine="e",kind="data"} 8388608.0
foveal_mirror_value_bytes_avoided_total{process="f",engine="e"} 41943040.0
foveal_cache_bytes{process="f",cache="processor",tier="host"} 10485760.0
foveal_cache_capacity_bytes{process="f",cache="processor",tier="host"} 268435456.0
foveal_cache_queries_total{process="f",cache="processor",tier="host",modality="image"} 16.0
foveal_cache_hits_total{process="f",cache="processor",tier="host",modality="image"} 12.0
foveal_cache_queries_total{process="f",cache="ipc",tier="host",modality="image"} 16.0
foveal_cache_hits_total{process="f",cache="ipc",tier="host",modality="image"} 13.0
"""
MIB = 1024**2


def snapshot(**more: object) -> Snapshot:
    readings = [Readings(ENGINE), Readings(FRONTEND)]
    engine = ProcessFigures(name="tiny-engine-0", state="ready", resident_bytes=1500 * MIB,
                            load=load_of("engine", readings[0]))  # fmt: skip
    frontend = ProcessFigures(name="tiny-frontend-0", state="ready", resident_bytes=900 * MIB,
                              load=load_of("frontend", readings[1]))  # fmt: skip
    base = Snapshot(
        name="tiny",
        url="http://127.0.0.1:8000/v1",
        model="tiny-vlm",
        has_page=True,
        seconds=125.0,
        processes=(engine, frontend),
        totals=totals(readings, 120 * MIB),
        tokens_per_second=30.04,
    )
    return msgspec.structs.replace(base, **more)


def every(now: Snapshot, state: str, **more: object) -> Snapshot:
    processes = tuple(msgspec.structs.replace(p, state=state, **more) for p in now.processes)
    return msgspec.structs.replace(now, processes=processes)


def drawn(what: object, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(what)
    return [one.rstrip() for one in out.getvalue().splitlines()]


def test_tables() -> None:
    lines = drawn(tables(snapshot()))
    assert lines[:5] == [
        "tiny  serving on http://127.0.0.1:8000/v1  up 0:02:05",
        "",
        "PROCESS          STATE   MEMORY  LOAD",
        "tiny-engine-0    ready  1.5 GiB  3 running, 1 waiting, KV 25% in use",
        "tiny-frontend-0  ready  900 MiB  4 in flight, 12 answered, engines up: 1",
    ]
    cells = {one.split()[0]: one.split() for one in lines[6:11]}
    assert cells["encoder"][1:5] == ["512", "KiB", "1.0", "MiB"]
    assert cells["encoder"][-3:] == ["2", "8", "25%"]
    assert cells["kv"][1:5] == ["30", "MiB", "120", "MiB"]
    assert cells["kv"][-3:] == ["600", "1,200", "50%"]
    assert lines[-4:] == [
        "12 answered, 4 in flight, 900 tokens (30.0/s)",
        "media values: 8.0 MiB sent to engines, 40 MiB not sent again",
        "",
        "Ctrl-C drains and ends",
    ]


@pytest.mark.parametrize("width", [30, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(one) <= width for one in drawn(tables(snapshot()), width))
    assert len(drawn(line(snapshot()), width)) == 1


def test_the_status_line_shows_processes_while_they_start() -> None:
    starting = every(snapshot(), "starting", load="loading the model")
    assert drawn(line(starting))[1] == "tiny-engine-0    starting  1.5 GiB  loading the model"
    (status,) = drawn(line(snapshot()), 160)
    assert status == (
        "up 0:02:05 · 12 answered, 4 in flight, 900 tokens (30.0/s); hits: processor 12/16, "
        "ipc 13/16, encoder 2/8, kv 600/1200"
    )


def test_of_two_kv_pools_the_fuller_is_shown() -> None:
    pool = "".join(
        f'foveal_kv_window_blocks{{process="e",state="{state}"}} {count}\n'
        for state, count in (("active", 5), ("cached", 15), ("free", 20))
    )
    for text, held in ((ENGINE, 30), (ENGINE + pool, 60)):
        caches = {one.name: one for one in totals([Readings(text)], 120 * MIB).caches}
        assert caches["kv"].held_bytes == held * MIB
        assert caches["kv"].capacity_bytes == 120 * MIB


def test_readings_survive_a_text_that_is_cut_off() -> None:
    readings = Readings(ENGINE[: ENGINE.index("foveal_mirror_sessions") + 30])
    assert readings.total("vllm:generation_tokens_total") == 900
    assert not Readings("no metrics at all {")
    assert not Readings("")
    assert totals([Readings("")], 0) == Totals()


def test_programs_get_a_line_for_each_change() -> None:
    out = io.StringIO()
    ready = snapshot()
    starting = msgspec.structs.replace(every(ready, "starting"), seconds=1.0)
    with View(Console(file=out, width=40)) as view:
        for one in (starting, starting, ready, ready, every(ready, "ended", exit_code=0)):
            view.show(one)
    assert out.getvalue() == (
        "tiny-engine-0 is starting\n"
        "tiny-frontend-0 is starting\n"
        "tiny-engine-0 is ready\n"
        "tiny-frontend-0 is ready\n"
        "serving tiny-vlm on http://127.0.0.1:8000/v1 (chat page: http://127.0.0.1:8000/, API "
        "documentation at /docs, metrics at /metrics); Ctrl-C stops\n"
        "12 answered, 4 in flight, 900 tokens (30.0/s); hits: processor 12/16, ipc 13/16, "
        "encoder 2/8, kv 600/1200\n"
        "tiny-engine-0 ended with exit code 0\n"
        "tiny-frontend-0 ended with exit code 0\n"
    )


def test_a_terminal_keeps_the_last_state_and_the_cursor() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=40, force_terminal=True, _environ={})
    with View(console) as view:
        view.show(snapshot())
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1
    assert "Ctrl-C drains and ends" in out.getvalue()


def test_what_nobody_reads_any_more_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out, View(Screen(file=out)) as view:
        view.say("starting")
        view.show(snapshot())


def test_figures_are_asked_for_only_where_they_are_shown() -> None:
    """Each look at /metrics costs three processes some milliseconds: as a program's log line it is
    wanted twice a minute, on a terminal once a second."""
    log, screen = (
        View(Console(file=io.StringIO(), force_terminal=is_terminal))
        for is_terminal in (False, True)
    )
    asked = {"log": 0, "screen": 0}
    for seconds in range(1, 91):
        for name, view in (("log", log), ("screen", screen)):
            asked[name] += view.shows_figures(float(seconds))
            view.show(snapshot(seconds=float(seconds), processes=()))
    assert asked == {"log": 3, "screen": 90}


class Process:
    """A child as the supervisor sees it."""

    config = SimpleNamespace(model=SimpleNamespace(served_name="tiny-vlm"))
    url = "http://127.0.0.1:8000"
    exit_code: int | None = None

    def __init__(self, role: str, text: str) -> None:
        self.role = self.name = role
        self.text = text

    def is_ready(self) -> bool:
        return True

    def metrics(self) -> str:
        return self.text

    def resident_bytes(self) -> int:
        return 0


def test_what_has_ended_has_nothing_in_flight() -> None:
    """The last line said that four were, at 30 tokens a second."""
    engine, frontend, other = (
        Process("engine", ENGINE), Process("frontend", FRONTEND), Process("other", FRONTEND)
    )  # fmt: skip
    deployment: Any = SimpleNamespace(engines=[engine], frontends=[frontend, other])
    shown: list[Snapshot] = []
    supervisor = Supervisor(
        "tiny", deployment, show=shown.append, shows_figures=lambda _: True, say=str,
        start_timeout_seconds=1.0, drain_timeout_seconds=1.0,
    )  # fmt: skip
    supervisor._look()
    other.exit_code = 0
    supervisor._look()
    frontend.exit_code = 0
    supervisor._look()
    engine.exit_code = 0
    supervisor._look()
    assert [one.totals.requests_inflight for one in shown] == [8, 4, 0, 0]
    assert [one.totals.requests for one in shown] == [24] * 4
    assert [one.tokens_per_second for one in shown][1:] == [0.0] * 3
    assert shown[0].tokens_per_second > 0
