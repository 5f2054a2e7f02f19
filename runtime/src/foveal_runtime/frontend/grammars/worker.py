"""The process that compiles grammars first: one may take hours, or all memory.

Started by `Compiler`; reads one JSON job a line and answers one JSON line. Each job has CPU time of
its own, which the kernel enforces: a job that takes more ends this process, and the next job has
another. Knows no model: a grammar that compiles here compiles for any vocabulary. Structural tags
(free text in which some words begin a part that must follow a schema) come in vLLM's older form
(`structures` and `triggers`) or as triggered tags with JSON contents (`format`).
"""

from __future__ import annotations

import json
import math
import random
import re
import resource
import sys
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, gbnf_to_lark

from foveal_runtime.frontend.grammars.schema import (
    SchemaError,
    children,
    prepare,
    without_counts,
)
from foveal_runtime.frontend.grammars.turn import turn_to_lark

MAX_TAGS = 128


def tags_to_lark(source: Any, options: dict[str, Any]) -> str:
    """Raises SchemaError."""
    structures, triggers = _structures(source)
    tags = []
    for index, one in enumerate(structures):
        path = f"/structures/{index}"
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str):
            raise SchemaError("schema_invalid", "a structure has begin, schema and end", path)
        begin, end = one["begin"], one.get("end", "")
        trigger = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), None)
        if not trigger or not isinstance(end, str):
            raise SchemaError("schema_invalid", "no trigger begins this structure's begin", path)
        schema = prepare(one.get("schema", {}))
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": options}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=json.dumps(schema), end=end))
    if not 0 < len(tags) <= MAX_TAGS:
        raise SchemaError("schema_invalid", f"1 to {MAX_TAGS} structures are taken")
    return StructTag.to_grammar(tags, assume_special=False)


def _structures(source: Any) -> tuple[list[Any], list[Any]]:
    if not isinstance(source, dict):
        raise SchemaError("schema_invalid", "a structural tag is an object")
    form = source.get("format")
    if form is None:
        structures, triggers = source.get("structures"), source.get("triggers")
    else:
        if not isinstance(form, dict) or form.get("type") != "triggered_tags":
            raise SchemaError(
                "schema_unsupported", "only the format triggered_tags is supported", "/format"
            )
        for key, value in form.items():  # at_least_one, stop_after_first, excludes
            if key not in ("type", "triggers", "tags") and value:
                raise SchemaError("schema_unsupported", f"{key} is not enforced", f"/format/{key}")
        structures, triggers = [], form.get("triggers")
        for index, tag in enumerate(form.get("tags") or ()):
            content = tag.get("content") if isinstance(tag, dict) else None
            if not isinstance(content, dict) or content.get("type") != "json_schema":
                raise SchemaError(
                    "schema_unsupported", "only json_schema contents are supported",
                    f"/format/tags/{index}/content",
                )  # fmt: skip
            structures.append({**tag, "schema": content.get("json_schema", {})})
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise SchemaError("schema_invalid", "structures and triggers are lists")
    return structures, triggers


JOB_CPU_SECONDS = 1
MEMORY_BYTES = 2 << 30
MAX_TRIES = 200
NUM_TRIALS = 3
TRIAL_BYTES = 64
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
_UNSUPPORTED = {
    re.compile("^(Unimplemented|Unknown format)"): "",
    re.compile("^oneOf"): "oneOf is enforced only where no value can satisfy two of its schemas",
    re.compile("^Resource '"): "a reference to another document is not followed",
    re.compile("are not disjoint$"): "",
    re.compile("too many digits"): "",
    re.compile("^min/maxProperties only supported"): "",
}
"""What the library says of schemas that mean something it cannot enforce; said in our words where
its own name its options."""
BLANKS = r"\n?[ ]{0,40}"
"""Between JSON tokens: models loop on blanks when there is no limit."""


def compile_job(kind: str, source: Any, strict: bool) -> dict[str, Any]:
    """{"grammar", "relaxed"}. Raises SchemaError."""
    if kind == "json":
        return _json(source, strict)
    if kind == "turn":
        return _turn(source)
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind == "choice":
        options = " | ".join(json.dumps(one) for one in source)
        grammar = LLMatcher.grammar_from_lark(f"start: {options}")
    elif kind == "structural_tag":
        grammar = tags_to_lark(source, _options(strict=True))
    else:
        grammar = LLMatcher.grammar_from_lark(_lark(source))
    failed, messages = _validate(grammar)
    if failed:
        raise SchemaError("grammar_invalid", _first_line(messages[0]))
    return {"grammar": grammar, "relaxed": []}


def _lark(source: str) -> str:
    """EBNF (GBNF's `::=`) is translated; everything else is Lark."""
    if "::=" not in source:
        return source
    try:
        return str(gbnf_to_lark.gbnf_to_lark(source))
    except Exception as error:
        raise SchemaError("grammar_invalid", f"the EBNF cannot be read: {error}") from error


