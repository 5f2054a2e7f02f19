"""The table of tool formats: what is rendered is allowed by the grammar and read back, however it
is cut."""

from __future__ import annotations

import json
import random
import string

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from foveal_runtime.frontend.grammars.formats import FORMATS, render_calls
from foveal_runtime.frontend.grammars.reader import Reader, TurnFormat
from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, byte_tokenizer
from foveal_runtime.frontend.text.detokenizer import Detokenizer, Piece
from foveal_runtime.frontend.text.tokenizer import TextTokenizer

THINK = ("<think>", "</think>")
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "[CALL_ID]",
)  # fmt: skip
LEAVES = (
    {"type": "string", "maxLength": 12},
    {"enum": ["red", "blue green"]},
    {"type": "integer", "minimum": -50, "maximum": 999},
    {"type": "boolean"},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5},
)


def with_marks():
    hf = byte_tokenizer()
    hf.add_tokens([AddedToken(mark, special=mark.startswith("<|")) for mark in MARKS])
    return hf


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def tokenizer(request):
    return TextTokenizer(with_marks() if request.param else byte_tokenizer())


@pytest.fixture(scope="module")
def library(tokenizer):
    return LLTokenizer(
        tokenizer.hf.backend_tokenizer.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[EOS]
    )


def random_schema(rng, depth=0):
    properties = {}
    for key in rng.sample(["a", "city", "max_size", "is-on", "k2"], rng.randint(0, 4)):
        schema = dict(rng.choice(LEAVES))
        if depth < 2 and rng.random() < 0.3:
            schema = random_schema(rng, depth + 1)
        elif rng.random() < 0.2:
            schema = {"type": "array", "items": schema, "maxItems": 3}
        properties[key] = schema
    required = [key for key in properties if rng.random() < 0.6]
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def random_value(rng, schema):
    if "anyOf" in schema:
        return random_value(rng, rng.choice(schema["anyOf"]))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "string":
        chars = string.ascii_letters + ' "\\{}[]()<>/:,=\n\té漢😀'
        return "".join(rng.choices(chars, k=rng.randint(0, schema.get("maxLength", 9))))
    if kind == "array":
        return [random_value(rng, schema["items"]) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        return {
            key: random_value(rng, one)
            for key, one in schema["properties"].items()
            if key in schema["required"] or rng.random() < 0.5
        }
    plain = {"boolean": rng.random() < 0.5, "null": None, "number": rng.randint(0, 20) / 2}
    return plain[kind] if kind in plain else rng.randint(-50, 999)


def turn_of(row, schemas, tokenizer):
    return TurnFormat(row, schemas, None, False, tokenizer.marks(row.literals))


def grammar_of(turn, choice, parallel=True):
    tools = [{"name": n, "parameters": s, "strict": False} for n, s in turn.schemas.items()]
    source = {
        "format": turn.row.name, "tools": tools, "choice": choice, "parallel": parallel,
        "think": None, "marks": dict(turn.marks), "is_bound": False, "answer": "",
    }  # fmt: skip
    return compile_job("turn", json.loads(json.dumps(source)), True)["grammar"]


def read(turn, pieces):
    """(content, reasoning, calls) of an output that arrives in pieces."""
    reader = Reader(turn, "r")
    content, reasoning, calls = "", "", []
    for piece in [*pieces, None]:
        content += reader.finish() if piece is None else reader.push(piece)
        thought, found, _ = reader.take()
        reasoning += thought
        for part in found:
            if part.id:
                assert part.index == len(calls)
                assert not part.arguments
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    return content, reasoning, [(name, text) for name, text in calls]


def cuts(text, rng):
    yield [text]
    yield [text[i : i + 1] for i in range(len(text))]
    for _ in range(3):
        at = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        yield [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_rendered_calls_are_allowed_and_read_back_however_they_are_cut(name, tokenizer, library):
    row, rng = FORMATS[name], random.Random(name)
    for _ in range(5):
        schemas = {f"f{i}.x"[: rng.randint(2, 4)] + str(i): random_schema(rng) for i in range(3)}
        calls = [
            (which, random_value(rng, schemas[which]))
            for which in rng.choices(list(schemas), k=rng.randint(1, 3))
        ]
        turn = turn_of(row, schemas, tokenizer)
        text = render_calls(row, calls, schemas)
        for choice, before in (("required", ""), ("auto", ""), ("auto", "I look <b> [.\n")):
            if before and not row.marker:
                continue
            matcher = LLMatcher(library, grammar_of(turn, choice), log_level=0)
            assert not matcher.get_error(), matcher.get_error()
            tokens = tokenizer.encode(before + text, add_special_tokens=False)
            for number, token in enumerate(tokens):
                assert matcher.consume_token(token), (choice, tokenizer.decode(tokens[:number]))
            assert matcher.is_accepting()
            for pieces in cuts(turn.encoded(before + text), rng):
                content, _, found = read(turn, pieces)
                assert content == before.rstrip()
                assert [(n, json.loads(a)) for n, a in found] == calls


def detokenized(tokenizer, turn, batches):
    """(content, calls) of output tokens that arrive in batches."""
    detokenizer = Detokenizer(tokenizer, turn=turn, request_id="r")
    content, calls = "", {}
    for batch in [*batches, None]:
        piece = detokenizer.finish() if batch is None else detokenizer.push(batch)
        content += piece.text
        for part in detokenizer.take()[1]:
            known = calls.setdefault(part.index, [part.name, ""])
            known[1] += part.arguments
    return content, list(calls.values())


@pytest.mark.parametrize("name", FORMATS)
def test_random_outputs_are_valid_calls(name, tokenizer, library):
    """What the grammar allows, the parser reads as calls that validate."""
    row, rng = FORMATS[name], random.Random(name)
    finished = 0
    for number in range(8):
        schemas = {"look": random_schema(rng), "look_up": random_schema(rng)}
        turn = turn_of(row, schemas, tokenizer)
        grammar = grammar_of(turn, "required", parallel=bool(number % 2))
        matcher = LLMatcher(library, grammar, log_level=0)
        outputs = []
        for _ in range(1500):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [i for i in range(tokenizer.vocab_size) if bits >> i & 1]
            token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed)
            if token == EOS:
                finished += 1
                break
            assert matcher.consume_token(token)
            outputs.append(token)
        else:
            continue
        found = [detokenized(tokenizer, turn, batches) for batches in cuts(outputs, rng)]
        assert all(one == found[0] for one in found)
        content, calls = found[0]
        assert not content
        assert len(calls) == 1 or (calls and number % 2)
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[called])
    assert finished >= 4


