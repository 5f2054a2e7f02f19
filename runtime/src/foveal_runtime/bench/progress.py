"""The terminal's side of a bench: a bar while it runs, then tables and the verdict."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from foveal_runtime.bench.report import Report, Table, problems, tables
from foveal_runtime.bench.runs import RunProgress

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
    """Prints tables and the verdict; returns what is wrong."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(report):
        console.print(_rich(table))
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
