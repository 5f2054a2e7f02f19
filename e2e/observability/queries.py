"""Every query of the dashboards, and the parts of every rule, as text that Prometheus can run.

Called by __main__.py. A rule that does not fire returns nothing, so its comparisons are taken off:
what stands on their sides must return data. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_COMPARES = re.compile(r"\s+(?:>=|<=|==|!=|>|<)\s+(?:bool\s+)?")
_JOINS = re.compile(r"\s+(?:and|or|unless)\b(?:\s+(?:on|ignoring)\s*\([^)]*\))?\s+")


class Ask(NamedTuple):
    """One query and where it stands."""

    where: str
    expr: str


def of_dashboard(name: str, text: str, variables: Mapping[str, str]) -> Iterator[Ask]:
    """Each target of each panel, with the variables filled in."""
    for panel in _panels(json.loads(text)["panels"]):
        for target in panel.get("targets", ()):
            expr = target["expr"]
            for variable, value in variables.items():
                expr = expr.replace(f"${variable}", value)
            left = re.search(r"\$[a-zA-Z_{]", expr)
            assert not left, f"{name}: {panel['title']}: a variable is left in {expr}"
            yield Ask(f"{name}: {panel['title']}", expr)


def _panels(panels: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", ()))


def of_rules(name: str, groups: Iterable[Mapping[str, Any]]) -> Iterator[Ask]:
    """The sides of the comparisons of each rule."""
    for group in groups:
        for rule in group["rules"]:
            for number, part in enumerate(sides(rule["expr"]), start=1):
                yield Ask(f"{name}: {rule.get('alert') or rule['record']}, part {number}", part)


def sides(expr: str) -> list[str]:
    """What is compared and joined on the top level, without numbers; of absent(x), x."""
    expr = expr.strip()
    found = []
    for part in _split(expr, _JOINS):
        for side in _split(part, _COMPARES):
            inner = _unwrap(side)
            if inner != side:
                found += sides(inner)
            elif not re.fullmatch(r"[-+0-9.eE]+|vector\([^()]*\)", side):
                found.append(side)
    return found


def _unwrap(expr: str) -> str:
    """Without parentheses, or absent(...), around all of it."""
    inner = expr.removeprefix("absent")
    if inner.startswith("(") and inner.endswith(")") and _closes_at(inner) == len(inner) - 1:
        return inner[1:-1].strip()
    return expr


def _closes_at(text: str) -> int:
    depth = 0
    for at, character in enumerate(_masked(text)):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return at
    return -1


def _masked(text: str) -> str:
    """Quoted text made harmless, of the same length."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: '"' + "x" * (len(found[0]) - 2) + '"', text)


def _split(expr: str, at: re.Pattern[str]) -> list[str]:
    """Cut where `at` matches outside of any parentheses, braces and quotes."""
    masked, depth, cuts = _masked(expr), 0, []
    depths = []
    for character in masked:
        depth += (character in "({[") - (character in ")}]")
        depths.append(depth)
    begin = 0
    for found in at.finditer(masked):
        if depths[found.start()] == 0:
            cuts.append(expr[begin : found.start()].strip())
            begin = found.end()
    return [*cuts, expr[begin:].strip()]
