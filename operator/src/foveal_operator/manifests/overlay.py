"""Lays a user's podTemplate over ours: adds, never overrides what the plan rests on.

Called by the builders of workloads and Jobs. Mappings merge, lists of named things merge by name,
mounts by their path, spread constraints by what they spread over and how strictly; other lists are
appended. A value that the operator derives is refused with its path.
"""

from __future__ import annotations

import copy
import posixpath
from typing import Any

from foveal_operator.api.parse import SpecError
from foveal_operator.kube.types import Obj
from foveal_runtime.plan.quantity import parse_bytes, parse_millicores

_LOCKED_SPEC = frozenset(
    {"serviceAccountName", "automountServiceAccountToken", "hostNetwork", "hostPID", "hostIPC",
     "terminationGracePeriodSeconds", "restartPolicy", "subdomain", "hostname"}
)  # fmt: skip
_LOCKED_CONTAINER = frozenset(
    {"command", "args", "image", "ports", "securityContext", "startupProbe",
     "readinessProbe", "livenessProbe"}
)  # fmt: skip


_LOCKED_VOLUMES = frozenset({"config", "model", "curve", "shm", "shared", "warm", "files"})
_MERGE_KEYS = {
    "volumeMounts": ("mountPath",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_STORAGE = "ephemeral-storage"
_RESOURCES = "must be an object such as {limits: {cpu: 4}}"
_LOCKED_ENV = frozenset({"NODE_NAME", "POD_IP", "POD_NAME"})


def lay_over(
    template: Obj, overlay: Obj | None, path: str, container: str, written: str = ""
) -> Obj:
    """The template with the overlay on it. Raises SpecError naming each locked field it touches.

    Args:
        path: where the overlay stands in the resource, for messages.
        container: name of the operator's container, whose essentials are locked.
        written: the name that the overlay has for it in the resource, where it is another.
    """
    overlay = _present(overlay or {})
    if isinstance(metadata := overlay.get("metadata"), dict):
        overlay["metadata"] = _present(metadata)
    if not overlay:
        return template
    problems = _locked(template, overlay, path, container, written or container)
    if problems:
        raise SpecError(problems)
    # A copy: what is built must never be a part of the resource that it is built from.
    merged = _merge(template, copy.deepcopy(overlay), path)
    assert isinstance(merged, dict)
    return merged


def _present(part: Obj) -> Obj:
    """Without nulls: one is what server-side apply leaves of a map whose last entry has gone."""
    return {key: value for key, value in part.items() if value is not None}


def _locked(
    template: Obj, overlay: Obj, path: str, container: str, written: str
) -> list[tuple[str, str]]:
    found = [
        (f"{path}.{key}", "only metadata and spec can be laid over")
        for key in overlay
        if key not in ("metadata", "spec")
    ]
    for part in ("metadata", "spec"):
        if not isinstance(overlay.get(part, {}), dict):
            return [*found, (f"{path}.{part}", "must be an object")]
    found += [
        (f"{path}.metadata.{key}", "only labels and annotations can be added")
        for key in overlay.get("metadata", {})
        if key not in ("labels", "annotations")
    ]
    for key in ("labels", "annotations"):
        if not isinstance(overlay.get("metadata", {}).get(key, {}), dict):
            return [*found, (f"{path}.metadata.{key}", "must be an object")]
    for label in overlay.get("metadata", {}).get("labels", {}):
        if label.startswith(("app.kubernetes.io/", "foveal.dev/")):
            found.append((f"{path}.metadata.labels.{label}", "belongs to the operator"))
    spec = overlay.get("spec", {})
    found += [
        (f"{path}.spec.{key}", "is the operator's: it cannot be laid over")
        for key in spec
        if key in _LOCKED_SPEC
    ]
    containers = spec.get("containers") or ()
    for item in containers if isinstance(containers, list) else ():
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            found.append((f"{path}.spec.containers", "every container needs a name"))
        elif item["name"] == container:
            own = f"{path}.spec.containers[{written}]"
            found += [
                (f"{own}.{key}", "is derived by the operator")
                for key in item
                if key in _LOCKED_CONTAINER
            ]
            found += [
                (f"{own}.env[{name}]", "is set by the operator")
                for name in _names(item.get("env"))
                if name in _LOCKED_ENV
            ]
            if item.get("resources") is not None:
                found += _locked_resources(template, item["resources"], path, f"{own}.resources")
            found += _locked_mounts(template, item.get("volumeMounts"), f"{own}.volumeMounts")
    found += [
        (f"{path}.spec.volumes[{name}]", "is the operator's: its size is part of a budget")
        for name in _names(spec.get("volumes"))
        if _is_locked_volume(name)
    ]
    return found


def _locked_resources(
    template: Obj, given: object, overlay: str, path: str
) -> list[tuple[str, str]]:
    """All but what some namespaces ask for and no budget rests on: a CPU limit, and storage."""
    if not isinstance(given, dict):
        return [(path, _RESOURCES)]
    given = _present(given)
    limits, requests = given.get("limits", {}), given.get("requests", {})
    if not isinstance(limits, dict) or not isinstance(requests, dict):
        return [(path, _RESOURCES)]
    locked = [key for key in given if key not in ("limits", "requests")]
    locked += [f"limits.{key}" for key in limits if key not in ("cpu", _STORAGE)]
    locked += [f"requests.{key}" for key in requests if key != _STORAGE]
    text = f"is derived by the operator: only limits.cpu and {_STORAGE} can be set here"
    found = [(f"{path}.{key}", text) for key in locked]
    if limits.get("cpu") is not None:
        (container,) = template["spec"]["containers"]
        asked = container["resources"]["requests"]["cpu"]
        problem = _cpu_problem(str(limits["cpu"]), asked, overlay.removesuffix(".podTemplate"))
        found += [(f"{path}.limits.cpu", problem)] if problem else []
    for part, amounts in (("limits", limits), ("requests", requests)):
        try:
            parse_bytes(str(amounts.get(_STORAGE) or 0))
        except ValueError as error:
            found.append((f"{path}.{part}.{_STORAGE}", str(error)))
    return found


def _cpu_problem(limit: str, asked: str, role: str) -> str:
    try:
        is_enough = parse_millicores(limit) >= parse_millicores(asked)
    except ValueError as error:
        return str(error)
    if is_enough:
        return ""
    return f"{limit} is below the {asked} that the pods request: raise it, or lower {role}.cpu"


def _locked_mounts(template: Obj, mounts: object, path: str) -> list[tuple[str, str]]:
    """Of the operator's container: its mounts stay where and as they are. What is in its volumes
    may be read elsewhere, too."""
    (container,) = template["spec"]["containers"]
    taken = {_normal(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
    found = []
    for mount in mounts if isinstance(mounts, list) else ():
        if not isinstance(mount, dict):
            continue
        name, at = str(mount.get("name")), str(mount.get("mountPath"))
        if volume := taken.get(_normal(at)):
            text = f"is where the operator mounts its volume {volume}: choose another path"
            found.append((f"{path}[{at}]", text))
        elif _is_locked_volume(name) and mount.get("readOnly") is not True:
            text = (
                f"{name} is the operator's volume: set readOnly: true to read it here, or mount a "
                "volume of your own"
            )
            found.append((f"{path}[{at}]", text))
    return found


def _normal(path: str) -> str:
    """As a container runtime reads it; POSIX would keep two slashes at the beginning."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _is_locked_volume(name: str) -> bool:
    return name in _LOCKED_VOLUMES or name.startswith("secret-")


def _names(items: object) -> list[str]:
    """Names in a list of named things; a list that is none is refused where it is merged."""
    if not isinstance(items, list):
        return []
    return [str(item.get("name")) for item in items if isinstance(item, dict)]


def _merge(base: Any, over: Any, path: str) -> Any:
    if over is None and isinstance(base, dict | list):
        return base  # as the API server reads a key with nothing behind it
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for key, value in over.items():
            merged[key] = _merge(base[key], value, f"{path}.{key}") if key in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list):
        return _merge_lists(base, over, path)
    for kind, word in ((dict, "an object"), (list, "a list")):
        if isinstance(base, kind):
            raise SpecError([(path, f"must be {word}")])
    if isinstance(over, dict | list):
        raise SpecError([(path, "must be a single value")])
    return over


def _merge_lists(base: list[Any], over: list[Any], path: str) -> list[Any]:
    """By the API server's own keys where every element has them: of mounts the path, as a volume
    may have several, else the name (containers, env, volumes). Other lists are appended."""
    keys = _MERGE_KEYS.get(path.rpartition(".")[2], ("name",))
    if not all(isinstance(item, dict) and item.keys() >= {*keys} for item in (*base, *over)):
        return [*base, *(item for item in over if item not in base)]

    for item in over:
        for key in keys:
            if not isinstance(item[key], str):
                raise SpecError([(f"{path}.{key}", f"must be a string, not {item[key]!r}")])

    def name_of(item: Any) -> str:
        return ", ".join(_normal(item[k]) if k == "mountPath" else str(item[k]) for k in keys)

    merged = {name_of(item): item for item in base}
    for item in over:
        name = name_of(item)
        merged[name] = _merge(merged[name], item, f"{path}[{name}]") if name in merged else item
    return list(merged.values())
