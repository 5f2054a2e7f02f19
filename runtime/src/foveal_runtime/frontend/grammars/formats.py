"""Formats in which models write tool calls and reasoning: the one table.

The grammar (`turn`), the parser (`reader`) and the renderer below are made from the same rows, so
an output that the grammar allows is one that the parser reads. Pure; knows no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

NAME, ARGUMENTS, INDEX, KEY, VALUE = "«name»", "«arguments»", "«index»", "«key»", "«value»"
_JSON_CALL = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_MARKER = re.compile(r"<[^>]+>|\[[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Format:
    """How a family writes calls.

    Attributes:
        call: one call. begin, separator, end: around all of them and between two.
        arguments: how ARGUMENTS is written: as a JSON object; as one `param` for each argument
            (texts stand there as they are, all else as JSON); as Python's keyword arguments; or in
            Gemma's notation (keys bare, texts between marks of their own).
        param: one argument; `param_separator` stands between two.
        ids: ids of calls as the family's templates take them.
        index: pattern of what stands for INDEX.
    """

    name: str
    families: str
    call: str = _JSON_CALL
    begin: str = ""
    separator: str = ""
    end: str = ""
    arguments: Literal["json", "params", "python", "gemma"] = "json"
    param: str = ""
    param_separator: str = ""
    ids: Literal["call", "short", "indexed"] = "call"
    index: str = "[0-9]{1,2}"

    @property
    def before(self) -> str:
        """Of a call, what stands before its name."""
        return self.call.partition(NAME)[0]

    @property
    def middle(self) -> str:
        return self.call.partition(NAME)[2].partition(ARGUMENTS)[0]

    @property
    def after(self) -> str:
        return self.call.partition(ARGUMENTS)[2]

    @property
    def marker(self) -> str:
        """What begins calls wherever it stands; "": they can only be the whole answer."""
        found = _MARKER.match(self.begin + self.before)
        return found[0] if found else ""

    @property
    def param_parts(self) -> tuple[str, str, str]:
        """What stands before an argument's key, between key and value, and behind."""
        before, _, rest = self.param.partition(KEY)
        between, _, after = rest.partition(VALUE)
        return before, between, after

    @property
    def literals(self) -> str:
        """All fixed text, in which markers are looked for."""
        quote = GEMMA_QUOTE if self.arguments == "gemma" else ""
        return " ".join((self.begin, self.call, self.separator, self.end, self.param, quote))

    def opening(self, name: str) -> str:
        """From the start of a call to where its index or its arguments stand."""
        return self.before + name + self.middle.partition(INDEX)[0]


GEMMA_QUOTE = '<|"|>'

FORMATS: Mapping[str, Format] = {
    row.name: row
    for row in (
        Format(
            "hermes", "Qwen2.5-VL, Qwen3-VL, InternVL, MiniCPM-V",
            call=f"<tool_call>\n{_JSON_CALL}\n</tool_call>", separator="\n",
        ),
        Format(
            "qwen3_coder", "Qwen3-Coder, Qwen3.5",
            call=f"<tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
            separator="\n", arguments="params",
            param=f"<parameter={KEY}>\n{VALUE}\n</parameter>\n",
        ),
        Format(
            "llama3_json", "Llama 3.1 and 3.2",
            call=f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', separator="; ",
        ),
        Format(
            "mistral", "Mistral since tokenizer v13",
            call=f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", ids="short",
        ),
        Format(
            "mistral_v11", "Mistral Small 3.2",
            call=f"[TOOL_CALLS]{NAME}[CALL_ID]{INDEX}[ARGS]{ARGUMENTS}", ids="short",
            index="[A-Za-z0-9]{9}",
        ),
        Format(
            "mistral_v3", "Mistral and Pixtral before them",
            begin="[TOOL_CALLS][", separator=", ", end="]", ids="short",
        ),
        Format(
            "pythonic", "Llama 4, OLMo 3",
            begin="[", call=f"{NAME}({ARGUMENTS})", separator=", ", end="]", arguments="python",
            param=f"{KEY}={VALUE}", param_separator=", ",
        ),
        Format(
            "lfm2", "LFM2, LFM2-VL, LFM2.5",
            begin="<|tool_call_start|>[", call=f"{NAME}({ARGUMENTS})", separator=", ",
            end="]<|tool_call_end|>", arguments="python", param=f"{KEY}={VALUE}",
            param_separator=", ",
        ),
        Format(
            "gemma", "Gemma 4",
            call=f"<|tool_call>call:{NAME}{{{ARGUMENTS}}}<tool_call|>", arguments="gemma",
            param=f"{KEY}:{VALUE}", param_separator=",",
        ),
        Format(
            "deepseek", "DeepSeek V3.1",
            begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
            call=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        ),
        Format(
            "deepseek_v3", "DeepSeek V3 and R1",
            begin="<｜tool▁calls▁begin｜>", separator="\n", end="<｜tool▁calls▁end｜>",
            call=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
            "<｜tool▁call▁end｜>",
        ),
        Format(
            "glm", "GLM-4.5V, GLM-4.6V",
            call=f"<tool_call>{NAME}\n{ARGUMENTS}</tool_call>", separator="\n",
            arguments="params",
            param=f"<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n",
        ),
        Format(
            "kimi", "Kimi-VL, Kimi K2",
            begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
            call=f"<|tool_call_begin|>functions.{NAME}:{INDEX}<|tool_call_argument_begin|>"
            f"{ARGUMENTS}<|tool_call_end|>",
            ids="indexed",
        ),
        Format("smolvlm", "SmolVLM, SmolLM2",
               begin="<tool_call>[", separator=", ", end="]</tool_call>"),
        Format("granite", "Granite 3 and 4", begin="<|tool_call|>[", separator=", ", end="]"),
        Format("json", "models whose chat template has no tools", separator="\n"),
    )
}  # fmt: skip

