"""`foveal bench` as a command: what it sends to whom, what it writes, when it fails."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from foveal_runtime.bench import display, runs
from foveal_runtime.bench.client import Replay
from foveal_runtime.bench.report import Report, ratios
from foveal_runtime.main import cli
from tests.support.openai_server import OpenAIServer

SMALL = ["--requests", "4", "--words", "5", "--image", "16x16", "--concurrency", "2"]
HELP = Path(__file__).with_name("bench-help.txt")


@pytest.fixture(autouse=True)
def rests(monkeypatch):
    """Seconds that servers were left alone before one's turn; none of them are waited for."""
    found = []
    monkeypatch.setattr(runs, "rest", found.append)
    return found


def bench(*arguments):
    return cli.main(["bench", *map(str, arguments)])


def test_help_is_as_it_is_kept(monkeypatch, capsys):
    """After a change: COLUMNS=80 foveal-runtime bench --help > tests/bench/bench-help.txt"""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        bench("--help")
    assert capsys.readouterr().out == HELP.read_text()


def test_servers_are_compared_in_turn(tmp_path, capsys, rests):
    log = []
    with OpenAIServer(log=log).running() as ours, OpenAIServer(log=log).running() as theirs:
        file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
        code = bench(
            ours.url, "--compare", theirs.url, "--traces", "hits-30,text@2", "--rounds", "2",
            "--json", file, "--plot", picture, *SMALL,
        )  # fmt: skip
    assert code == 0
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    first, second = (server.url.partition("://")[2] for server in (ours, theirs))
    ran = [(r.trace, r.round, r.server) for r in report.results]
    assert [one[2] for one in ran] == [first, second] * 2 + [second, first] * 2
    assert [one[:2] for one in ran] == [("hits-30", 0)] * 2 + [("text@2", 0)] * 2 + [
        ("hits-30", 1)] * 2 + [("text@2", 1)] * 2  # fmt: skip
    assert rests == [2.0] * len(ran)
    assert ratios(report)["text@2", second]["req/s"].num == 2
    assert report.results[0].hit_rates == {"prefix": 0.5}
    assert sorted(map(json.dumps, ours.bodies)) == sorted(map(json.dumps, theirs.bodies))
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert f"{first} over the other, paired by round" in said
    assert "CPU" not in said, "processes elsewhere have no costs to show"
    assert "Every request was answered." in said
    assert bench("--show", file, "--plot", tmp_path / "again.svg") == 0
    assert "<svg" in (tmp_path / "again.svg").read_text()
    assert capsys.readouterr().out.startswith(said.partition("written")[0])


def test_a_server_can_be_compared_with_itself(tmp_path):
    """Its ratio is the noise of the machine."""
    with OpenAIServer().running() as server:
        file = tmp_path / "bench.json"
        arguments = ("--compare", server.url, "--traces", "text", "--json", file, *SMALL)
        assert bench(server.url, *arguments) == 0
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert len(set(report.names)) == 2
    sent = [json.dumps(body["messages"]) for body in server.bodies[8:]]
    assert len(sent) == len(set(sent)) == 8, "nothing is asked twice of one server"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:abc", "is not the URL of a server"),
        ("http://[::1", "is not the URL of a server"),
        ("http://me:secret@127.0.0.1:1", "without a name and password"),
    ],
)
def test_a_url_that_is_none_is_one_line(capsys, url, said):
    assert bench(url) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert "secret" not in line


