"""The grammar of a whole turn: reasoning, then text, tool calls or an answer that is bound itself.

Used by the compiling worker. Made from the rows of `formats`, which the parser reads too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foveal_runtime.frontend.grammars.formats import (
    FORMATS,
    GEMMA_QUOTE,
    INDEX,
    PYTHON_NAMES,
    Format,
    is_raw,
    properties_of,
    render_gemma,
    split_marks,
    takes_null,
)
from foveal_runtime.frontend.grammars.schema import SchemaError, check_names, escape, words_of

_ANY = r"(.|\n)*"
_BLANKS = r" \t\r\n"  # formats.BLANKS as a pattern
_LOCAL_REF = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')
_DEFINED = frozenset({"$defs", "definitions"})
_VALUES = frozenset({"type", "enum", "const"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "multipleOf", "exclusiveMinimum",
                         "exclusiveMaximum")),
    "array": _ARRAY - {"type"} | {"prefixItems", "additionalItems", "unevaluatedItems", "contains",
                                  "minContains", "maxContains", "uniqueItems"},
    "object": _OBJECT - {"type"} | {
        "patternProperties", "propertyNames", "minProperties", "maxProperties",
        "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    },
}  # fmt: skip
"""Keywords that say nothing of values of other types."""
_KEYWORDS = _VALUES.union(*_OF_TYPE.values()) | {
    "not", "if", "then", "else", "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
"""Every other word is an annotation."""
_IS_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def turn_to_lark(turn: Mapping[str, Any], marks: Mapping[str, int]) -> tuple[str, list[str]]:
    """(Lark text, what could not be enforced).

    Args:
        turn: made by `http.chat.plan_turn`; its schemas are prepared. A bound answer is the
            subgrammar @answer.
        marks: token id of each marker that is a token of its own; the others are text.

    Raises SchemaError.
    """
    writer = _Writer(turn, marks)
    return writer.write(), writer.relaxed


class _Writer:
    def __init__(self, turn: Mapping[str, Any], marks: Mapping[str, int]) -> None:
        self._turn = turn
        self._marks = marks
        self._think: Mapping[str, Any] | None = turn["think"]
        self._rules: list[str] = []
        self._refs: dict[str, str] = {}
        self.relaxed: list[str] = []

    def write(self) -> str:
        turn = self._turn
        row = FORMATS[turn["format"]] if turn["tools"] else None
        if row is None:
            body = "@answer" if turn["is_bound"] else self._free()
        elif turn["choice"] == "auto" and not turn["is_bound"]:
            body = self._text_then_calls(row)
        else:
            body = self._calls(row, row.begin + row.before)
            if turn["choice"] == "auto":
                body += " | @answer"
        return "\n".join([f"start: {self._thought(row, body)}", *self._rules])

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, pattern: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {pattern}")
        return name

    def _literal(self, text: str) -> str:
        return " ".join(
            f"<[{self._marks[part]}]>" if part in self._marks else _quoted(part)
            for part in split_marks(text, self._marks)
        )

    # ---- reasoning and text ---------------------------------------------------------------------
    def _thought(self, row: Format | None, body: str) -> str:
        think = self._think
        if think is None:
            return body
        end, ids = think["end"], [self._marks[m] for m in self._outside(row) if m in self._marks]
        if end not in self._marks:
            inside = self._rule(f"/{_ANY}{_escaped(end)}/", "[lazy]")
        elif think["budget"] is not None:
            inside = self._rule(f"/{_ANY}/", f"[max_tokens={think['budget']}]")
            inside += " " + self._literal(end)
        else:
            inside = f"<[^{','.join(map(str, ids))}]>* {self._literal(end)}"
        begin = "" if think["is_open"] else self._literal(think["start"])
        is_free = not self._turn["is_bound"] and (row is None or self._turn["choice"] == "auto")
        gap = "" if is_free else r" /\n{0,2}/"  # text takes the blanks behind reasoning itself
        return self._rule(f"{begin} {inside}{gap}") + ("" if begin == "" else "?") + f" ({body})"

    def _outside(self, row: Format | None) -> list[str]:
        """Markers that neither text nor reasoning may hold."""
        found = [] if self._think is None else [self._think["start"].strip(), self._think["end"]]
        return [*found, row.marker] if row is not None and row.marker else found

    def _text(self, *never: str) -> str:
        """A terminal of text that begins with none of the patterns."""
        if self._think is not None and not self._think["is_open"]:
            never = (*never, _escaped(self._think["start"]))
        # The parser leaves blanks out before it looks: text may not hide a beginning behind them.
        return " & ".join([f"/{_ANY}/", *(f"~/[{_BLANKS}]*({one}){_ANY}/" for one in never)])

    def _free(self, row: Format | None = None) -> str:
        ids = [self._marks[m] for m in self._outside(row) if m in self._marks]
        if ids:
            return self._rule(f"<[^{','.join(map(str, ids))}]>*")
        return self._terminal(self._text())

    def _text_then_calls(self, row: Format) -> str:
        opening = row.begin + row.before
        if row.marker in self._marks:
            rest = opening.removeprefix(row.marker)
            calls = self._calls(row, rest)
            return f"{self._free(row)} ({self._literal(row.marker)} ({calls}))?"
        if row.marker:
            calls = self._calls(row, opening.removeprefix(row.marker))
            pattern = f"{self._text()} & /{_ANY}{_escaped(row.marker)}/"
            reach = self._rule(self._terminal(pattern), "[lazy]")
            return f"{self._terminal(self._text())} | {reach} ({calls})"
        starts = "|".join(_escaped(row.begin + row.opening(t["name"])) for t in self._turn["tools"])
        calls = self._calls(row, opening, blanks=f"[{_BLANKS}]*")
        return f"{self._terminal(self._text(starts))} | {calls}"

    # ---- calls ----------------------------------------------------------------------------------
    def _calls(self, row: Format, opening: str, blanks: str = "") -> str:
        """All calls; `opening`: what stands before the first one's name, `blanks` (a pattern, for
        rows without marks) before that."""
        rests = [self._rule(self._behind(row, tool)) for tool in self._turn["tools"]]

        def one(opening: str, blanks: str = "") -> str:
            # One terminal up to the name: text that may not begin like that ends where it does.
            names = [row.opening(tool["name"]) for tool in self._turn["tools"]]
            texts = [opening + name.removeprefix(row.before) for name in names]
            heads = [f"/{blanks}{_escaped(t)}/" if blanks else self._literal(t) for t in texts]
            return self._rule(" | ".join(map(" ".join, zip(heads, rests, strict=True))))

        more = f" {one(row.separator + row.before)}*" if self._turn["parallel"] else ""
        return f"{one(opening, blanks)}{more} {self._literal(row.end)}".strip()

    def _behind(self, row: Format, tool: Mapping[str, Any]) -> str:
        """A call from its index or its arguments on."""
        _, has_index, right = row.middle.partition(INDEX)
        index = f"/{row.index}/ {self._literal(right)} " if has_index else ""
        schema = tool["parameters"]
        if row.arguments == "json":
            arguments = self._json(schema, tool)
        else:
            self._check_listed(schema)
            arguments = self._arguments(row, schema, "", tool)
        return f"{index}{arguments} {self._literal(row.after)}"

    def _json(self, schema: Any, tool: Mapping[str, Any]) -> str:
        found = schema if isinstance(schema, dict) else {}
        return "%json " + json.dumps({**found, "x-guidance": tool["options"]})

    def _check_listed(self, schema: Any) -> None:
        is_listed = isinstance(schema, dict) and (
            "properties" in schema or not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
        )
        if not is_listed or _LOCAL_REF.search(json.dumps(schema)):
            raise SchemaError(
                "schema_unsupported",
                "this model writes arguments one by one: parameters must be an object with "
                "properties, and references must point into $defs",
            )

    def _arguments(
        self, row: Format, schema: Mapping[str, Any], place: str, tool: Mapping[str, Any]
    ) -> str:
        """Those of an object. They are all that is written, whatever else it may have."""
        self._relax(schema, _OBJECT, place, tool, of="object")
        known, wanted = schema.get("properties"), schema.get("required")
        for name in wanted if isinstance(wanted, list) else ():
            if not isinstance(known, dict) or name not in known:
                self._leave_out("required", f"names {name!r}, which is no property", place, tool)
        before, between, after = row.param_parts
        items = []
        for key, one, required in properties_of(schema):
            where = f"{place}/properties/{escape(key)}"
            if one is False:
                if required:
                    raise SchemaError("schema_invalid", "nothing satisfies the schema false", where)
                continue
            check_names({key: None}, f"{place}/properties")
            head = self._literal(before + key + between)
            if row.arguments == "params" and is_raw(one):
                value = self._raw(one, after, where, tool)
            elif row.arguments == "params":
                value = f"({self._json(one, tool)}) {self._literal(after)}"
            else:
                kind = self._python if row.arguments == "python" else self._gemma
                value = f"({kind(one, where, tool)}) {self._literal(after)}"
            items.append((f"{head} {value}", required))
        return self._sequence(items, self._literal(row.param_separator))

    def _sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """The items in order, those that are not required or not, separated."""
        first, later = '""', '""'
        for item, required in reversed(items):
            rule = self._rule(item)
            one, next_one = f"{rule} {later}", f"{separator} {rule} {later}"
            if not required:
                one, next_one = f"{one} | {first}", f"{next_one} | {later}"
            first, later = self._rule(one), self._rule(next_one)
        return first

    def _raw(
        self, schema: Mapping[str, Any], after: str, place: str, tool: Mapping[str, Any]
    ) -> str:
        """Text as it is, up to and with `after`, which it cannot hold."""
        found = self._alternatives(schema, place, tool)
        options = [one for one in found if _type(one) != "null"]
        values = [_values(one) for one in options]
        if all(some is not None for some in values):
            for one in options:
                self._relax(one, _VALUES, place, tool, of="string")
            texts = [v for some in values for v in some or () if isinstance(v, str)]
            texts += ["null"] if takes_null(schema) else []
            written = [self._literal(v) for v in texts if after not in v]
            if not written:
                raise SchemaError("schema_unsupported", "no value of it can be written", place)
            return f"({' | '.join(written)}) {self._literal(after)}"
        bounds = "*"
        enforced = frozenset({"type"} if len(options) > 1 else {"type", "minLength", "maxLength"})
        for one in options:
            self._relax(one, enforced, place, tool, of="string")
        if len(options) == 1:
            one = options[0]
            bounds = f"{{{one.get('minLength', 0)},{one.get('maxLength', '')}}}"
            bounds = "*" if bounds == "{0,}" else bounds
        text = rf"({'null|' if takes_null(schema) else ''}(.|\n){bounds})"
        parts = split_marks(after, self._marks)
        marked = next((i for i, part in enumerate(parts) if part in self._marks), None)
        if marked is None:
            return self._rule(f"/{text}{_escaped(after)}/", "[lazy]")
        rule = self._rule(f"/{text}{_escaped(''.join(parts[:marked]))}/")
        return f"{rule} {self._literal(''.join(parts[marked:]))}"

    def _alternatives(self, schema: Any, place: str, tool: Mapping[str, Any]) -> list[Any]:
        """The alternatives of a schema, one for each type. What stands beside them is lost."""
        if not isinstance(schema, dict):
            return [{}]
        shared = {key: schema[key] for key in _DEFINED if key in schema}
        for word in ("anyOf", "oneOf"):
            if not isinstance(schema.get(word), list):
                continue
            self._relax(schema, frozenset({word}), place, tool)
            found = [
                option
                for number, one in enumerate(schema[word])
                if one is not False
                for option in self._alternatives(
                    {**shared, **one} if isinstance(one, dict) else one,
                    f"{place}/{word}/{number}", tool,
                )
            ]  # fmt: skip
            if word == "oneOf" and not _exclude_each_other(found):
                self._leave_out(word, "of alternatives that a value may satisfy both", place, tool)
            return found
        kinds = schema.get("type")
        found = (
            [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]
        )
        return [one for one in found if _values(one) != []]

    def _relax(
        self, schema: Mapping[str, Any], enforced: frozenset[str], place: str,
        tool: Mapping[str, Any], of: str = "",
    ) -> None:  # fmt: skip
        """`of`: the type of the values, of which keywords for other types say nothing."""
        others = [words for kind, words in _OF_TYPE.items() if of and kind != of]
        enforced = enforced.union(*others)
        for word in words_of(schema):
            if word in _KEYWORDS and word not in enforced:
                self._leave_out(
                    word, "where this model writes the value in its own way", place, tool
                )

    def _leave_out(self, word: str, why: str, place: str, tool: Mapping[str, Any]) -> None:
        """A keyword that the grammar does not enforce."""
        if tool["strict"]:
            raise SchemaError("schema_unsupported", f"{word} {why}", place)
        entry = f"{tool['name']}{place}/{word}"
        if entry not in self.relaxed:
            self.relaxed.append(entry)

    def _python(self, schema: Any, place: str, tool: Mapping[str, Any]) -> str:
        options = _flat(schema)
        if not any(map(_has_python_name, options)):  # written as JSON, and bound whole
            return self._json(schema, tool)
        texts = []
        for one in self._alternatives(schema, place, tool):
            values, kind = _values(one), _type(one)
            if values is None and kind in ("boolean", "null"):
                values = [None] if kind == "null" else [True, False]
            elif values is None:
                texts.append(self._json(one, tool))
                continue
            self._relax(one, _VALUES, place, tool, of=kind if isinstance(kind, str) else "")
            texts += [
                _quoted(
                    PYTHON_NAMES[v] if v is None or isinstance(v, bool)
                    else json.dumps(v, ensure_ascii=False)
                )
                for v in values
            ]  # fmt: skip
        return self._either(texts, place)

    def _either(self, texts: Sequence[str], place: str) -> str:
        if not texts:
            raise SchemaError("schema_invalid", "no value satisfies it", place)
        return " | ".join(texts)

    def _gemma(self, schema: Any, place: str, tool: Mapping[str, Any]) -> str:
        found = self._alternatives(schema, place, tool)
        return self._either([self._gemma_one(one, place, tool) for one in found], place)

    def _gemma_one(self, one: Mapping[str, Any], place: str, tool: Mapping[str, Any]) -> str:
        shared = {key: one[key] for key in _DEFINED if key in one}
        kind = _type(one)
        if (values := _values(one)) is not None:
            check_names(values, place)
            self._relax(one, _VALUES, place, tool, of=kind if isinstance(kind, str) else "")
            return " | ".join(self._literal(render_gemma(v)) for v in values)
        if "$ref" in one:
            self._relax(one, frozenset({"$ref"}), place, tool)
            return self._gemma_ref(one["$ref"], shared, tool)
        if kind == "string":
            return f"{self._literal(GEMMA_QUOTE)} {self._raw(one, GEMMA_QUOTE, place, tool)}"
        if kind == "object" and "properties" in one:
            return f'"{{" {self._arguments(FORMATS["gemma"], one, place, tool)} "}}"'
        if kind == "array" and isinstance(one.get("items"), dict):
            self._relax(one, _ARRAY, place, tool, of="array")
            least, most = one.get("minItems", 0), one.get("maxItems")
            if most == 0:
                return '"[]"'
            item = self._rule(self._gemma({**shared, **one["items"]}, f"{place}/items", tool))
            more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
            return f'"[" ({item} {more}){"" if least else "?"} "]"'
        return self._json(one, tool)

    def _gemma_ref(self, ref: str, shared: Mapping[str, Any], tool: Mapping[str, Any]) -> str:
        known = f"{tool['name']} {ref}"
        if known not in self._refs:
            _, where, name = ref.split("/", 2)
            target = shared.get(where, {}).get(name, {})
            self._refs[known] = name = self._rule("")
            at = len(self._rules) - 1
            place = ref.removeprefix("#")
            self._rules[at] = f"{name}: {self._gemma({**shared, **target}, place, tool)}"
        return self._refs[known]


def _flat(schema: Any) -> list[Any]:
    """Every alternative of a schema, without what stands beside them."""
    if not isinstance(schema, dict):
        return [{}]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return [option for one in schema[word] for option in _flat(one)]
    kinds = schema.get("type")
    return [{**schema, "type": one} for one in kinds] if isinstance(kinds, list) else [schema]


def _has_python_name(option: Mapping[str, Any]) -> bool:
    """Whether it allows True, False or None alone, which JSON spells in another way."""
    values = _values(option)
    if values is not None:
        return any(one is None or isinstance(one, bool) for one in values)
    return _type(option) in ("boolean", "null")


def _exclude_each_other(options: Sequence[Any]) -> bool:
    """No value satisfies two of them."""
    values = [_values(one) for one in options]
    if all(some is not None for some in values):
        told = [one for some in values for one in {json.dumps(one) for one in some or ()}]
        return len(set(told)) == len(told)
    kinds = ["number" if _type(one) == "integer" else _type(one) for one in options]
    return all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds)


def _type(schema: Mapping[str, Any]) -> Any:
    return schema.get("type")


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Those that an enum or a const leaves of the type; None where it has neither."""
    if not schema.keys() & {"enum", "const"}:
        return None
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        return None
    if "const" in schema:
        values = [one for one in values if json.dumps(one) == json.dumps(schema["const"])]
    is_of = _IS_TYPE.get(str(_type(schema)))
    return [one for one in values if is_of is None or is_of(one)]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Text in a Lark pattern."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/").replace('"', r"\"")
