"""A JSON schema as the grammar library takes it: limits first, then what it would misread.

Used by the compiling worker. Pure. Nothing is enforced less than the schema says, but for formats
that JSON Schema itself calls annotations.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
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
_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that the library enforces well."""
_BARE_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"({_YEAR}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{_HOUR}:[0-5][0-9])"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Formats of RFC 3339 without leap seconds: the library's own know no leap years, for one."""
_COUNTS = frozenset(
    {
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
        "minContains", "maxContains",
    }
)  # fmt: skip
_SAYS_NOTHING: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "uniqueItems": lambda schema: schema["uniqueItems"] is False,
    "unevaluatedItems": lambda schema: schema["unevaluatedItems"] is True,
    "unevaluatedProperties": lambda schema: schema["unevaluatedProperties"] is True,
    "propertyNames": lambda schema: schema["propertyNames"] is True,
    "contains": lambda schema: (
        schema["contains"] is True
        and schema.get("minContains") == 0
        and "maxContains" not in schema
    ),
    "minContains": lambda schema: "contains" not in schema,
    "maxContains": lambda schema: "contains" not in schema,
    "if": lambda schema: not schema.keys() & {"then", "else"},
    "then": lambda schema: "if" not in schema,
    "else": lambda schema: "if" not in schema,
    "not": lambda schema: schema["not"] is False,
    "dependentRequired": lambda schema: (
        isinstance(schema["dependentRequired"], dict)
        and not any(schema["dependentRequired"].values())
    ),
    "dependentSchemas": lambda schema: (
        isinstance(schema["dependentSchemas"], dict)
        and all(one is True for one in schema["dependentSchemas"].values())
    ),
}
"""Keywords that the library does not know, and when they allow everything. In this order: those
behind one that is gone say nothing either."""
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_IN_PLACE = frozenset(
    {
        "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains",
        "dependentSchemas",
    }
)  # fmt: skip
"""Keywords that evaluate members beside `properties` and `items`."""


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
            where = f"{path}/{escape(key)}"
            if key == "x-guidance":
                continue  # options of the library, which are not the client's to set
            if key in _MAPS and isinstance(value, dict):
                out[key] = {
                    name: self.part(one, f"{where}/{escape(name)}", depth + 1)
                    for name, one in value.items()
                }
            elif key in _LISTS | {"items"} and isinstance(value, list):
                out[key] = [
                    self.part(one, f"{where}/{i}", depth + 1) for i, one in enumerate(value)
                ]
            elif key in _SINGLES:
                out[key] = self.part(value, where, depth + 1)
            elif key in _COUNTS and isinstance(value, float) and value.is_integer():
                out[key] = int(value)
            else:
                out[key] = value
        for key in [key for key in _SAYS_NOTHING if key in out]:
            if _SAYS_NOTHING[key](out):
                del out[key]
        if not schema.keys() & _IN_PLACE:  # then they mean what the other keyword means
            for key in _UNEVALUATED.keys() & out.keys():
                rest = _UNEVALUATED[key]
                if isinstance(out.get(rest), list):  # draft 7's `items` of places
                    rest = "additionalItems"
                out.setdefault(rest, out.pop(key))
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
    """Dates and times are enforced by patterns; formats that are not known are annotations."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS:
        return
    del schema["format"]
    pattern = _PATTERNS.get(name)
    if pattern is None:
        return
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        together = schema.get("allOf")
        schema["allOf"] = [*(together if isinstance(together, list) else ()), {"pattern": pattern}]


def without_counts(schema: Any) -> tuple[Any, list[str]]:
    """A copy of a prepared schema without numbers of properties that the library cannot count:
    beside optional ones it asks for so many others. And where they stood."""
    loose = copy.deepcopy(schema)
    found, left = [], [("", loose)]
    while left:
        path, part = left.pop()
        if not isinstance(part, dict):
            continue
        left += [(path + step, child) for step, child in children(part)]
        named, required = part.get("properties"), part.get("required")
        wanted = required if isinstance(required, list) else []
        is_open = part.get("additionalProperties") is not False
        if is_open and isinstance(named, dict) and any(name not in wanted for name in named):
            counts = [word for word in ("minProperties", "maxProperties") if word in part]
            found += [f"{path}/{word}" for word in counts if part.pop(word) is not None]
    return loose, found


def words_of(schema: Mapping[str, Any]) -> list[str]:
    """The keywords of a prepared schema, as the client wrote them."""
    ours = list(_PATTERNS.values())
    words = ["format" if w == "pattern" and schema[w] in ours else w for w in schema]
    together = schema.get("allOf")
    if isinstance(together, list) and together and together[-1] in [{"pattern": o} for o in ours]:
        at = words.index("allOf")
        words[at : at + 1] = ["allOf", "format"] if len(together) > 1 else ["format"]
    return words


def check_names(value: Any, place: str) -> None:
    """Raises SchemaError for a name in the value that formats without quotes cannot write."""
    if isinstance(value, list):
        for one in value:
            check_names(one, place)
    elif isinstance(value, dict):
        for name, one in value.items():
            if not _BARE_NAME.fullmatch(name):
                raise SchemaError(
                    "schema_unsupported", f"this model cannot write the name {name!r}", place
                )
            check_names(one, place)


def escape(name: str) -> str:
    """A name in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer from here, part) of the parts directly below a schema."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield f"/{escape(key)}/{escape(name)}", one
        elif key in _LISTS | {"items"} and isinstance(value, list):
            for index, one in enumerate(value):
                yield f"/{escape(key)}/{index}", one
        elif key in _SINGLES:
            yield f"/{escape(key)}", value
