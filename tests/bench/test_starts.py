"""Starts of servers one after the other: what is measured, counted and shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from e2e.bench import starts
from e2e.bench.servers import Options, Spec
from e2e.bench.starts import Start, StartReport, run_starts, table
from foveal_runtime.bench.client import Target
from foveal_runtime.plan.local import free_port

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer({"choices": [{}] if body["model"] == "m" else []})
    def answer(self, document):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def make(name: str, options: Options) -> Spec:
    port = free_port()
    command = [sys.executable, "-c", SERVER if name != "broken" else "raise SystemExit", str(port)]
    target = Target((f"http://127.0.0.1:{port}",), "m" if name != "mute" else "other", name)
    return Spec(name, command, {}, target, "/health")


def test_each_server_starts_alone_and_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["one", "broken", "mute"]
    monkeypatch.setattr(starts, "MAKERS", dict.fromkeys(names, make))
    found: list[Start] = []
    run_starts(names, Options(tmp_path), 2, tmp_path, done=found.append)
    order = [("one", 0), ("broken", 0), ("mute", 0), ("one", 1), ("one", 2)]
    assert [(one.server, one.round) for one in found] == order, "what failed is not tried again"
    good = [one for one in found if one.server == "one"]
    assert all(0 < one.ready_seconds <= one.answer_seconds and not one.error for one in good)
    assert "ended at start" in found[1].error
    assert found[2].error == "the answer has no choices"


def test_the_first_round_is_shown_and_not_counted() -> None:
    made = [
        Start(server=name, round=number, ready_seconds=ready, answer_seconds=ready + 1)
        for name, seconds in (("foveal", (9.0, 2.0, 4.0, 3.0)), ("other", (9.5, 4.0, 6.0, 9.0)))
        for number, ready in enumerate(seconds)
    ]
    report = StartReport(
        date="2026-11-23", command=[], machine={}, versions={}, model="m",
        starts=[*made, Start(server="broken", round=0, error="it ended")],
    )  # fmt: skip
    ours, other, broken = table(report).rows
    assert ours == ["foveal", "3.0", "2.0, 3.0, 4.0", "4.0", "3.0, 4.0, 5.0", "9.0", "–"]
    assert other[1:6] == ["6.0", "4.0, 6.0, 9.0", "7.0", "5.0, 7.0, 10.0", "9.5"]
    assert other[6] == "2.00 (1.50 to 3.00)"
    assert broken == ["broken", *["–"] * 6]
    assert report.problems == ["broken, round 0: it ended"]
