"""Bars of a download on a terminal, and lines elsewhere, told by what downloads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from foveal_runtime.plan.quantity import short_bytes

SAY_SECONDS = 10.0


class Bars:
    """What `foveal serve` shows of a download: on a terminal a bar for each file under way and one
    for all of them, elsewhere a line now and then. Use as a context manager; any thread may tell.

    Args:
        total_bytes: of all files. out: where it is shown; None: nowhere.
    """

    def __init__(self, total_bytes: int, out: TextIO | None) -> None:
        self._out = out
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._said = time.monotonic()
        self._lock = threading.Lock()
        self._drawn = _bars(out) if out is not None and out.isatty() else None
        if self._drawn is not None:
            self._all = self._drawn.add_task("all files", total=total_bytes)

    def __enter__(self) -> Bars:
        if self._drawn is not None:
            self._drawn.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn is not None:
            self._drawn.stop()

    def begin(self, name: str, total_bytes: int) -> Callable[[int], None]:
        """Shows a file. Call what is returned with each number of bytes that have come."""
        if self._drawn is None:
            return self._count
        drawn, own = self._drawn, self._drawn.add_task(name, total=total_bytes)
        missing = total_bytes

        def came(num_bytes: int) -> None:
            nonlocal missing
            missing -= num_bytes
            drawn.update(own, advance=num_bytes, visible=missing > 0)  # those under way alone
            drawn.advance(self._all, num_bytes)

        return came

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._out is not None and time.monotonic() - self._said >= SAY_SECONDS:
                self._said = time.monotonic()
                done, total = short_bytes(self._done_bytes), short_bytes(self._total_bytes)
                print(f"downloaded {done} of {total}", file=self._out, flush=True)


def _bars(out: TextIO) -> Any:
    """Rich's, which the fetch Job may lack: it has no terminal."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False), progress.BarColumn(None),
        progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=out, highlight=False), transient=True, expand=True,
    )  # fmt: skip
