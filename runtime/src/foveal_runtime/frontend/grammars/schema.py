"""A JSON schema as the grammar library takes it: limits first, then what it would misread.

Used by the compiling worker. Pure. Nothing is enforced less than the schema says, but for formats
that JSON Schema itself calls annotations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 32
MAX_PROPERTIES = 5_000
MAX_OPTIONAL = 500
MAX_ENUM = 10_000
MAX_PATTERN_CHARS = 8_192
MAX_PATTERNS_TOGETHER = 4

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLES = frozenset(
    {
        "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
        "propertyNames", "unevaluatedProperties", "unevaluatedItems",
    }
)  # fmt: skip
_FORMATS = frozenset(
    {"date-time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"^{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])$"


class SchemaError(Exception):
    """`path` is a JSON pointer to the part at fault."""

    def __init__(self, code: str, message: str, path: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.path = code, message, path


def prepare(schema: Any) -> Any:
    """A copy that the library reads as the schema means it. Raises SchemaError."""
    if not isinstance(schema, dict | bool):
        raise SchemaError("schema_invalid", "a schema is an object")
    if schema is False:
        raise SchemaError("schema_invalid", "nothing satisfies the schema false")
    return _Preparation().part({} if schema is True else schema, "", 0)


class _Preparation:
    def __init__(self) -> None:
        self.num_properties = 0

    def part(self, schema: Any, path: str, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_DEPTH:
            raise SchemaError(
                "schema_too_large", f"the schema nests deeper than {MAX_DEPTH} levels", path
            )
        self._check(schema, path)
        out: dict[str, Any] = {}
        for key, value in schema.items():
            where = f"{path}/{_escape(key)}"
            if key == "x-guidance":
                continue  # options of the library, which are not the client's to set
            if key in _MAPS and isinstance(value, dict):
                out[key] = {
                    name: self.part(one, f"{where}/{_escape(name)}", depth + 1)
                    for name, one in value.items()
                }
            elif key in _LISTS | {"items"} and isinstance(value, list):
                out[key] = [
                    self.part(one, f"{where}/{i}", depth + 1) for i, one in enumerate(value)
                ]
            elif key in _SINGLES:
                out[key] = self.part(value, where, depth + 1)
            else:
                out[key] = value
        _replace_format(out)
        return out

    def _check(self, schema: dict[str, Any], path: str) -> None:
        properties = schema.get("properties")
        if isinstance(properties, dict):
            self.num_properties += len(properties)
            _limit(self.num_properties, MAX_PROPERTIES, "properties in all", path)
            required = schema.get("required")
            names = (
                {n for n in required if isinstance(n, str)} if isinstance(required, list) else ()
            )
            optional = len(properties.keys() - set(names))
            _limit(optional, MAX_OPTIONAL, "optional properties in one object", path)
        enum = schema.get("enum")
        if isinstance(enum, list):
            _limit(len(enum), MAX_ENUM, "values of an enum", path)
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            _limit(len(pattern), MAX_PATTERN_CHARS, "characters of a pattern", path)
        together = schema.get("allOf")
        if isinstance(together, list):
            patterns = sum(isinstance(one, dict) and "pattern" in one for one in together)
            _limit(patterns, MAX_PATTERNS_TOGETHER, "patterns in one allOf", path)


def _limit(found: int, limit: int, what: str, path: str) -> None:
    if found > limit:
        raise SchemaError("schema_too_large", f"{found} {what}; at most {limit} are taken", path)


def _replace_format(schema: dict[str, Any]) -> None:
    """`time` is enforced by a pattern; formats that are not known are annotations."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS:
        return
    del schema["format"]
    if name != "time":
        return
    if "pattern" not in schema:
        schema["pattern"] = _TIME
    else:
        together = schema.get("allOf")
        schema["allOf"] = [*(together if isinstance(together, list) else ()), {"pattern": _TIME}]


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer from here, part) of the parts directly below a schema."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield f"/{_escape(key)}/{_escape(name)}", one
        elif key in _LISTS | {"items"} and isinstance(value, list):
            for index, one in enumerate(value):
                yield f"/{_escape(key)}/{index}", one
        elif key in _SINGLES:
            yield f"/{_escape(key)}", value