def _options(*, strict: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_pattern": BLANKS}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return options


def _grammar(schema: Any, *, strict: bool) -> str:
    overrides: Any = _options(strict=strict)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def _json(source: Any, strict: bool) -> dict[str, Any]:
    grammar, relaxed, _ = _bound(prepare(source), strict)
    return {"grammar": grammar, "relaxed": relaxed}


def _bound(schema: Any, strict: bool) -> tuple[str, list[str], Any]:
    """(grammar, what is not enforced, the schema without what would be misread)."""
    grammar = _grammar(schema, strict=True)
    failed, messages = _validate(grammar)
    if not failed:
        return grammar, [], schema
    if not strict:
        loose, counts = without_counts(schema)
        grammar = _grammar(loose, strict=False)
        failed, messages = _validate(grammar)
        if not failed:
            return grammar, [*counts, *map(_first_line, messages)], loose
    message = _first_line(messages[0])
    code = "schema_invalid"
    for known, said in _UNSUPPORTED.items():
        if known.search(message):
            code, message = "schema_unsupported", said or message
    raise SchemaError(code, message, _locate(schema, strict))


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Calls of tools are compiled as text of bytes first, in which no model's tokens occur; when
    that fails, tool by tool, for the place and for what may be relaxed."""
    relaxed: list[str] = []
    tools = turn["tools"]
    for index, tool in enumerate(tools):
        try:
            tool["parameters"] = prepare(tool["parameters"])
        except SchemaError as error:
            raise SchemaError(error.code, error.message, _of_tool(index, error.path)) from error
        tool["options"] = _options(strict=True)
    if tools and _refused_calls(turn):
        for index, tool in enumerate(tools):
            try:
                _, found, tool["parameters"] = _bound(tool["parameters"], tool["strict"])
                turn_to_lark(_calls_alone(turn, [tool]), {})
            except SchemaError as error:
                raise SchemaError(error.code, error.message, _of_tool(index, error.path)) from error
            tool["options"] = _options(strict=not found)
            relaxed += [f"{tool['name']}: {one}" for one in found]
        if message := _refused_calls(turn):
            raise SchemaError("schema_invalid", _first_line(message))
    lark, more = turn_to_lark(turn, turn["marks"])
    grammars = [{"name": "turn", "lark_grammar": lark}]
    if turn["is_bound"]:
        answer = turn["answer"]
        alone = json.loads(answer)["grammars"][0] if answer.startswith("{") else None
        grammars.append({**(alone or {"lark_grammar": answer}), "name": "answer"})
    return {"grammar": json.dumps({"grammars": grammars}), "relaxed": relaxed + more}


def _calls_alone(turn: dict[str, Any], tools: list[Any]) -> dict[str, Any]:
    return {**turn, "tools": tools, "choice": "required", "think": None, "is_bound": False}


def _refused_calls(turn: dict[str, Any]) -> str:
    """Why calls cannot be bound; "" when they can."""
    try:
        lark, _ = turn_to_lark(_calls_alone(turn, turn["tools"]), {})
    except SchemaError as error:
        return error.message
    failed, messages = _validate(LLMatcher.grammar_from_lark(lark))
    return messages[0] if failed else ""


def _of_tool(index: int, path: str) -> str:
    return f"/{index}/function/parameters{path}"


def _locate(schema: Any, strict: bool) -> str:
    """The deepest part that fails by itself: the library's errors have no path."""
    shared = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    path, part, tries = "", schema, 0
    while True:
        for step, child in children(part):
            if isinstance(child, bool):  # fails by itself where it says what its parent means
                continue
            tries += 1
            if tries > MAX_TRIES:
                return path
            alone = {**shared, **child} if isinstance(child, dict) else child
            if _validate(_grammar(alone, strict=strict))[0]:
                path, part = path + step, child
                break
        else:
            return path


def _validate(grammar: str) -> tuple[bool, list[str]]:
    """(refused, errors or warnings). A grammar that compiles is also followed for a while: what is
    costly is often built only when it is needed, and an engine could not be stopped then."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if not failed and (error := _follow(grammar)):
        return True, [error]
    return failed, messages


def _follow(grammar: str) -> str:
    """The error that some seeded outputs of bytes run into; "" when they run into none."""
    for seed in range(NUM_TRIALS):
        rng = random.Random(seed)
        matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=_LIMITS)
        for _ in range(TRIAL_BYTES):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                return "it needs more time or memory than it may have"
            allowed = [i for i in range(256) if bits >> i & 1]
            if not allowed:
                break
            matcher.consume_token(rng.choice(allowed))
    return ""


@lru_cache(maxsize=1)
def _bytes_tokenizer() -> LLTokenizer:
    """Tokens 0 to 255 are the bytes, 256 ends."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(rest)}
    document: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "post_processor": None,
        "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                    "use_regex": False},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": alphabet, "merges": []},
    }  # fmt: skip
    return LLTokenizer(json.dumps(document), n_vocab=257, eos_token=256)


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:300] if message.strip() else "it cannot be compiled"


def _limit_cpu() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = math.ceil(used.ru_utime + used.ru_stime)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (spent + JOB_CPU_SECONDS, hard))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = sys.stdout.buffer
    out.write(b"{}\n")
    out.flush()
    for line in sys.stdin.buffer:
        kind, source, strict = json.loads(line)
        _limit_cpu()
        try:
            answer = compile_job(kind, source, strict)
        except SchemaError as error:
            answer = {"code": error.code, "message": error.message, "path": error.path}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            text = str(error) or "it is nested too deeply"
            answer = {"code": "schema_invalid", "message": _first_line(text), "path": ""}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
