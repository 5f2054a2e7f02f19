"""From replies to tables, verdict and picture."""

import pytest

from foveal_runtime.bench.client import Reply
from foveal_runtime.bench.display import draw_plot, show
from foveal_runtime.bench.report import Report, ServerFacts, dumps, loads, problems, ratios, tables
from foveal_runtime.bench.result import RunResult, summarize


def reply(index: int, sent: float, *chunks: float, turn: int = 0, text: str = "a b") -> Reply:
    done = chunks[-1] if chunks else sent
    return Reply(index, turn, sent, list(chunks), done, text, 100, 40, len(chunks))


def result(server: str, number: int, speed: float, text: str = "a b") -> RunResult:
    replies = [reply(i, 0.0, 1 / speed, 1.5 / speed, text=text) for i in range(4)]
    return RunResult(
        server=server,
        trace="hits-0",
        seed=1 + number,
        round=number,
        cpu_seconds={"engine": 2 / speed},
        pss_bytes={"engine": 1000},
        wire_bytes=4000,
        hit_rates={"media": 0.25},
        **summarize(replies, 4 / speed),
    )


def report(*results: RunResult, equal_replies: bool = True) -> Report:
    facts = [
        ServerFacts(
            name=name,
            command=["serve"],
            start_seconds=1,
            idle_cpu_cores=0,
            rest_pss_bytes={"engine": 1},
        )
        for name in dict.fromkeys(r.server for r in results)
    ]
    return Report(
        date="2026-01-01", command=[], machine={}, versions={},
        options={"equal_replies": equal_replies},
        servers=facts, results=list(results),
    )  # fmt: skip


def test_a_run_is_summed_up():
    replies = [reply(0, 0.0, 0.1, 0.2, 0.4), reply(0, 1.0, 1.2, 1.3, turn=1)]
    failed = Reply(1, 0, 0.0, error="500: no")
    fields = summarize([*replies, failed], 2.0)
    assert fields["requests_per_second"] == 1.0
    assert fields["output_tokens_per_second"] == 2.5
    assert fields["num_errors"] == 1
    assert fields["errors"] == ["500: no"]
    assert fields["ttft_ms"]["p50"] == pytest.approx(150)
    assert fields["itl_ms"]["p50"] == pytest.approx(100)
    assert fields["itl_ms"]["max"] == pytest.approx(200)
    assert fields["ttft_by_turn_ms"] == pytest.approx([100, 200])
    assert fields["num_cached_tokens"] == 80


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_figure_is_cut_off(is_terminal, monkeypatch, capsys):
    name = "a-server-with-quite-a-long-name.models.svc.example:8000"
    found = report(result(name, 0, 1e-3), result("theirs", 0, 4))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    show(found)
    lines = capsys.readouterr().out.splitlines()
    for table in tables(found):
        for row in [table.columns, *table.rows]:
            assert any(all(cell in line for cell in row) for line in lines), row


def test_ratios_are_of_the_first_server():
    found = report(result("ours", 0, 4), result("theirs", 0, 2), result("theirs", 1, 4),
                   result("ours", 1, 8))  # fmt: skip
    by_name = ratios(found)["hits-0", "theirs"]
    assert by_name["req/s"].median == pytest.approx(2)
    assert by_name["TTFT p50"].median == pytest.approx(0.5)
    assert by_name["CPU s"].num == 2
    assert by_name["longest gap"].median == pytest.approx(0.5)


def test_different_replies_are_a_problem_in_float32_only():
    runs = result("ours", 0, 1), result("theirs", 0, 1, text="a c")
    (line,) = problems(report(*runs))
    assert "4 of 4 replies of theirs differ from those of ours" in line
    assert problems(report(*runs, equal_replies=False)) == []
    assert problems(report(runs[0], result("theirs", 0, 9))) == []


def test_errors_are_a_problem():
    run = result("ours", 0, 1)
    run.num_errors, run.errors = 1, ["429: full"]
    (line,) = problems(report(run))
    assert "429: full" in line


def test_a_report_survives_its_file():
    found = report(result("ours", 0, 1), result("theirs", 0, 2))
    assert loads(dumps(found)) == found


def test_a_turn_that_nobody_got_an_answer_to_survives_the_file():
    failed = Reply(0, 1, 0.0, error="400: too long")
    found = result("a", 0, 1.0)
    for name, value in summarize([reply(0, 0.0, 0.1, 0.2), failed], 1.0).items():
        setattr(found, name, value)
    found.trace = "multi-turn"
    assert len(loads(dumps(report(found))).results) == 1


def test_a_server_that_failed_is_not_infinitely_fast():
    bad = result("bad", 0, 1.0)
    for name, value in summarize([Reply(0, 0, 0.0, error="500")], 1.0).items():
        setattr(bad, name, value)
    found = ratios(report(bad, result("good", 0, 1.0)))["hits-0", "good"]
    assert found["TTFT p50"] is None
    assert found["req/s"].median == 0.0


def test_tables_name_every_server():
    found = tables(report(result("ours", 0, 1), result("theirs", 0, 2)))
    text = "\n".join(table.markdown() for table in found)
    assert text.count("| theirs |") == 4  # itself, speed, cost, ratios
    assert "| theirs | 1 |" in text
    assert "media 25%" in text
    assert all(len(row) == len(table.columns) for table in found for row in table.rows)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_report_is_drawn(tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    draw_plot(report(result("ours", 0, 1), result("theirs", 0, 2)), path)
    begin = path.read_bytes()[:300]
    assert b"<svg" in begin or begin.startswith(b"\x89PNG") or b"<?xml" in begin
