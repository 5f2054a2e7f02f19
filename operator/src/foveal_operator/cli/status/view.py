"""One resource, or all of a namespace, as people read it: from the status, nothing else. Pure.

Called by `foveal status`, `foveal wait` and `foveal budget`. Takes raw objects, so that the status
of a newer or older operator can still be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from foveal_operator.api.reasons import VERSION_SKEW
from foveal_operator.cli.terminal import Style, age, columns, even, tailed, wrapped
from foveal_operator.kube.types import Obj, condition
from foveal_runtime.plan.quantity import format_gib

CONDITIONS = (
    "SpecAccepted", "BudgetFits", "ModelReady", "EnginesReady", "FrontendsReady", "CachesMirrored",
    "RouteReady", "ScalingActive", "Available", "Ready", "Reconciling", "Stalled",
)  # fmt: skip
WHILE_TRUE = frozenset({"Reconciling", "Stalled"})
"""Bad, and there only while they hold."""


def is_current(resource: Obj) -> bool:
    """Whether the status speaks of the present spec."""
    generation = resource["metadata"].get("generation", 0)
    return int(resource.get("status", {}).get("observedGeneration", 0)) >= int(generation)


def resource_table(resources: Sequence[Obj], now: float, style: Style) -> str:
    """All resources of a namespace, a line each."""
    heads = ("NAME", "READY", "REASON", "FRONTENDS", "ENGINES", "IPC", "KV", "AGE")
    rows = [[style.bold(head) for head in heads]]
    for resource in resources:
        ready, status = condition(resource, "Ready"), resource.get("status", {})
        budgets = status.get("budgets") or {}
        rows.append(
            [
                resource["metadata"]["name"],
                _state(ready.get("status", "Unknown"), "Ready", style),
                ready.get("reason", "") if is_current(resource) else "NotYetSeen",
                _ready_of(status.get("frontend")),
                _ready_of(status.get("engine")),
                (budgets.get("ipc") or {}).get("display", "-"),
                (budgets.get("kv") or {}).get("display", "-"),
                _since(resource["metadata"].get("creationTimestamp"), now),
            ]
        )
    return "\n".join(style.clip(line) for line in columns(rows)) + "\n"


def status_text(resource: Obj, now: float, style: Style) -> str:
    """Conditions, pods, caches and the last failure of one resource."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    lines = [_title(resource, style)]
    if status.get("url"):
        uri = resource.get("spec", {}).get("model", {}).get("uri", "")
        serves = condition(resource, "Available").get("status") == "True"
        word = "serves" if serves else "is to serve"
        lines += wrapped(f"{word} {uri} on {status['url']}", style, indent="")
    if not is_current(resource):
        note = (
            f"The operator has not seen generation {metadata.get('generation')} yet: what follows "
            f"is about generation {status.get('observedGeneration', 0)}."
        )
        lines += [style.paint(line, "yellow") for line in wrapped(note, style, indent="")]
    lines += ["", *_conditions(status, now, style)]
    roles = [(name, status[name]) for name in ("frontend", "engine") if status.get(name)]
    if roles:
        lines += ["", *_roles(roles, style)]
    lines += _revisions(status)
    if status.get("budgets"):
        lines += ["", *_caches(status["budgets"], style)]
    if status.get("lastFailure"):
        lines += ["", *_failure(status["lastFailure"], now, style)]
    return "\n".join(lines) + "\n"


def _title(resource: Obj, style: Style) -> str:
    metadata, ready = resource["metadata"], condition(resource, "Ready")
    words = {"True": ("ready", "green"), "False": ("not ready", "red")}
    word, look = words.get(str(ready.get("status")), ("no status yet", "yellow"))
    reason = ready.get("reason", "")
    tail = f" ({reason})" if reason and word != "ready" else ""
    paused = "  paused" if resource.get("spec", {}).get("paused") else ""
    name = style.bold(f"{metadata['name']} in {metadata['namespace']}")
    return f"{name}  {style.paint(word, look)}{tail}{paused}"