@pytest.mark.parametrize("name", FORMATS)
def test_a_choice_that_may_be_null(name, tokenizer, library):
    """It ended the process that compiles."""
    schema = {"properties": {"a": {"type": ["string", "null"], "enum": ["x", "y", None]}}}
    turn = turn_of(FORMATS[name], {"look": {"type": "object", **schema}}, tokenizer)
    matcher = LLMatcher(library, grammar_of(turn, "required"), log_level=0)
    text = render_calls(FORMATS[name], [("look", {"a": "y"})], turn.schemas)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert all(matcher.consume_token(token) for token in tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if not row.marker])
@pytest.mark.parametrize("blanks", ["", "\n", " \t\r\n\n"])
def test_blanks_hide_no_call_from_the_grammar(name, blanks, tokenizer, library):
    """Regression: the parser leaves leading blanks out and took what came behind for a call, where
    the grammar took blanks for the beginning of text, in which anything goes."""
    row = FORMATS[name]
    schemas = {"look": {"type": "object", "properties": {"n": {"type": "integer"}},
                        "required": ["n"], "additionalProperties": False}}  # fmt: skip
    turn = turn_of(row, schemas, tokenizer)

    def matcher():
        found = LLMatcher(library, grammar_of(turn, "auto"))
        assert not found.get_error()
        return found

    call = blanks + render_calls(row, [("look", {"n": 3})], schemas)
    ids = tokenizer.encode(call, add_special_tokens=False)
    assert matcher().validate_tokens(ids) == len(ids)
    wrong = tokenizer.encode(call.replace("3", "wrong"), add_special_tokens=False)
    assert matcher().validate_tokens(wrong) < len(wrong)
    text = tokenizer.encode(f"{blanks}[not a call", add_special_tokens=False)
    assert matcher().validate_tokens(text) == len(text)
    content, _, calls = read(turn, [call])
    assert not content.strip()
    assert len(calls) == 1


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.marker])
def test_a_call_that_is_cut_off_before_its_name_is_not_text(name, tokenizer):
    """Its marker was the answer's text where max_tokens ended it, and a stop string that the marker
    holds made that a "stop"."""
    row = FORMATS[name]
    turn = turn_of(row, {"look": {"type": "object"}}, tokenizer)
    opening = turn.encoded(row.begin + row.opening("look"))
    for end in range(len(turn.encoded(row.marker)), len(opening)):
        for before in ("", "I look.\n"):
            content, _, calls = read(turn, turn.encoded(before) + opening[:end])
            assert (content, calls) == (before.rstrip(), [])
    detokenizer = Detokenizer(tokenizer, stops=["l", "C"], turn=turn)
    detokenizer.push(tokenizer.encode(row.begin + row.before, add_special_tokens=False))
    assert detokenizer.finish() == Piece("", 0)


