"""A bench as people see it: a bar while it runs, then tables, the verdict and a plot.

matplotlib is loaded only when a plot is made; the extra `bench` installs it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from foveal_runtime.bench.report import Report, Table, problems, tables
from foveal_runtime.bench.result import RunResult
from foveal_runtime.bench.runs import RunProgress
from foveal_runtime.plan.errors import StartupError

PANELS: list[tuple[str, Callable[[RunResult], float]]] = [
    ("requests a second (more is better)", lambda r: r.requests_per_second),
    ("first token, p50 in ms (less is better)", lambda r: r.ttft_ms.get("p50", 0.0)),
    ("CPU seconds a request (less is better)", lambda r: r.total_cpu_seconds / r.num_requests),
]


FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises StartupError when no plot could be written there: before anything is measured."""
    if path.suffix not in FORMATS:
        raise StartupError(f"--plot {path}: end its name with .png or .svg")
    if find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install 'foveal-runtime[bench]'")


def draw_plot(report: Report, path: Path) -> None:
    """Writes an SVG or a PNG, as the path's suffix says. Bars are medians, whiskers all rounds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "foveal"  # the same report gives the same file
    from matplotlib import pyplot

    panels = PANELS if any(result.cpu_seconds for result in report.results) else PANELS[:-1]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(max(6, 1.6 * len(report.traces) + 2), 3 * len(panels))
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        _bars(axis, report, value)
        axis.set_title(title, fontsize=10, loc="left")
    axes[0].legend(fontsize=8, ncols=3)
    model = Path(str(report.options.get("model") or report.servers[0].model)).name
    parts = (model, str(report.options.get("dtype", "")), report.date)
    title = ", ".join(part for part in parts if part)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _bars(axis: Any, report: Report, value: Callable[[RunResult], float]) -> None:
    traces, names = report.traces, report.names
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        middles, below, above = [], [], []
        for trace in traces:
            values = [value(result) for result in report.of(trace, name)] or [0.0]
            middle = statistics.median(values)
            middles.append(middle)
            below.append(middle - min(values))
            above.append(max(values) - middle)
        places = [i - 0.4 + width * (index + 0.5) for i in range(len(traces))]
        axis.bar(places, middles, width, yerr=[below, above], capsize=2, label=name)
    axis.set_xticks(range(len(traces)), traces)
    axis.grid(axis="y", alpha=0.3)


WIDTH = 170
"""Of tables that do not go to a terminal."""


class BarProgress(RunProgress):
    """A bar at the bottom of the terminal; lines on standard error where there is none."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
        )
        console = Console(stderr=True)
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bars.add_task("", total=1)

    def __enter__(self) -> BarProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, title: str, total: int) -> None:
        if not self._bars.console.is_terminal:
            print(title, file=sys.stderr, flush=True)
        self._bars.reset(self._task, description=title, total=max(total, 1), completed=0)

    def advance(self) -> None:
        self._bars.advance(self._task)


def show(report: Report) -> list[str]:
    """Prints tables, every cell whole, and the verdict; returns what is wrong."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    drawn = [_rich(table) for table in tables(report)]
    unbounded = console.options.update(max_width=sys.maxsize)
    # A terminal that is too narrow wraps the lines; figures that are cut off are of no use.
    needed = max(Measurement.get(console, unbounded, table).maximum for table in drawn)
    console.width = max(console.width, needed)
    for table in drawn:
        console.print(table)
    wrong = problems(report)
    console.print(verdict(wrong).strip(), style="red" if wrong else "green", markup=False)
    return wrong


def verdict(wrong: list[str]) -> str:
    return "".join(f"- {line}\n" for line in wrong) or "Every request was answered.\n"


def _rich(table: Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if index < 2 else "right")
    for row in table.rows:
        rich.add_row(*map(escape, row))
    return rich
