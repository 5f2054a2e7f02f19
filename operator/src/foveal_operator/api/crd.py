"""Generates crds/foveal.dev_multimodalinferences.yaml from the typed resource.

Run by `make generate`; a test regenerates and compares. Emits only what the API server accepts
(no $ref, no anyOf, no defaults) and refuses to emit a field without a description or a bound.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from foveal_operator.api.rules import FORMATS, Part, Rule, Transition
from foveal_operator.api.spec import MultiModalInferenceSpec
from foveal_operator.api.status import MultiModalInferenceStatus

GROUP, VERSION, KIND, PLURAL = (
    "foveal.dev",
    "v1alpha1",
    "MultiModalInference",
    "multimodalinferences",
)
MAX_NAME_LENGTH = 40
RESERVED_NAMES = ("default", "kubernetes")
"""Names of a ServiceAccount and a Service that Kubernetes itself makes and uses."""
RESERVED_MESSAGE = (
    "is reserved: Kubernetes has a ServiceAccount named default in every namespace and a Service "
    "named kubernetes"
)

Schema = dict[str, Any]


class UnboundedField(AssertionError):
    """A field of the resource lacks a description or a bound: the generator's own check."""


def schema_of(part: type[Part]) -> Schema:
    """The structural schema of one struct."""
    return _object(inspect.type_info(part), part.__name__)


def _object(info: inspect.Type, path: str) -> Schema:
    assert isinstance(info, inspect.StructType)
    schema: Schema = {
        "description": (info.cls.__doc__ or "").strip(),
        "type": "object",
        "properties": {
            field.encode_name: _field(field, f"{path}.{field.encode_name}") for field in info.fields
        },
    }
    required = [field.encode_name for field in info.fields if field.required]
    if required:
        schema["required"] = required
    rules = [*getattr(info.cls, "RULES", ()), *getattr(info.cls, "TRANSITIONS", ())]
    if rules:
        schema["x-kubernetes-validations"] = [_validation(rule) for rule in rules]
    return schema


def _field(field: inspect.Field, path: str) -> Schema:
    info = field.type
    extra = info.extra_json_schema or {} if isinstance(info, inspect.Metadata) else {}
    if "description" not in extra:
        raise UnboundedField(f"{path} has no description")
    schema = _value(info, path)
    schema["description"] = extra["description"]
    # description first reads better in YAML
    return {"description": schema.pop("description"), **schema}


def _value(info: inspect.Type, path: str) -> Schema:
    if isinstance(info, inspect.Metadata):
        extra = info.extra_json_schema or {}
        schema = {"type": "object"} if "x-foveal-raw" in extra else _value(info.type, path)
        for key, value in extra.items():
            _apply_extra(schema, key, value)
        return schema
    if isinstance(info, inspect.UnionType):
        (only,) = [t for t in info.types if not isinstance(t, inspect.NoneType)]
        return _value(only, path)
    if isinstance(info, inspect.StructType):
        return _object(info, path)
    if isinstance(info, inspect.BoolType):
        return {"type": "boolean"}
    if isinstance(info, inspect.LiteralType):
        kind = "integer" if isinstance(info.values[0], int) else "string"
        return {"type": kind, "enum": list(info.values)}
    if isinstance(info, inspect.IntType):
        return _integer(info, path)
    if isinstance(info, inspect.StrType):
        return _string(info, path)
    if isinstance(info, inspect.VarTupleType):
        if info.max_length is None:
            raise UnboundedField(f"{path} has no maxItems")
        items = _value(info.item_type, f"{path}[]")
        schema = {"type": "array", "maxItems": info.max_length, "items": items}
        return {**schema, "minItems": info.min_length} if info.min_length else schema
    if isinstance(info, inspect.DictType):
        return _map(info, path)
    raise UnboundedField(f"{path}: {type(info).__name__} has no place in a resource")