def test_a_port_that_speaks_no_http_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as connection:
                connection.sendall(b"\xff\x00 something else\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert bench(f"http://127.0.0.1:{listener.getsockname()[1]}") == 2
        thread.join()
    assert "does not speak HTTP" in capsys.readouterr().err


def test_a_folder_is_no_file_to_write(tmp_path, capsys):
    with OpenAIServer().running() as server:
        assert bench(server.url, "--json", tmp_path) == 2
        assert server.bodies == []
    assert "directory" in capsys.readouterr().err


def test_different_replies_fail_where_they_should_be_equal(capsys):
    with OpenAIServer().running() as ours, OpenAIServer(("a ", "c")).running() as theirs:
        options = (ours.url, "--compare", theirs.url, "--traces", "text", *SMALL)
        assert bench(*options) == 0
        assert bench(*options, "--equal-replies") == 1
    assert "4 of 4 replies of" in capsys.readouterr().out


def test_each_server_gets_its_own_key(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with OpenAIServer(key="secret").running() as ours, OpenAIServer().running() as theirs:
        options = ("--compare", theirs.url, "--traces", "text", *SMALL)
        assert bench(ours.url, "--api-key-file", tmp_path / "key", *options) == 0
    assert ours.keys == {"Bearer secret"}
    assert theirs.keys == {""}


def test_a_saved_trace_is_sent_again_as_it_was(tmp_path):
    file = tmp_path / "trace.jsonl"
    with OpenAIServer().running() as server:
        traces = "hits-30,multi-turn,partial-prefix"
        assert bench(server.url, "--traces", traces, "--save-trace", file, *SMALL) == 0
        first, server.bodies = server.bodies[4:], []  # four of a warm-up
        assert bench(server.url, "--replay", file, *SMALL) == 0
    again = server.bodies[4:]
    assert sorted(map(json.dumps, first)) == sorted(map(json.dumps, again))
    assert any(len(body["messages"]) == 5 for body in again), "the third question of three"


def test_a_saved_trace_has_its_own_times_and_lengths(tmp_path, rests):
    lines = [
        {"messages": [{"role": "user", "content": "hello"}], "at": 0.0, "max_tokens": 3},
        {"messages": [{"role": "user", "content": "there"}], "at": 0.2},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    found = tmp_path / "bench.json"
    with OpenAIServer().running() as server:
        assert bench(server.url, "--replay", file, "--json", found, "--max-tokens", "7") == 0
    assert rests == [], "no other server was before it"
    assert [body["max_tokens"] for body in server.bodies[-2:]] == [3, 7]
    assert msgspec.json.decode(found.read_bytes(), type=Report).results[0].wall_seconds >= 0.2


def test_what_was_measured_before_ctrl_c_is_shown_and_kept(tmp_path, monkeypatch, capsys):
    whole = runs.run_all

    def interrupted(*arguments):
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_all", interrupted)
    with OpenAIServer().running() as server:
        file = tmp_path / "bench.json"
        assert bench(server.url, "--traces", "text,mixed", "--json", file, *SMALL) == 130
    assert len(msgspec.json.decode(file.read_bytes(), type=Report).results) == 1
    assert "│ text" in capsys.readouterr().out


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    with OpenAIServer().running() as server:
        assert bench(server.url, "--plot", "bench.png") == 2
    assert server.bodies == []
    assert capsys.readouterr().err == (
        "foveal-runtime: --plot needs matplotlib: pip install 'foveal-runtime[bench]'\n"
    )


def test_foveal_hands_it_on():
    """The command of the other distribution, with its name in messages."""
    foveal = Path(sys.executable).with_name("foveal")
    done = subprocess.run([foveal, "bench", "http://127.0.0.1:9"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "foveal: no server answers at http://127.0.0.1:9: Connection refused\n"


@pytest.mark.parametrize(("given", "limit"), [([], 0), (["--concurrency", "3"], 3)])
def test_a_rate_keeps_the_concurrency_that_was_asked_for(given, limit, monkeypatch):
    runs = []
    replay = Replay.run

    async def run(self, concurrency=0, starts=()):
        runs.append((concurrency, bool(starts)))
        return await replay(self, concurrency, starts)

    monkeypatch.setattr(Replay, "run", run)
    small = SMALL[: SMALL.index("--concurrency")]
    with OpenAIServer().running() as server:
        argv = ["--traces", "text,text@2", "--rate", "500", *small, *given]
        assert bench(server.url, *argv) == 0
    assert runs[1:] == [(limit, True), (2, True)], "the first one warms the server"


def test_a_start_that_fails_leaves_no_files(tmp_path, capsys):
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    files = ["--json", kept, "--plot", tmp_path / "a.svg", "--save-trace", tmp_path / "t.jsonl"]
    assert bench("http://127.0.0.1:9", *files) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == "{}"


@pytest.mark.parametrize("option", ["--json", "--plot", "--save-trace"])
def test_a_full_disk_is_one_line_and_costs_no_result(option, tmp_path, capsys):
    """Measured results were lost in a traceback."""
    (tmp_path / "full.svg").symlink_to("/dev/full")
    file = tmp_path / "full.svg"
    with OpenAIServer().running() as server:
        assert bench(server.url, "--traces", "text", option, file, *SMALL) == 2
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]  # those before tell the progress
    assert last == f"foveal-runtime: {option} {file}: No space left on device"
    assert ("Every request was answered." in said.out) == (option != "--save-trace")
    assert "written" not in said.out