UNTOLD = (
    ("<|tool_call_start|>", "lfm2"), ("<|tool_call|>", "granite"), ("<tool_call>", "hermes"),
    ("<end_of_utterance>", "smolvlm"),
)  # fmt: skip
"""(token, format) of models whose chat template writes no calls."""

THINKING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Markers around reasoning: of a template, the first that it names."""


def recognise(rendered: str, name: str) -> Format | None:
    """The format in which a template wrote a call of `name`: the one that explains most of it."""
    text = "".join(rendered.split())
    found = [
        (len(opening), row)
        for row in FORMATS.values()
        if (opening := "".join((row.begin + row.opening(name)).split())) in text
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def properties_of(schema: Any) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether required) of a function's arguments, for the formats that write them
    one by one. References into the schema's definitions stay valid in each."""
    schema = schema if isinstance(schema, dict) else {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required")
    names = {n for n in required if isinstance(n, str)} if isinstance(required, list) else set()
    properties = schema.get("properties")
    return [
        (name, {**shared, **one} if isinstance(one, dict) else one, name in names)
        for name, one in (properties.items() if isinstance(properties, dict) else ())
    ]


def is_raw(schema: Any) -> bool:
    """Whether an argument is text only, which `params` formats write as it is."""
    if not isinstance(schema, dict):
        return False
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(map(is_raw, options)) and all(
            is_raw(one) or (isinstance(one, dict) and one.get("type") == "null") for one in options
        )
    kind = schema.get("type")
    if kind is None and isinstance(values := schema.get("enum", [schema.get("const")]), list):
        return bool(values) and all(isinstance(one, str) for one in values)
    return kind == "string" or (isinstance(kind, list) and set(kind) == {"string", "null"})


def takes_null(schema: Any) -> bool:
    """Whether an argument may be null beside text: then the text `null` is that."""
    if not isinstance(schema, dict):
        return False
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(map(takes_null, options))
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [None])
    is_named = kind == "null" or (isinstance(kind, list) and "null" in kind)
    return is_named and isinstance(values, list) and None in values


def render_calls(
    row: Format, calls: Iterable[tuple[str, Mapping[str, Any]]], schemas: Mapping[str, Any]
) -> str:
    """The calls as a model of the family writes them. `schemas`: of the functions, by name."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        known = {key: is_raw(schema) for key, schema, _ in properties_of(schemas.get(name))}
        number = f"call{index:05}" if row.ids == "short" else str(index)
        text = row.before + name + row.middle.replace(INDEX, number)
        texts.append(text + _render_arguments(row, arguments, known) + row.after)
    return row.begin + row.separator.join(texts) + row.end if texts else ""


def _render_arguments(row: Format, arguments: Mapping[str, Any], raw: Mapping[str, bool]) -> str:
    if row.arguments == "json" or not isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    parts = []
    for key, value in arguments.items():
        if row.arguments == "params":
            is_text = raw.get(key, isinstance(value, str)) and isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False)
        elif row.arguments == "python":
            text = PYTHON_NAMES.get(value) if value is None or isinstance(value, bool) else None
            text = text or json.dumps(value, ensure_ascii=False)
        else:
            text = render_gemma(value)
        parts.append(row.param.replace(KEY, key).replace(VALUE, text))
    return row.param_separator.join(parts)


BLANKS = " \t\r\n"
"""What may stand before a call that is the whole answer, and is no part of it."""
PYTHON_NAMES: Mapping[Any, str] = {True: "True", False: "False", None: "None"}


def render_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, list):
        return "[" + ",".join(map(render_gemma, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{render_gemma(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def split_marks(text: str, marks: Iterable[str]) -> list[str]:
    """The text cut into markers and what stands between them; longer markers first."""
    if not marks:
        return [text] if text else []
    pattern = "|".join(re.escape(one) for one in sorted(marks, key=len, reverse=True))
    return [part for part in re.split(f"({pattern})", text) if part]
