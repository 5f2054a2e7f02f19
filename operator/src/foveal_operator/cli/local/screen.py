"""Puts pictures on a terminal, over the last one; or prints what changed, line by line.

Called by `foveal up`. Leaves the last picture standing and the cursor visible, whatever happens.
"""

from __future__ import annotations

import shutil
from types import TracebackType
from typing import TextIO

import msgspec

from foveal_operator.cli.local.view import Picture, draw, events, summary
from foveal_operator.cli.output.terminal import Style

SUMMARY_SECONDS = 30.0
_HIDE, _SHOW, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[K", "\x1b[J"


class Screen:
    """Use as a context manager."""

    def __init__(self, stream: TextIO, style: Style) -> None:
        self._stream = stream
        self._style = style
        self._num_lines = 0
        self._last: Picture | None = None
        self._summed: tuple[float, str] = (0.0, "")

    def __enter__(self) -> Screen:
        if self._style.is_terminal:
            self._stream.write(_HIDE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._style.is_terminal:
            self._stream.write(_SHOW)
            self._stream.flush()

    def show(self, picture: Picture) -> None:
        if self._style.is_terminal:
            self._redraw(picture)
        else:
            self._report(picture)
        self._last = picture
        self._stream.flush()

    def _redraw(self, picture: Picture) -> None:
        size = shutil.get_terminal_size()  # the window may have changed
        style = msgspec.structs.replace(self._style, width=size.columns)
        lines = draw(picture, style)[: max(1, size.lines - 1)]
        up = f"\x1b[{self._num_lines}A\r" if self._num_lines else ""
        body = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
        self._stream.write(f"{up}{body}{_CLEAR_BELOW}")
        self._num_lines = len(lines)

    def _report(self, picture: Picture) -> None:
        for line in events(self._last, picture):
            print(line, file=self._stream)
        is_up = all(process.state == "ready" for process in picture.processes)
        was_up = self._last is not None and all(
            process.state == "ready" for process in self._last.processes
        )
        if is_up and not was_up:
            print(f"serving {picture.model} on {picture.url}", file=self._stream)
        if picture.seconds - self._summed[0] >= SUMMARY_SECONDS:
            text = summary(picture)
            if text != self._summed[1]:
                print(text, file=self._stream)
            self._summed = (picture.seconds, text)
