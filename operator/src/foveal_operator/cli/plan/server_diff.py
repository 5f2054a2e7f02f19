"""Differences between a plan and a cluster: objects by field, and pods that restart. Pure.

Called by `foveal plan --server`. ConfigMaps are named by the hash of what they hold, so a changed
document is a new object; the documents are compared inside, for that is where the reason stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from foveal_operator.cli.terminal import Style, wrapped
from foveal_operator.kube.diff import Change, diff, restart_reasons
from foveal_operator.kube.types import Obj, label_of
from foveal_operator.manifests import Desired
from foveal_operator.manifests.model_source import as_it_can_be
from foveal_operator.manifests.pods import REVISION_LABEL

Find = Callable[[str, str], Obj | None]
"""(kind, name) -> the live object."""
_WORKLOADS = {"StatefulSet": "engine", "Deployment": "frontend"}
_MARKS = {"create": ("+", "green"), "change": ("~", "yellow"), "delete": ("-", "red")}
MAX_FIELDS = 40


class ObjectChange(msgspec.Struct, frozen=True, kw_only=True):
    """One object; `fields` are empty unless it is changed."""

    kind: str
    name: str
    action: Literal["create", "change", "delete"]
    fields: tuple[Change, ...] = ()


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of a role that would be replaced, and the fields that are why."""

    role: str
    pods: tuple[str, ...]
    reasons: tuple[Change, ...]


class ServerDiff(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `how` is the rollout's own word on order and outage; `taken` says of each object
    that has another owner whose it is."""

    changes: tuple[ObjectChange, ...]
    restarts: tuple[Restart, ...]
    how: str = ""
    taken: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.changes or self.restarts or self.taken)


def server_diff(
    wanted: Desired,
    find: Find,
    pods: Mapping[str, tuple[Obj, ...]],
    unwanted: tuple[tuple[str, str], ...],
    how: str,
    jobs: tuple[Obj, ...],
    taken: Mapping[tuple[str, str], str],
) -> ServerDiff:
    """`pods` by role; `unwanted` are (kind, name) of objects that would be deleted, `jobs` those
    that the model needs, `taken` what has another owner."""
    changes = [
        ObjectChange(kind="Job", name=body["metadata"]["name"], action="create")
        for body in jobs
        if find("Job", body["metadata"]["name"]) is None
    ]
    changes += [c for c in _changes(wanted, find) if (c.kind, c.name) not in taken]
    changes += [ObjectChange(kind=kind, name=name, action="delete") for kind, name in unwanted]
    restarts = [
        found for body in _workloads(wanted) if (found := _restart(body, wanted, find, pods))
    ]
    told = tuple(taken.values())
    return ServerDiff(changes=tuple(changes), restarts=tuple(restarts), how=how, taken=told)


def _changes(wanted: Desired, find: Find) -> Iterator[ObjectChange]:
    for owned in wanted.objects:
        kind, _, name = owned.key
        if owned.policy == "CreateOnly" or kind == "Job":
            continue  # never read: whether it is there is the operator's to see; Jobs: see above
        live = find(kind, name)
        if live is None:
            yield ObjectChange(kind=kind, name=name, action="create")
            continue
        body = as_it_can_be(owned.body, live) if owned.policy == "Retain" else owned.body
        found = tuple(diff(body, live))
        if found:
            yield ObjectChange(kind=kind, name=name, action="change", fields=found)


def _workloads(wanted: Desired) -> list[Obj]:
    return [body for kind in _WORKLOADS for body in wanted.of_kind(kind)]


def _restart(
    body: Obj, wanted: Desired, find: Find, pods: Mapping[str, tuple[Obj, ...]]
) -> Restart | None:
    """Pods whose revision is not the one that the template would have."""
    role = _WORKLOADS[body["kind"]]
    revision = body["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
    names = tuple(
        sorted(
            pod["metadata"]["name"]
            for pod in pods.get(role, ())
            if label_of(pod, REVISION_LABEL) != revision
        )
    )
    if not names:
        return None
    live = find(body["kind"], body["metadata"]["name"])
    reasons = [change for change in restart_reasons(body, live) if not _is_consequence(change.path)]
    reasons += _document_changes(role, body, live, wanted, find)
    return Restart(role=role, pods=names, reasons=tuple(reasons))


def _is_consequence(path: str) -> bool:
    """The revision label and the ConfigMap's name only follow from something else."""
    return path.endswith((REVISION_LABEL, "volumes[config].configMap.name"))


def _document_changes(
    role: str, body: Obj, live: Obj | None, wanted: Desired, find: Find
) -> list[Change]:
    """Fields of the start-up document, old against new."""
    file = f"{role}.json"
    before = _document(find("ConfigMap", _config_name(live)) if live else None, file)
    new_name = _config_name(body)
    new = next((b for b in wanted.of_kind("ConfigMap") if b["metadata"]["name"] == new_name), None)
    after = _document(new, file)
    if before is None or after is None:
        return []
    paths = sorted(before.keys() | after.keys())
    return [
        Change(f"{file} {path}", before.get(path), after.get(path))
        for path in paths
        if before.get(path) != after.get(path)
    ]


def _config_name(workload: Obj) -> str:
    for volume in workload["spec"]["template"]["spec"].get("volumes") or ():
        if volume["name"] == "config":
            return str(volume.get("configMap", {}).get("name", ""))
    return ""


def _document(config_map: Obj | None, file: str) -> dict[str, Any] | None:
    text = (config_map or {}).get("data", {}).get(file)
    if text is None:
        return None
    try:
        return dict(_flat(json.loads(text), ""))
    except ValueError:
        return None


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


# --- text --------------------------------------------------------------------------------------
def diff_text(title: str, found: ServerDiff, style: Style) -> str:
    """For people: objects with their fields, then pods that restart and why."""
    lines = [style.bold(title), ""]
    lines += [style.paint(f"! {text}", "red") for text in found.taken]
    for change in found.changes:
        mark, look = _MARKS[change.action]
        lines.append(style.paint(f"{mark} {change.kind} {change.name}", look))
        telling = tuple(field for field in change.fields if not _is_consequence(field.path))
        lines += _fields(telling, style)
    if not found.changes:
        lines.append("No object changes.")
    lines.append("")
    for restart in found.restarts:
        count = len(restart.pods)
        plural = "pod restarts" if count == 1 else "pods restart"
        head = f"{count} {restart.role} {plural}: {', '.join(restart.pods)}"
        lines += [style.clip(style.paint(head, "yellow")), *_fields(restart.reasons, style)]
    if found.restarts and found.how:
        lines += wrapped(f"How: {found.how}", style, indent="")
    if not found.restarts:
        lines.append("No pod restarts.")
    return "\n".join(lines) + "\n"


def _fields(changes: tuple[Change, ...], style: Style) -> list[str]:
    """A line each; what is too long for the terminal goes on, so that both values are seen."""
    lines: list[str] = []
    for change in changes[:MAX_FIELDS]:
        whole = f"    {change}"
        path, _, values = str(change).partition(": ")
        if not style.is_terminal or len(whole) <= style.width or not values:
            lines.append(whole)
        else:
            lines += [style.clip(f"    {path}:"), style.clip(f"        {values}")]
    if len(changes) > MAX_FIELDS:
        lines.append(f"    and {len(changes) - MAX_FIELDS} more fields (see -o json)")
    return lines


def diff_json(found: ServerDiff) -> str:
    """For programs; every field, uncut."""
    return json.dumps(msgspec.to_builtins(found), indent=2) + "\n"
