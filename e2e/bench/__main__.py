"""The serving bench: the same seeded requests to several servers, paired and alternating.

    python -m e2e.bench --quick                       # tiny model, what is installed, minutes
    python -m e2e.bench --servers foveal,vllm,transformers --traces hits-0,hits-30,hits-95 \\
        --model llava-small --rounds 3

Ratios are of the first server over each other. Exits with 1 when a request failed or, in float32,
when two servers gave different answers; never because something was slow.
See docs/contributing/bench.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table as RichTable

from e2e.bench import processes
from e2e.bench.checkpoints import SHAPES, checkpoint
from e2e.bench.machine import machine_facts, versions
from e2e.bench.pictures import PictureKind
from e2e.bench.report.plot import draw
from e2e.bench.report.report import Report, ServerFacts, Table, dumps, problems, tables
from e2e.bench.runs import Load, Progress, run_all, split_kind
from e2e.bench.servers import MAKERS, Options, Server, is_installed
from e2e.bench.trace import KINDS

IDLE_SECONDS = 3.0
QUICK = {"model": "llava-tiny", "traces": "hits-0,hits-95,mixed", "requests": 12, "rounds": 2}
USUAL = {"model": "llava-small", "traces": "hits-0,hits-30,hits-70,hits-95", "requests": 24,
         "rounds": 3}  # fmt: skip


class BarProgress(Progress):
    """A bar at the bottom of the terminal; lines where there is none."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=1)

    def stage(self, title: str, total: int) -> None:
        if not self._bars.console.is_terminal:
            print(title, file=sys.stderr, flush=True)
        self._bars.reset(self._task, description=title, total=max(total, 1), completed=0)

    def advance(self) -> None:
        self._bars.advance(self._task)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller defaults: " + str(QUICK))
    add("--servers", default="", help=f"of {', '.join(MAKERS)}; default: foveal and peers here")
    add("--traces", help=f"of {', '.join(KINDS)}, or all; text@32: 32 at a time; default "
        f"{USUAL['traces']}")  # fmt: skip
    add("--model", help=f"{', '.join(SHAPES)}, or a folder; default {USUAL['model']}")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--requests", type=int, help="of a trace; 0: as many as it usually has")
    add("--rounds", type=int, help="each with a seed of its own")
    add("--concurrency", type=int, default=4)
    add("--rate", type=float, default=0.0, help="Poisson arrivals a second instead")
    add("--max-tokens", type=int, default=16)
    add("--words", type=int, default=50, help="of a question")
    add("--picture", type=PictureKind.parse, default=PictureKind(), help="e.g. 1024x1024.jpeg")
    add("--threads", type=int, default=0, help="compute threads; 0: each server's own default")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("out/bench"))
    add("--label", default="serving", help="begins the names of the files written")
    arguments = parser.parse_args(argv)
    for name, value in (QUICK if arguments.quick else USUAL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.traces == "all":
        arguments.traces = ",".join(KINDS)
    try:
        kinds = [split_kind(kind)[0] for kind in arguments.traces.split(",")]
    except ValueError as error:
        parser.error(f"--traces: {error}; write text@32")
    for given, known in ((kinds, KINDS), (arguments.servers.split(","), MAKERS)):
        if wrong := [n for n in given if n and n not in known]:
            parser.error(f"unknown: {', '.join(wrong)}; there are {', '.join(known)}")
    if not arguments.servers:
        arguments.servers = ",".join(filter(is_installed, ("foveal", "vllm", "transformers")))
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: the servers are ended, too
    console = Console(width=None if sys.stdout.isatty() else 170)
    names = arguments.servers.split(",")
    for name in names:
        if not is_installed(name):
            raise SystemExit(f"{name} is not installed; run `make bench-peers`")
    model = checkpoint(arguments.model) if arguments.model in SHAPES else Path(arguments.model)
    load = Load(
        tuple(arguments.traces.split(",")), arguments.requests, arguments.concurrency,
        arguments.rate, arguments.max_tokens, arguments.words, arguments.picture,
    )  # fmt: skip
    options = Options(model.resolve(), arguments.dtype, arguments.device, arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    path = arguments.out / f"{arguments.label}-{date}.json"
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    report = Report(
        date=date[:10], command=sys.argv, machine=machine_facts(), versions=versions(),
        options={**shown, "model": str(model)}, servers=[], results=[],
    )  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with contextlib.ExitStack() as stack:
        folder = path.with_suffix(".logs")
        folder.mkdir()
        bars = stack.enter_context(Bars(*columns, TimeElapsedColumn(), transient=True))
        progress = BarProgress(bars)
        servers = []
        for name in names:
            progress.stage(f"starting {name}", 1)
            server = stack.enter_context(Server(MAKERS[name](name, options), folder))
            servers.append(server)
        report.servers = [_facts(server) for server in servers]
        for result in run_all(servers, load, arguments.rounds, arguments.seed, progress):
            report.results.append(result)
            path.write_bytes(dumps(report))  # what is measured is kept, whatever comes
    return show(report, path, console)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _facts(server: Server) -> ServerFacts:
    before = processes.cpu_seconds(server.pid)
    time.sleep(IDLE_SECONDS)
    spent = processes.cpu_between(before, processes.cpu_seconds(server.pid))
    return ServerFacts(
        name=server.name,
        command=server.spec.command,
        start_seconds=server.start_seconds,
        idle_cpu_cores=sum(spent.values()) / IDLE_SECONDS,
        rest_pss_bytes=processes.pss_bytes(server.pid),
    )


def show(report: Report, path: Path, console: Console) -> int:
    """Tables to the terminal and beside the JSON file, the plot, and the verdict."""
    found = tables(report)
    for table in found:
        console.print(_rich(table))
    wrong = problems(report)
    verdict = "".join(f"- {line}\n" for line in wrong) or "No errors; equal replies everywhere.\n"
    text = "\n".join(table.markdown() for table in found)
    path.with_suffix(".md").write_text(f"{text}\n{verdict}")
    draw(report, path.with_suffix(".svg"))
    console.print(verdict.strip(), style="red" if wrong else "green", markup=False)
    console.print(f"{path}, .md and .svg", markup=False)
    return 1 if wrong else 0


def _rich(table: Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if index < 2 else "right")
    for row in table.rows:
        rich.add_row(*row)
    return rich


if __name__ == "__main__":
    sys.exit(main())
