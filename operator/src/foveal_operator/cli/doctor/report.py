"""Findings of checks, and their text. Pure.

Called by every check and by `foveal doctor`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec

from foveal_operator.cli.terminal import Style

Level = Literal["ok", "warn", "fail"]
_LOOKS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `next_step` says what to do; "" only where all is well."""

    area: str
    level: Level
    text: str
    next_step: str = ""


def ok(area: str, text: str) -> Finding:
    return Finding(area=area, level="ok", text=text)


def warn(area: str, text: str, next_step: str) -> Finding:
    """Something will not work as well as it could, or cannot be known."""
    return Finding(area=area, level="warn", text=text, next_step=next_step)


def fail(area: str, text: str, next_step: str) -> Finding:
    """A resource will not run until this is mended."""
    return Finding(area=area, level="fail", text=text, next_step=next_step)


def report_text(findings: Sequence[Finding], style: Style) -> str:
    """A line each, next steps below; then the sums."""
    width = max((len(finding.area) for finding in findings), default=0)
    indent = " " * (6 + width + 2)
    lines = []
    for finding in findings:
        word = style.paint(f"{finding.level:<4}", _LOOKS[finding.level])
        head = f"{word}  {finding.area:<{width}}  "
        wrapped = _wrap(finding.text, style, indent)
        lines += [head + wrapped[0], *(indent + line for line in wrapped[1:])]
        if finding.next_step:
            step = _wrap(finding.next_step, style, f"{indent}-> ")
            lines += [f"{indent}-> {step[0]}", *(f"{indent}   {line}" for line in step[1:])]
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    warnings = f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"
    sums = f"{counts['ok']} ok, {warnings}, {counts['fail']} failed"
    return "\n".join([*lines, "", style.bold(sums)]) + "\n"


def _wrap(text: str, style: Style, indent: str) -> list[str]:
    room = style.width - len(indent)
    if not style.is_terminal or room < 30:
        return [text]
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
