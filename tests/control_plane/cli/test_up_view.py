"""What `foveal up` shows, as text: narrow, wide, in colour, and line by line for programs."""

from __future__ import annotations

import io

import msgspec

from foveal_operator.cli.local.readings import Readings, Totals, totals
from foveal_operator.cli.local.screen import Screen
from foveal_operator.cli.local.view import Picture, ProcessFigures, draw, load_of
from foveal_operator.cli.output.terminal import Style, age, columns, visible_width

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


def picture(**more: object) -> Picture:
    readings = [Readings(ENGINE), Readings(FRONTEND)]
    engine = ProcessFigures(name="tiny-engine-0", role="engine", state="ready",
                            resident_bytes=1500 * MIB,
                            load=load_of("engine", readings[0]))  # fmt: skip
    frontend = ProcessFigures(name="tiny-frontend-0", role="frontend", state="ready",
                              resident_bytes=900 * MIB,
                              load=load_of("frontend", readings[1]))  # fmt: skip
    base = Picture(
        name="tiny",
        url="http://127.0.0.1:8000/v1",
        model="tiny-vlm",
        seconds=125.0,
        processes=(engine, frontend),
        totals=totals(readings, 120 * MIB),
        tokens_per_second=30.04,
    )
    return msgspec.structs.replace(base, **more)


PLAIN = """\
tiny  serving on http://127.0.0.1:8000/v1  up 2m5s

PROCESS          STATE   MEMORY  LOAD
tiny-engine-0    ready  1.5 GiB  3 running, 1 waiting, KV 25% in use
tiny-frontend-0  ready  900 MiB  4 in flight, 12 answered, engines up: 1

CACHE         HELD       OF    HITS  LOOKUPS  RATIO
processor   10 MiB  256 MiB      12       16    75%
ipc        5.0 MiB  1.0 GiB      13       16    81%
encoder    512 KiB  1.0 MiB       2        8    25%
kv          30 MiB  120 MiB     600    1,200    50%

12 answered, 4 in flight, 900 tokens (30.0/s)
media values: 8.0 MiB sent to engines, 40 MiB not sent again

Ctrl-C drains and ends
"""


def test_plain() -> None:
    assert "\n".join(draw(picture(), Style())) + "\n" == PLAIN


def test_a_terminal_of_80_columns_gets_bars_and_no_line_is_wider() -> None:
    lines = draw(picture(), Style(is_terminal=True, width=80, color=False))
    assert "processor   10 MiB  256 MiB  " + "·" * 12 + "    12       16    75%" in lines
    assert "encoder    512 KiB  1.0 MiB  " + "█" * 6 + "·" * 6 + "     2        8    25%" in lines
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)


def test_colour_changes_no_width() -> None:
    plain = draw(picture(), Style(is_terminal=True, width=120, color=False))
    painted = draw(picture(), Style(is_terminal=True, width=120))
    assert [visible_width(line) for line in painted] == [len(line) for line in plain]
    assert "\x1b[32mready\x1b[0m" in "".join(painted)


def test_a_narrow_terminal_cuts_and_ends_colours() -> None:
    for line in draw(picture(), Style(is_terminal=True, width=30)):
        assert visible_width(line) <= 30
        assert "\x1b" not in line or line.endswith("\x1b[0m")


def test_readings_survive_a_text_that_is_cut_off() -> None:
    readings = Readings(ENGINE[: ENGINE.index("foveal_mirror_sessions") + 30])
    assert readings.total("vllm:generation_tokens_total") == 900
    assert Readings("no metrics at all {") or True
    assert not Readings("")
    assert totals([Readings("")], 0) == Totals()


def test_programs_get_a_line_for_each_change() -> None:
    out = io.StringIO()
    ready = picture()
    starting = msgspec.structs.replace(
        ready,
        processes=tuple(msgspec.structs.replace(p, state="starting") for p in ready.processes),
        seconds=1.0,
    )
    ended = msgspec.structs.replace(
        ready,
        processes=tuple(
            msgspec.structs.replace(p, state="ended", exit_code=0) for p in ready.processes
        ),
    )
    with Screen(out, Style()) as screen:
        for one in (starting, starting, ready, ready, ended):
            screen.show(one)
    assert out.getvalue() == (
        "tiny-engine-0 is starting\n"
        "tiny-frontend-0 is starting\n"
        "tiny-engine-0 is ready\n"
        "tiny-frontend-0 is ready\n"
        "serving tiny-vlm on http://127.0.0.1:8000/v1\n"
        "12 answered, 4 in flight, 900 tokens; hits: processor 12/16, ipc 13/16, encoder 2/8, "
        "kv 600/1200\n"
        "tiny-engine-0 ended with exit code 0\n"
        "tiny-frontend-0 ended with exit code 0\n"
    )


def test_ages_read_as_kubectl_writes_them() -> None:
    spans = {0: "0s", 119: "119s", 125: "2m5s", 600: "10m", 3600: "1h", 11520: "3h12m",
             200_000: "2d"}  # fmt: skip
    assert {seconds: age(seconds) for seconds in spans} == spans


def test_columns_measure_what_is_seen() -> None:
    rows = [["a", "\x1b[32m1\x1b[0m"], ["bbb", "22"]]
    assert columns(rows, right=frozenset({1})) == ["a     \x1b[32m1\x1b[0m", "bbb  22"]
