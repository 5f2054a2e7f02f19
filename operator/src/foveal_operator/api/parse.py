"""Parses a MultiModalInference object into an InferenceSpec, or says which field is wrong and why.

Called by the reconciler and the CLI with the raw object. Checks everything that the generated
schema and its CEL check, so that `foveal plan` refuses what the API server would refuse.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from foveal_operator.api.crd import (
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    RESERVED_MESSAGE,
    RESERVED_NAMES,
    VERSION,
)
from foveal_operator.api.rules import FORMATS, Part
from foveal_operator.api.spec import MultiModalInferenceSpec

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LOCATED = re.compile(
    r"(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>[^`]*)`)?", re.DOTALL
)


class SpecError(Exception):
    """The resource is wrong. `problems` holds (field path, what is wrong), never empty."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        assert problems
        self.problems = problems
        super().__init__("\n".join(f"{path}: {what}" for path, what in problems))


class InferenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One resource as parsed. `uid` is empty where there is no cluster."""

    name: str
    namespace: str
    generation: int = 0
    uid: str = ""
    spec: MultiModalInferenceSpec

    @property
    def num_frontends(self) -> int:
        """The most frontends there can be."""
        f = self.spec.frontend
        return f.autoscaling.max_replicas if f.autoscaling else _default_one(f.replicas)

    @property
    def num_engines(self) -> int:
        """The most engines there can be."""
        e = self.spec.engine
        return e.autoscaling.max_replicas if e.autoscaling else _default_one(e.replicas)

    @property
    def served_name(self) -> str:
        return self.spec.model.name or self.name


def _default_one(replicas: int | None) -> int:
    return 1 if replicas is None else replicas


def parse(obj: object) -> InferenceSpec:
    """The typed resource. Raises SpecError with every problem that can be found at once."""
    if not isinstance(obj, Mapping):
        raise SpecError([("", "a resource is a mapping with apiVersion, kind, metadata, spec")])
    metadata = obj.get("metadata")
    if not isinstance(metadata, Mapping):
        metadata = {}
    problems = [*_header_problems(obj, metadata)]
    if not isinstance(obj.get("spec"), Mapping):
        raise SpecError([*problems, ("spec", "is missing")])
    try:
        given = _without_nulls(obj["spec"])
        spec = msgspec.convert(given, MultiModalInferenceSpec)
    except msgspec.ValidationError as error:
        raise SpecError([*problems, _located(str(error), given)]) from error
    problems += rule_problems(spec, "spec")
    served = spec.model.name or metadata.get("name")
    if spec.engine.lora and any(one.name == served for one in spec.engine.lora.adapters):
        problems.append(
            ("spec.engine.lora.adapters", f"{served!r} is the name of the served model")
        )
    if problems:
        raise SpecError(problems)
    return InferenceSpec(
        name=metadata["name"],
        namespace=metadata.get("namespace") or "default",
        generation=metadata.get("generation") or 0,
        uid=metadata.get("uid") or "",
        spec=spec,
    )


def _without_nulls(value: object) -> object:
    """As the API server: a field set to nothing (`frontend:` alone on its line) is absent.

    A podTemplate keeps its nulls; there they say what to remove.
    """
    if not isinstance(value, Mapping):
        return value
    return {
        key: item if key == "podTemplate" else _without_nulls(item)
        for key, item in value.items()
        if item is not None
    }


def transition_problems(
    new: MultiModalInferenceSpec, old: MultiModalInferenceSpec
) -> list[tuple[str, str]]:
    """What an update may not change; only `foveal plan --server` asks, the API server enforces."""
    found = []
    for name in new.__struct_fields__:
        part = getattr(new, name)
        for rule in getattr(type(part), "TRANSITIONS", ()):
            if not rule.check(part, getattr(old, name)):
                found.append((f"spec.{name}.{rule.field}", rule.message))
    return found


def _header_problems(
    obj: Mapping[str, Any], metadata: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    if obj.get("apiVersion") != f"{GROUP}/{VERSION}":
        yield "apiVersion", f"is {obj.get('apiVersion')!r}; write {GROUP}/{VERSION}"
    if obj.get("kind") != KIND:
        yield "kind", f"is {obj.get('kind')!r}; write {KIND}"
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        yield "metadata.name", "is missing"
    elif len(name) > MAX_NAME_LENGTH:
        yield (
            "metadata.name",
            f"has {len(name)} characters; at most {MAX_NAME_LENGTH}, because objects of the "
            "resource add to it",
        )
    elif not _NAME.fullmatch(name):
        yield "metadata.name", f"{name!r} must be a DNS label that starts with a letter"
    elif name in RESERVED_NAMES:
        yield "metadata.name", f"{name!r} {RESERVED_MESSAGE}"
    namespace = metadata.get("namespace")
    if namespace and not (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)):
        yield "metadata.namespace", f"{namespace!r} must be a DNS label"


def _located(message: str, spec: object) -> tuple[str, str]:
    """msgspec's own message about `spec`, as a field and what to write there."""
    match = _LOCATED.fullmatch(message)
    assert match is not None
    path, what = match["path"] or "", match["what"]
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        close = difflib.get_close_matches(unknown[1], _choices(path), 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        return _join("spec", path, unknown[1]), f"unknown field{meant}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return _join("spec", path, missing[1]), "is required"
    where = _join("spec", path)
    if what.startswith("Invalid enum value"):
        return where, f"is {_shown(spec, path)}; write one of {', '.join(_choices(path))}"
    if expected := re.fullmatch(r"Expected `([^`]+)`(?:, got `(.*)`|(?P<bound> .*))?", what):
        kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        is_now = _shown(spec, path) or _KINDS.get(expected[2], "")
        wanted = " or ".join(kinds) + (expected["bound"] or "")
        subject = "a key " if match["key"] else ""
        return where, subject + (f"is {is_now}; write {wanted}" if is_now else f"must be {wanted}")
    return where, what[:1].lower() + what[1:]


_KINDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}