def _apply_extra(schema: Schema, key: str, value: Any) -> None:
    if key == "x-foveal-format":
        rule = FORMATS[value]
        schema["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message}]
    elif key == "x-foveal-raw":
        schema["x-kubernetes-preserve-unknown-fields"] = True
    elif key == "x-foveal-list-map":
        schema["x-kubernetes-list-type"] = "map"
        schema["x-kubernetes-list-map-keys"] = [value]
    elif key != "description":
        schema[key] = value


def _integer(info: inspect.IntType, path: str) -> Schema:
    if info.ge is None:
        raise UnboundedField(f"{path} has no minimum")
    schema: Schema = {"type": "integer", "minimum": info.ge}
    return schema if info.le is None else {**schema, "maximum": info.le}


def _string(info: inspect.StrType, path: str) -> Schema:
    if info.max_length is None:
        raise UnboundedField(f"{path} has no maxLength")
    schema: Schema = {"type": "string", "maxLength": info.max_length}
    if info.min_length:
        schema["minLength"] = info.min_length
    if info.pattern:
        schema["pattern"] = info.pattern
    return schema


def _map(info: inspect.DictType, path: str) -> Schema:
    if isinstance(info.value_type, inspect.AnyType):
        return {"type": "object"}  # a raw overlay; _apply_extra marks it
    if info.max_length is None:
        raise UnboundedField(f"{path} has no maxProperties")
    least: Schema = {"minProperties": info.min_length} if info.min_length else {}
    return {
        "type": "object",
        **least,
        "maxProperties": info.max_length,
        "additionalProperties": _value(info.value_type, f"{path}.*"),
    }


def _validation(rule: Rule | Transition) -> Schema:
    schema = {"rule": rule.cel, "message": rule.message}
    if rule.field:
        schema["fieldPath"] = f".{rule.field}"
    return schema


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def _condition(kind: str, key: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{key}'


def printer_columns() -> Iterable[Schema]:
    """`kubectl get mmi`: is it serving, how much cache, why not, in one line."""
    yield _column("Ready", _condition("Ready", "status"))
    yield _column("Reason", _condition("Ready", "reason"))
    yield _column("Frontends", ".status.frontend.ready", "integer")
    yield _column("Engines", ".status.engine.ready", "integer")
    yield _column("MM", ".status.budgets.ipc.display")
    yield _column("KV", ".status.budgets.kv.display")
    yield _column("Age", ".metadata.creationTimestamp", "date")
    yield _column("Fits", _condition("BudgetFits", "status"), priority=1)
    yield _column("Processor", ".status.budgets.processor.display", priority=1)
    yield _column("Encoder", ".status.budgets.encoder.display", priority=1)
    yield _column("Revision", ".status.currentRevision", priority=1)
    yield _column("Model", ".spec.model.uri", priority=1)
    yield _column("URL", ".status.url", priority=1)


def custom_resource_definition() -> Schema:
    """The whole CustomResourceDefinition."""
    schema = {
        "description": "MultiModalInference serves one multimodal model: frontends and engines "
        "with memory budgets derived from this resource.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": schema_of(MultiModalInferenceSpec),
            "status": schema_of(MultiModalInferenceStatus),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
                "message": f"metadata.name must have at most {MAX_NAME_LENGTH} characters: "
                "objects of the resource add to it",
            },
            {
                "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "message": "metadata.name must be a DNS label that starts with a letter: "
                "a Service is named after it",
            },
            {
                "rule": f"!(self.metadata.name in {list(RESERVED_NAMES)})",
                "message": f"metadata.name {RESERVED_MESSAGE}",
            },
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["mmi"],
                "categories": ["inference"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        # Engines, which hold the devices: frontends scale by their own autoscaler.
                        "scale": {
                            "specReplicasPath": ".spec.engine.replicas",
                            "statusReplicasPath": ".status.engine.replicas",
                            "labelSelectorPath": ".status.engine.selector",
                        },
                    },
                    "additionalPrinterColumns": list(printer_columns()),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def render() -> str:
    """The committed file's text."""
    body = yaml.dump(
        msgspec.to_builtins(custom_resource_definition()),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        width=140,
    )
    return f"# Generated from operator/src/foveal_operator/api/spec.py by `make generate`.\n{body}"


class _Dumper(yaml.SafeDumper):
    """Writes a field that holds no others in one flow of lines: indentation was a third of all."""

    def represent_mapping(
        self, tag: str, mapping: Any, flow_style: bool | None = None
    ) -> yaml.MappingNode:
        parts = (part for value in mapping.values() for part in _as_list(value))
        if "type" in mapping and not any(isinstance(part, dict) for part in parts):
            flow_style = True
        return super().represent_mapping(tag, mapping, flow_style)


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
