"""The time from a command to a ready server and to its first answer, of several servers in turn.

`python -m e2e.bench --starts`. Each start is alone on the machine: the server before has ended. The
first round is shown and not counted, because programs are compiled, files read into memory and the
model's costs found in it. Ready is what the server itself says; the answer is a chat completion.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from e2e.bench.servers import MAKERS, Options, Server
from foveal_runtime.bench.report import Table
from foveal_runtime.bench.stats import Spread, paired_ratio

ANSWER_SECONDS = 120.0


class Start(msgspec.Struct, kw_only=True):
    """One start. Seconds since the command; `error` says why there are none."""

    server: str
    round: int
    ready_seconds: float = 0.0
    answer_seconds: float = 0.0
    error: str = ""


class StartReport(msgspec.Struct, kw_only=True):
    """What the JSON file holds. `machine` and `versions`: facts to read the figures by."""

    date: str
    command: list[str]
    machine: dict[str, str]
    versions: dict[str, str]
    model: str
    starts: list[Start]

    def of(self, server: str, field: str) -> list[float]:
        """The seconds of the counted rounds."""
        found = [s for s in self.starts if s.server == server and s.round and not s.error]
        return [getattr(one, field) for one in found]

    @property
    def problems(self) -> list[str]:
        return [f"{s.server}, round {s.round}: {s.error}" for s in self.starts if s.error]


def run_starts(
    names: Sequence[str],
    options: Options,
    rounds: int,
    folder: Path,
    *,
    done: Callable[[Start], None],
) -> None:
    """`rounds` are counted; one more comes before them. `done` gets each start as it ends. A
    server that fails is not started again."""
    failed: set[str] = set()
    for number in range(rounds + 1):
        for name in names:
            if name not in failed:
                start = _start(name, options, folder, number)
                failed |= {name} if start.error else set()
                done(start)


def _start(name: str, options: Options, folder: Path, number: int) -> Start:
    spec = MAKERS[name](name, options)
    begin = time.perf_counter()
    try:
        with Server(spec, folder) as server:
            _ask(spec.target.urls[0], spec.target.model)
            answer_seconds = time.perf_counter() - begin
    except (OSError, ValueError, SystemExit) as error:
        reason = str(error).strip().splitlines()
        return Start(server=name, round=number, error=reason[0] if reason else repr(error))
    return Start(
        server=name,
        round=number,
        ready_seconds=server.start_seconds,
        answer_seconds=answer_seconds,
    )


def _ask(url: str, model: str) -> None:
    """Raises OSError (HTTPError among them) or ValueError unless there is an answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        if not json.load(answer).get("choices"):
            raise ValueError("the answer has no choices")


def table(report: StartReport) -> Table:
    """A row a server: medians, all values, and times the first server's."""
    names = list(dict.fromkeys(start.server for start in report.starts))
    rows = [_row(report, name, names[0]) for name in names]
    columns = ["server", "ready s", "all", "answer s", "all", "first start s", "times the first's"]
    return Table("From the command to ready and to the first answer", columns, rows)


def _row(report: StartReport, name: str, reference: str) -> list[str]:
    ready, answer = (report.of(name, field) for field in ("ready_seconds", "answer_seconds"))
    first = [s.ready_seconds for s in report.starts if s.server == name and not s.round]
    ours = report.of(reference, "ready_seconds")
    ratio: Spread | None = None
    if len(ready) == len(ours):
        ratio = paired_ratio(ready, ours)
    return [
        name,
        *_median_and_all(ready),
        *_median_and_all(answer),
        f"{first[0]:.1f}" if first and first[0] else "–",
        str(ratio) if ratio and name != reference else "–",
    ]


def _median_and_all(seconds: list[float]) -> tuple[str, str]:
    if not seconds:
        return "–", "–"
    return f"{statistics.median(seconds):.1f}", ", ".join(f"{one:.1f}" for one in sorted(seconds))
