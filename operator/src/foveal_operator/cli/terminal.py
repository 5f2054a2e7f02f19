"""Terminal output: plain text for programs, bars and colours for a terminal. Pure.

Used by everything that prints. A table is made of cells; only here is it known that escape codes
have no width.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

import msgspec

BAR_WIDTH = 24
NARROW_BAR_WIDTH = 10
NARROW = 120
MIN_BESIDE = 36
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """`width` is that of the terminal; 0 = as wide as the text is. `color` holds only on one."""

    is_terminal: bool = False
    width: int = 0
    color: bool = True

    def paint(self, text: str, *looks: str) -> str:
        """The text in bold, dim, red, green or yellow, where colours are wanted."""
        if not (self.is_terminal and self.color and looks and text):
            return text
        return f"\x1b[{';'.join(_CODES[look] for look in looks)}m{text}\x1b[0m"

    def bold(self, text: str) -> str:
        return self.paint(text, "bold")

    def bar(self, part: float, whole: float, width: int = 0) -> str:
        """A bar, or nothing where programs read; a short one on a narrow terminal."""
        if not self.is_terminal:
            return ""
        width = width or (NARROW_BAR_WIDTH if 0 < self.width < NARROW else BAR_WIDTH)
        filled = max(0, min(width, round(width * part / whole))) if whole > 0 else 0
        return "█" * filled + "·" * (width - filled)

    def clip(self, text: str) -> str:
        """One line, cut to the terminal's width; escape codes stay whole and are ended."""
        if not self.is_terminal or self.width <= 0 or visible_width(text) <= self.width:
            return text
        kept, room = [], self.width - 1
        for part in re.split(f"({_ESCAPE.pattern})", text):
            if _ESCAPE.fullmatch(part):
                kept.append(part)
            else:
                kept.append(part[:room])
                room -= len(part[:room])
        tail = "\x1b[0m" if len(kept) > 1 else ""
        return "".join(kept) + "…" + tail


def style_of(stream: TextIO) -> Style:
    """What the stream can show. https://no-color.org is heeded, and TERM=dumb."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return Style()
    width = shutil.get_terminal_size().columns
    return Style(is_terminal=True, width=width, color=not os.environ.get("NO_COLOR"))


def visible_width(text: str) -> int:
    return len(_ESCAPE.sub("", text))


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Cells as lines, each column as wide as its widest cell; those in `right` flush right."""
    if not rows:
        return []
    assert all(len(row) == len(rows[0]) for row in rows)
    widths = [max(visible_width(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - visible_width(cell))
            cells.append(gap + cell if index in right else cell + gap)
        lines.append("  ".join(cells).rstrip())
    return lines


def even(lines: Sequence[str]) -> list[str]:
    """All as wide as the widest."""
    widest = max((visible_width(line) for line in lines), default=0)
    return [line + " " * (widest - visible_width(line)) for line in lines]


def age(seconds: float) -> str:
    """47s, 5m, 3h12m, 9d: as kubectl writes it."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        rest = whole % 60
        return f"{minutes}m{rest}s" if minutes < 10 and rest else f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60}m" if hours < 10 and minutes % 60 else f"{hours}h"
    return f"{days}d"


def tailed(line: str, text: str, style: Style) -> list[str]:
    """`line` with `text` behind it; beside it in several lines, or below it, where a terminal has
    no room for both. `line` ends where the text may begin."""
    room = style.width - visible_width(line)
    if not style.is_terminal or style.width <= 0 or visible_width(text) <= room:
        return [f"{line}{text}".rstrip()]
    if room >= MIN_BESIDE:
        first, *rest = textwrap.wrap(text, room)
        return [f"{line}{first}", *(" " * visible_width(line) + part for part in rest)]
    below = wrapped(text, style, " " * 6)
    return [style.clip(line.rstrip()), *(style.paint(part, "dim") for part in below)]


def wrapped(text: str, style: Style, indent: str = "    ") -> list[str]:
    """The text in as many lines as the terminal needs; one line for programs."""
    if not text:
        return []
    if not style.is_terminal or style.width < 40:
        return [f"{indent}{text}"]
    return textwrap.wrap(text, style.width, initial_indent=indent, subsequent_indent=indent)
