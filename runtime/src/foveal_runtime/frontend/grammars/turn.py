"""The grammar of a whole turn: reasoning, then text, tool calls or an answer that is bound itself.

Used by the compiling worker. Made from the rows of `formats`, which the parser reads too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
)
from foveal_runtime.frontend.grammars.schema import SchemaError

_ANY = r"(.|\n)*"
_BLANKS = r" \t\r\n"  # formats.BLANKS as a pattern
_KEY = re.compile(r"[\w.-]{1,64}", re.ASCII)
_LOCAL_REF = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')
_NOT_IN_TEXT = ("pattern", "format")


def turn_to_lark(turn: Mapping[str, Any], marks: Mapping[str, int]) -> tuple[str, list[str]]:
    """(Lark text, what could not be enforced).

    Args:
        turn: made by `protocol.tools.turn_of`; its schemas are prepared. A bound answer is the
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
            arguments = self._arguments(row, properties_of(schema), tool)
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
        for key, _, _ in properties_of(schema):
            if not _KEY.fullmatch(key):
                raise SchemaError(
                    "schema_unsupported", f"this model cannot write the name {key!r}", "/properties"
                )

    def _arguments(
        self, row: Format, properties: Sequence[tuple[str, Any, bool]], tool: Mapping[str, Any]
    ) -> str:
        before, between, after = row.param_parts
        items = []
        for key, schema, required in properties:
            head = self._literal(before + key + between)
            if row.arguments == "params" and is_raw(schema):
                value = self._raw(schema, after, key, tool)
            else:
                kind = {"python": self._python, "gemma": self._gemma}.get(row.arguments, self._json)
                value = f"({kind(schema, tool)}) {self._literal(after)}"
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

    def _raw(self, schema: Mapping[str, Any], after: str, key: str, tool: Mapping[str, Any]) -> str:
        """Text as it is, up to and with `after`, which it cannot hold."""
        options = [one for one in _options(schema) if _type(one) != "null"]
        if len(options) == 1 and (values := _values(options[0])) is not None:
            texts = [self._literal(v) for v in values if isinstance(v, str) and after not in v]
            return f"({' | '.join(texts)}) {self._literal(after)}"
        bounds = "*"
        if len(options) == 1:
            one = options[0]
            self._relax(one, key, tool)
            bounds = f"{{{one.get('minLength', 0)},{one.get('maxLength', '')}}}"
            bounds = "*" if bounds == "{0,}" else bounds
        parts = split_marks(after, self._marks)
        marked = next((i for i, part in enumerate(parts) if part in self._marks), None)
        if marked is None:
            return self._rule(rf"/(.|\n){bounds}{_escaped(after)}/", "[lazy]")
        text = self._rule(rf"/(.|\n){bounds}{_escaped(''.join(parts[:marked]))}/")
        return f"{text} {self._literal(''.join(parts[marked:]))}"

    def _relax(self, schema: Mapping[str, Any], key: str, tool: Mapping[str, Any]) -> None:
        for word in _NOT_IN_TEXT:
            if word in schema:
                where = f"/properties/{key}"
                if tool["strict"]:
                    raise SchemaError(
                        "schema_unsupported", f"{word} of a text that this model writes as it is",
                        where,
                    )  # fmt: skip
                self.relaxed.append(f"{tool['name']}{where}/{word}")

    def _python(self, schema: Any, tool: Mapping[str, Any]) -> str:
        options = _options(schema)
        if len(options) > 1:
            return " | ".join(self._python(one, tool) for one in options)
        values = _values(options[0])
        if values is None and _type(options[0]) in ("boolean", "null"):
            values = [None] if _type(options[0]) == "null" else [True, False]
        if values is None:
            return self._json(options[0], tool)
        plain = [
            PYTHON_NAMES[v] if v is None or isinstance(v, bool) else json.dumps(v) for v in values
        ]
        return " | ".join(map(_quoted, plain))

    def _gemma(self, schema: Any, tool: Mapping[str, Any]) -> str:
        options = _options(schema)
        if len(options) > 1:
            return " | ".join(self._gemma(one, tool) for one in options)
        one = options[0]
        shared = {key: one[key] for key in ("$defs", "definitions") if key in one}
        if (values := _values(one)) is not None:
            return " | ".join(self._literal(render_gemma(v)) for v in values)
        if "$ref" in one:
            return self._gemma_ref(one["$ref"], shared, tool)
        if _type(one) == "string":
            return f"{self._literal(GEMMA_QUOTE)} {self._raw(one, GEMMA_QUOTE, '', tool)}"
        if _type(one) == "object" and "properties" in one:
            row = FORMATS["gemma"]
            return f'"{{" {self._arguments(row, properties_of(one), tool)} "}}"'
        if _type(one) == "array" and isinstance(one.get("items"), dict):
            item = self._rule(self._gemma({**shared, **one["items"]}, tool))
            least, most = one.get("minItems", 0), one.get("maxItems", "")
            more = f'("," {item}){{{max(0, least - 1)},{most - 1 if most else ""}}}'
            return f'"[" ({item} {more}){"" if least else "?"} "]"'
        return self._json(one, tool)

    def _gemma_ref(self, ref: str, shared: Mapping[str, Any], tool: Mapping[str, Any]) -> str:
        known = f"{tool['name']} {ref}"
        if known not in self._refs:
            _, where, name = ref.split("/", 2)
            target = shared.get(where, {}).get(name, {})
            self._refs[known] = name = self._rule("")
            at = len(self._rules) - 1
            self._rules[at] = f"{name}: {self._gemma({**shared, **target}, tool)}"
        return self._refs[known]


def _options(schema: Any) -> list[Any]:
    """The alternatives of a schema, one for each type."""
    if not isinstance(schema, dict):
        return [{}]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return [
                option
                for one in schema[word]
                for option in _options({**shared, **one} if isinstance(one, dict) else one)
            ]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": one} for one in schema["type"]]
    return [schema]


def _type(schema: Mapping[str, Any]) -> Any:
    return schema.get("type")


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Text in a Lark pattern."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/").replace('"', r"\"")
