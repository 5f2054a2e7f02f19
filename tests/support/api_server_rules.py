"""What a kube-apiserver would say to a resource: the generated schema and its CEL, in Python.

Structural checks as the API server makes them (unknown fields under strict validation) and CEL
through cel-python with the Kubernetes quantity library. The tier with a real API server runs the
same samples; this one runs in every test run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import celpy
from celpy import celtypes

from foveal_operator.api.crd import custom_resource_definition
from foveal_runtime.plan import quantity

Problem = tuple[str, str]
_ENV = celpy.Environment()
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _quantity(text: Any) -> celtypes.IntType:
    value = quantity.parse(str(text)) * 1000
    return celtypes.IntType(min(int(value), 2**63 - 1))  # larger ones only have to compare so


_FUNCTIONS = {
    "isQuantity": lambda text: celtypes.BoolType(quantity.is_quantity(str(text))),
    "quantity": _quantity,
    "compareTo": lambda a, b: celtypes.IntType((a > b) - (a < b)),
    "isLessThan": lambda a, b: celtypes.BoolType(a < b),
    "isGreaterThan": lambda a, b: celtypes.BoolType(a > b),
    "add": lambda a, b: a + b,
}


@functools.cache
def _program(rule: str) -> Any:
    return _ENV.program(_ENV.compile(rule), functions=_FUNCTIONS)


@functools.cache
def root_schema() -> dict[str, Any]:
    (version,) = custom_resource_definition()["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def problems(obj: Any, old: Any = None) -> list[Problem]:
    """Everything wrong with a resource (or with an update of `old`), by field path."""
    # As the API server: rules run only on what has the right structure.
    return list(_structure(root_schema(), obj, "")) or list(_cel(root_schema(), obj, old, ""))


def _structure(schema: dict[str, Any], value: Any, path: str) -> Iterator[Problem]:
    if path == ".metadata":
        return
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        yield path, f"must be of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield path, f"must be one of {schema['enum']}"
    if kind == "string":
        if len(value) > schema.get("maxLength", 1 << 30) or len(value) < schema.get("minLength", 0):
            yield path, "has a wrong length"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield path, f"should match {schema['pattern']}"
    elif kind == "integer":
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield path, "is out of range"
    elif kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]:
            yield path, "has a wrong number of items"
        for index, item in enumerate(value):
            yield from _structure(schema["items"], item, f"{path}[{index}]")
    elif kind == "object":
        yield from _object(schema, value, path)


def _object(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[Problem]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}", "is required"
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    if len(value) > schema.get("maxProperties", 1 << 30):
        yield path, "has too many entries"
    for name, item in value.items():
        if name in properties:
            yield from _structure(properties[name], item, f"{path}.{name}")
        elif extra:
            yield from _structure(extra, item, f"{path}.{name}")
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name}", "unknown field"


def _cel(schema: dict[str, Any], value: Any, old: Any, path: str) -> Iterator[Problem]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        scope = {"self": celpy.json_to_cel(value)}
        if old is not None:
            scope["oldSelf"] = celpy.json_to_cel(old)
        if not _program(rule["rule"]).evaluate(scope):
            yield path + rule.get("fieldPath", ""), rule["message"]
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                below = old.get(name) if isinstance(old, dict) else None
                yield from _cel(child, value[name], below, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _cel(schema["items"], item, None, f"{path}[{index}]")
