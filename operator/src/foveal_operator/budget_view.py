"""The budgets of one resource, planned beside measured, from its status. Pure.

Called by `foveal budget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foveal_operator.status_view import condition
from foveal_operator.terminal import Style, columns, wrapped
from foveal_runtime.plan.quantity import format_gib

Obj = Mapping[str, Any]
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
    cells = [[style.bold(head) for head in heads]]
    cells += [_budget_cells(row, style) for row in rows]
    lines += ["", *(style.clip(line) for line in columns(cells, right=frozenset({1, 2, 3, 4})))]
    off = [row["name"] for row in rows if abs(row["differencePercent"] or 0) > WARN_PERCENT]
    if off:
        lines += ["", f"more than {WARN_PERCENT} % off the plan: {', '.join(off)}"]
    return "\n".join(lines) + "\n"


def _budget_cells(row: dict[str, Any], style: Style) -> list[str]:
    measured, off = row["measuredBytes"], row["differencePercent"]
    far = off is not None and abs(off) > WARN_PERCENT
    percent = "-" if off is None else f"{off:+.1f}%"
    return [
        row["name"],
        format_gib(row["plannedBytes"]),
        "-" if measured is None else format_gib(int(measured)),
        style.paint(percent, "yellow") if far else percent,
        "-" if row["items"] is None else f"{row['items']:,}",
        row["source"],
        row["formula"],
    ]