def _steps(path: str) -> list[str]:
    """`lora.adapters[0].name` as its four parts."""
    return re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)


def _shown(spec: object, path: str) -> str:
    """The scalar at `path`; empty where msgspec does not say which key it is, or for a mapping."""
    value: Any = spec
    for step in _steps(path):
        if step == "[...]":
            return ""
        value = value[int(step[1:-1]) if step.startswith("[") else step]
    return "" if isinstance(value, Mapping | list) else json.dumps(value, ensure_ascii=False)


def _choices(path: str) -> list[str]:
    """Names of the fields, or the values, that may stand at `path`."""
    info = inspect.type_info(MultiModalInferenceSpec)
    for step in _steps(path):
        if isinstance(info, inspect.StructType):
            info = next(field.type for field in info.fields if field.encode_name == step)
        else:
            assert isinstance(info, inspect.VarTupleType)
            info = info.item_type
        info = _plain(info)
    if isinstance(info, inspect.StructType):
        return [field.encode_name for field in info.fields]
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else []


def _plain(info: inspect.Type) -> inspect.Type:
    """Without bounds, and without null."""
    while isinstance(info, inspect.Metadata | inspect.UnionType):
        if isinstance(info, inspect.Metadata):
            info = info.type
        else:
            info = next(one for one in info.types if not isinstance(one, inspect.NoneType))
    return info


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


@functools.cache
def _fields(part: type[Part]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(part)
    assert isinstance(info, inspect.StructType)
    return info.fields


def rule_problems(part: Part, path: str) -> list[tuple[str, str]]:
    """Rules and formats that `part` and everything below it breaks."""
    found = [
        (_join(path, rule.field), rule.message)
        for rule in getattr(type(part), "RULES", ())
        if not rule.check(part)
    ]
    for field in _fields(type(part)):
        value, where = getattr(part, field.name), f"{path}.{field.encode_name}"
        if isinstance(value, Part):
            found += rule_problems(value, where)
        elif isinstance(value, str):
            found += _format_problems(field.type, value, where)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Part):
                    found += rule_problems(item, f"{where}[{index}]")
    return found


def _format_problems(info: inspect.Type, value: str, where: str) -> list[tuple[str, str]]:
    if isinstance(info, inspect.UnionType):
        return [p for t in info.types for p in _format_problems(t, value, where)]
    if not isinstance(info, inspect.Metadata):
        return []
    name = (info.extra_json_schema or {}).get("x-foveal-format")
    if name is not None and not FORMATS[name].check(value):
        return [(where, f"{value!r} {FORMATS[name].message}")]
    return _format_problems(info.type, value, where)
