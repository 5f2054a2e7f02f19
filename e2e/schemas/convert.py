"""An API server's OpenAPI documents as JSON schemas, one file for each kind.

Called by __main__.py with what /openapi/v3 answers; tested without a server. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_REF = "#/components/schemas/"
_KINDS = "x-kubernetes-group-version-kind"


def files(document: Schema) -> Iterator[tuple[str, Schema]]:
    """(GROUP/kind_version.json, schema) of every kind that `document` describes.

    Named as kubeconform's template '{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json' asks
    for them: what has no group is looked for under v1.
    """
    known: dict[str, Schema] = document.get("components", {}).get("schemas", {})
    for name, schema in known.items():
        for one in schema.get(_KINDS, ()):
            if {"apiVersion", "kind", "metadata"} <= set(schema.get("properties", {})):
                group = one["group"] or one["version"]
                path = f"{group}/{one['kind'].lower()}_{one['version']}.json"
                yield path, _whole(name, known, one)


def _whole(name: str, known: dict[str, Schema], kind: dict[str, str]) -> Schema:
    """One schema with the definitions it reaches."""
    needed = {name}
    waiting = [name]
    while waiting:
        for found in _references(known[waiting.pop()]):
            if found not in needed:
                needed.add(found)
                waiting.append(found)
    definitions = {one: closed(known[one]) for one in sorted(needed)}
    top = definitions[name]
    version = f"{kind['group']}/{kind['version']}".lstrip("/")
    top["properties"]["apiVersion"] = {"const": version}
    top["properties"]["kind"] = {"const": kind["kind"]}
    top["required"] = sorted({*top.get("required", ()), "apiVersion", "kind", "metadata"})
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": f"#/definitions/{name}",
        "definitions": definitions,
    }


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(_REF)
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def closed(schema: Schema) -> Schema:
    """A copy that refuses fields nobody declared, as `fieldValidation=Strict` does."""
    out: Schema = _close(copy.deepcopy(schema))
    return out


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str):
        return {"$ref": "#/definitions/" + schema["$ref"].removeprefix(_REF)}
    for key in ("allOf", "anyOf", "oneOf", "items", "not", "additionalProperties"):
        if key in schema:
            schema[key] = _close(schema[key])
    fields = schema.get("properties")
    if isinstance(fields, dict):
        schema["properties"] = {name: _close(part) for name, part in fields.items()}
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or any(
            schema.get(key) for key in ("additionalProperties", "x-kubernetes-embedded-resource")
        )
        if not is_open:
            schema["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema.pop("format", None)
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if schema.pop("nullable", False) and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    for key in ("description", "default", *(one for one in schema if one.startswith("x-"))):
        schema.pop(key, None)
    return schema