def _state(value: str, kind: str, style: Style) -> str:
    good = "False" if kind in WHILE_TRUE else "True"
    look = "yellow" if value == "Unknown" else "green" if value == good else "red"
    if kind == "Reconciling" and value == "True":
        look = "yellow"  # on its way is not a failure
    return style.paint(value, look)


def _conditions(status: Obj, now: float, style: Style) -> list[str]:
    """A row each; why something is not well stands below its row, in full."""
    found = {c["type"]: c for c in status.get("conditions") or ()}
    order = [kind for kind in CONDITIONS if kind in found]
    order += sorted(kind for kind in found if kind not in CONDITIONS)
    rows = [[style.bold(head) for head in ("CONDITION", "STATUS", "REASON", "FOR")]]
    for kind in order:
        one = found[kind]
        since = _since(one.get("lastTransitionTime"), now)
        rows.append([kind, _state(one["status"], kind, style), one.get("reason", ""), since])
    lines = columns(rows)
    result = lines[:1]
    for kind, line in zip(order, lines[1:], strict=True):
        result.append(style.clip(line))
        good = "False" if kind in WHILE_TRUE else "True"
        # Ready, Reconciling and Stalled repeat what another condition says.
        is_told = found[kind]["status"] != good
        is_told |= found[kind].get("reason") == VERSION_SKEW.name
        if is_told and kind not in ("Ready", "Reconciling", "Stalled"):
            result += wrapped(found[kind].get("message", ""), style)
    return result


def _roles(roles: list[tuple[str, Obj]], style: Style) -> list[str]:
    heads = ("PODS", "READY", "UPDATED", "DRAINING", "WORKLOAD")
    rows = [[style.bold(head) for head in heads]]
    for name, role in roles:
        desired = role.get("desired", 0)
        rows.append(
            [
                name,
                f"{role.get('ready', 0)}/{desired}",
                f"{role.get('updated', 0)}/{desired}",
                str(role.get("draining", 0)),
                role.get("workload", "") or "-",
            ]
        )
    return [style.clip(line) for line in columns(rows)]


def _revisions(status: Obj) -> list[str]:
    current, update = status.get("currentRevision"), status.get("updateRevision")
    model = status.get("model") or {}
    lines = []
    if model.get("downloadPercent") is not None:
        lines.append(f"model: {model['downloadPercent']} % fetched")
    if model.get("resolvedRevision"):
        lines.append(f"model revision: {model['resolvedRevision']}")
    if current and update and current != update:
        lines.append(f"revision {current} serves, {update} is on its way")
    if status.get("rolloutStrategy"):
        lines.append(f"rollout: {status['rolloutStrategy']}")
    return ["", *lines] if lines else []


def _caches(budgets: Obj, style: Style) -> list[str]:
    names = [name for name in ("processor", "ipc", "encoder", "encoderHost", "kv", "snapshots")
             if name in budgets and budgets[name].get("bytes")]  # fmt: skip
    rows = [[style.bold(head) for head in ("CACHE", "SIZE", "FROM")]]
    rows += [[name, budgets[name]["display"], budgets[name].get("source", "")] for name in names]
    return columns(rows, right=frozenset({1}))


def _failure(failure: Obj, now: float, style: Style) -> Iterator[str]:
    when = _since(failure.get("time"), now)
    code = failure.get("exitCode", -1)
    ended = f", exit code {code}" if code >= 0 else ""
    peak = failure.get("memoryPeak")
    limit = f" of {failure['memoryLimit']}" if failure.get("memoryLimit") else ""
    used = f", memory peak {peak}{limit}" if peak else ""
    yield style.bold("LAST FAILURE") + (f"  {when} ago" if when != "-" else "")
    what = f"{failure['pod']} ({failure['container']}): {failure['reason']}{ended}{used}"
    yield from wrapped(what, style)
    yield from wrapped(failure.get("message", ""), style)


def _ready_of(role: Obj | None) -> str:
    return f"{role.get('ready', 0)}/{role.get('desired', 0)}" if role else "-"


def _since(text: str | None, now: float) -> str:
    if not text:
        return "-"
    try:
        then = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return "-"
    return age(now - then.replace(tzinfo=then.tzinfo or UTC).timestamp())


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
