"""docs/reference/api.md from the resource definition: every field, its type, bounds and meaning.

Used by regenerate.py and by the test that compares. Nothing here is written by hand but the head.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from foveal_operator.api import crd
from foveal_operator.kube.types import Obj

_HEAD = """# The resource MultiModalInference

Generated from the resource's definition (`crds/`); do not edit. `kubectl explain mmi.spec` tells
the same. A field that is not listed is refused with server-side apply, and by kubectl (whose
default is `--validate=strict`); for other clients the API server drops it with a warning.

"""


def text() -> str:
    definition = yaml.safe_load(crd.render())
    names, [version] = definition["spec"]["names"], definition["spec"]["versions"]
    root = version["schema"]["openAPIV3Schema"]["properties"]
    parts = [
        _HEAD,
        f"API `{definition['spec']['group']}/{version['name']}`, kind `{names['kind']}`, "
        f"{definition['spec']['scope'].lower()}, short name `{names['shortNames'][0]}`.\n",
        _examples(),
    ]
    spec = root["spec"]
    required = set(spec.get("required", ()))
    for name, schema in spec["properties"].items():
        parts.append(_section(f"spec.{name}", schema, name in required))
    parts += ["\n## Rules\n\nBeyond types and bounds, the API server refuses:\n\n"]
    parts += [f"- {message}\n" for message in dict.fromkeys(_rules(root["spec"]))]
    parts += ["\n## status\n\nOutput only. Reasons of conditions: [reasons.md](reasons.md).\n\n"]
    parts.append(_table(list(_rows("", root["status"], set()))))
    parts += ["\n## Columns\n\nOf `kubectl get mmi`; those marked wide need `-o wide`.\n\n"]
    parts.append("| column | from |\n|---|---|\n")
    for column in version["additionalPrinterColumns"]:
        wide = " (wide)" if column.get("priority") else ""
        parts.append(f"| {column['name']}{wide} | {_code(column['jsonPath'])} |\n")
    return "".join(parts)


def _examples() -> str:
    return (
        "\nExamples: [minimal](../../examples/mmi-minimal.yaml), "
        "[one GPU](../../examples/mmi-gpu.yaml),\n"
        "[a laptop's CPU](../../examples/mmi-cpu-laptop.yaml).\n"
    )


def _section(path: str, schema: Obj, is_required: bool) -> str:
    head = f"\n## {path}\n\n"
    if "properties" not in schema:
        return head + _table([(path.rpartition(".")[2], _type(schema), _about(schema))])
    note = " Required." if is_required else ""
    rows = list(_rows("", schema, set(schema.get("required", ()))))
    return f"{head}{schema.get('description', '')}{note}\n\n{_table(rows)}"


def _rows(prefix: str, schema: Obj, required: set[str]) -> Iterator[tuple[str, str, str]]:
    """Every field below a schema; an object whose fields follow has no row but its meaning's."""
    for name, child in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        must = " **Required.**" if name in required else ""
        yield path, _type(child), _about(child) + must
        inner = child.get("items", child)
        if not isinstance(inner.get("additionalProperties"), dict):
            dots = "[]." if child.get("type") == "array" else "."
            yield from _rows(f"{path}{dots}", inner, set(inner.get("required", ())))
        else:
            named = inner["additionalProperties"]
            yield from _rows(f"{path}.*.", named, set(named.get("required", ())))


def _type(schema: Obj) -> str:
    if "enum" in schema:
        return " \\| ".join(_code(str(one)) for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "integer" and schema.get("maximum", 0) >= 2**31 - 1:
        return f"from {schema.get('minimum', 0):,}"
    if kind == "integer" and "minimum" in schema and "maximum" in schema:
        return f"{schema['minimum']:,} to {schema['maximum']:,}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'])}"
    return str(kind)


def _about(schema: Obj) -> str:
    return " ".join(str(schema.get("description", "")).split()).replace("|", "\\|")


def _rules(schema: Obj) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if "message" in rule:
            yield str(rule["message"])
    for child in schema.get("properties", {}).values():
        yield from _rules(child)
        yield from _rules(child.get("items", {}))


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | {kind} | {about} |\n" for name, kind, about in rows]
    return "| field | value | meaning |\n|---|---|---|\n" + "".join(lines)


def _code(value: str) -> str:
    return f"`{value}`"
