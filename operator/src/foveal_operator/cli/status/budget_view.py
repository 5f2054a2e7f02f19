"""The budgets of one resource, planned beside measured, from its status. Pure.

Called by `foveal budget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foveal_operator.cli.output.terminal import Style, columns, even, tailed, wrapped
from foveal_operator.cli.status.view import condition
from foveal_operator.kube.types import Obj
from foveal_runtime.plan.quantity import format_gib

WARN_PERCENT = 15
"""Measured this much off the plan is worth a look; the alerts use the same figure."""


def budget_rows(budgets: Obj) -> list[dict[str, Any]]:
    """Planned and measured by name, for programs too. Limits come last."""
    names = sorted(budgets, key=lambda name: (name.endswith("Memory"), name))
    found = []
    for name in names:
        one = budgets[name]
        planned, measured = int(one.get("bytes", 0)), one.get("measuredBytes")
        off = None
        if measured is not None and planned > 0:
            off = round(100 * (int(measured) - planned) / planned, 1)
        found.append(
            {
                "name": name,
                "plannedBytes": planned,
                "measuredBytes": measured,
                "differencePercent": off,
                "items": one.get("items"),
                "source": one.get("source", ""),
                "formula": one.get("formula", ""),
            }
        )
    return found


def budget_text(resource: Obj, style: Style) -> str:
    """Each figure of the plan beside what the pods report."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    lines = [style.bold(f"{metadata['name']} in {metadata['namespace']}")]
    fits = condition(resource, "BudgetFits")
    if fits.get("status") == "False":
        lines += [style.paint("does not fit", "red"), *wrapped(fits.get("message", ""), style)]
    rows = budget_rows(status.get("budgets") or {})
    if not rows:
        reason = fits.get("message") or "the operator has not planned this resource yet"
        return "\n".join([*lines, reason]) + "\n"
    heads = ("BUDGET", "PLANNED", "MEASURED", "OFF", "ITEMS", "FROM", "HOW")
    cells = [[style.bold(head) for head in heads[:-1]]]
    cells += [_budget_cells(row, style) for row in rows]
    first, *table = even(columns(cells, right=frozenset({1, 2, 3, 4})))
    lines += ["", style.clip(f"{first}  {style.bold(heads[-1])}")]
    for row, line in zip(rows, table, strict=True):
        lines += tailed(f"{line}  ", row["formula"], style)
    off = [row["name"] for row in rows if _is_far(row)]
    if off:
        lines += ["", f"more than {WARN_PERCENT} % off the plan: {', '.join(off)}"]
    return "\n".join(lines) + "\n"


def _is_limit(row: Mapping[str, Any]) -> bool:
    """What a pod or device may take; it is well when less of it is in use."""
    return str(row["name"]).endswith("Memory")


def _is_far(row: Mapping[str, Any]) -> bool:
    off = row["differencePercent"]
    if off is None or _is_limit(row):
        return False
    return bool(abs(off) > WARN_PERCENT)


def _off(row: Mapping[str, Any], style: Style) -> str:
    off = row["differencePercent"]
    if off is None:
        return "-"
    if _is_limit(row):
        return f"{100 + off:.0f}% used"
    return style.paint(f"{off:+.1f}%", "yellow") if _is_far(row) else f"{off:+.1f}%"


def _budget_cells(row: dict[str, Any], style: Style) -> list[str]:
    measured = row["measuredBytes"]
    return [
        row["name"],
        format_gib(row["plannedBytes"]),
        "-" if measured is None else format_gib(int(measured)),
        _off(row, style),
        "-" if row["items"] is None else f"{row['items']:,}",
        row["source"],
    ]