@pytest.mark.parametrize("name", FORMATS)
def test_where_a_call_is_required_its_beginning_is_no_text(name, tokenizer):
    """`tool_choice: required` and few max_tokens gave `{"name": "lo` as the answer's text."""
    row = FORMATS[name]
    marks = tokenizer.marks(row.literals + "".join(THINK))
    schemas = {"look": {"type": "object"}}
    opening = row.begin + row.opening("look")
    for think, before in ((None, ""), (THINK, ""), (THINK, "<think>hm</think>\n")):
        turn = TurnFormat(row, schemas, think, False, marks, only_calls=True)
        text, start = turn.encoded(before + opening), len(turn.encoded(before))
        for end in range(start, len(text)):
            content, reasoning, calls = read(turn, text[:end])
            assert (content, reasoning, calls) == ("", "hm" if before else "", [])
        assert [name for name, _ in read(turn, [text])[2]] == ["look"]


NULLABLE = (
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    {"type": ["string", "null"], "enum": ["nu", "nullable", None]},
    {"type": ["string", "null"], "minLength": 5},
)


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if row.arguments == "params"])
@pytest.mark.parametrize("one", NULLABLE)
def test_a_text_that_may_be_null_is_null_where_the_model_writes_it(name, one, tokenizer, library):
    """`null` was the text "null", and where texts are bound, the model had to write one."""
    schema = {"type": "object", "properties": {"a": one, "b": one}, "required": ["a", "b"]}
    turn = turn_of(FORMATS[name], {"look": schema}, tokenizer)
    texts = [*one.get("enum", ()), "nu", "null or not", "x"]
    matcher = LLMatcher(library, grammar_of(turn, "required"), log_level=0)
    written = render_calls(FORMATS[name], [("look", {"a": None, "b": None})], turn.schemas)
    tokens = tokenizer.encode(written, add_special_tokens=False)
    assert matcher.validate_tokens(tokens) == len(tokens)
    for text in (None, *texts):
        call = ("look", {"a": text, "b": None})
        written = turn.encoded(render_calls(FORMATS[name], [call], turn.schemas))
        for pieces in cuts(written, random.Random(name)):
            assert json.loads(read(turn, pieces)[2][0][1]) == call[1]
    schema["properties"]["a"] = {"type": "string"}
    written = turn.encoded(render_calls(FORMATS[name], [("look", {"a": "null"})], turn.schemas))
    assert json.loads(read(turn, [written])[2][0][1]) == {"a": "null"}
