"""Tools in formats that write arguments one by one: all of a schema is bound, refused or named."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from foveal_runtime.frontend.grammars.formats import FORMATS, render_calls
from foveal_runtime.frontend.grammars.schema import SchemaError
from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, byte_tokenizer

ONE_BY_ONE = [name for name, row in FORMATS.items() if row.arguments != "json"]
TEXT = {"type": "string"}


def compiled(name, parameters, strict=True):
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    turn = {
        "format": name, "tools": [tool], "choice": "required", "parallel": False, "think": None,
        "marks": {}, "is_bound": False, "answer": "",
    }  # fmt: skip
    return compile_job("turn", turn, True)


def of(**properties):
    return {"type": "object", "properties": properties}


def takes(name, made, parameters, arguments):
    hf = byte_tokenizer()
    library = LLTokenizer(hf.backend_tokenizer.to_str(), n_vocab=len(hf), eos_token=[EOS])
    matcher = LLMatcher(library, made["grammar"], log_level=0)
    assert not matcher.get_error()
    text = render_calls(FORMATS[name], [("f", arguments)], {"f": parameters})
    tokens = list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def test_five_formats_write_arguments_one_by_one():
    assert sorted(ONE_BY_ONE) == ["gemma", "glm", "lfm2", "pythonic", "qwen3_coder"]


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"minProperties": 5, "required": ["a", "c"]}, "minProperties"),
        ({"required": ["a", "b"]}, "required"),
        ({"oneOf": [{"required": ["a"]}]}, "oneOf"),
        ({"dependentRequired": {"a": ["c"]}}, "dependentRequired"),
        ({"not": {"required": ["a"]}}, "not"),
    ],
)
def test_keywords_of_the_object_are_refused_or_named(name, more, word):
    """They were left out, and a strict tool was served as if they held."""
    schema = {**of(a=TEXT, c=TEXT), **more}
    with pytest.raises(SchemaError, match=word) as caught:
        compiled(name, schema)
    assert caught.value.code == "schema_unsupported"
    assert caught.value.path == "/0/function/parameters"
    relaxed = compiled(name, schema, strict=False)["relaxed"]
    assert any(word in one for one in relaxed), relaxed


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({**TEXT, "not": {"const": "z"}}, "z"),
        ({**TEXT, "allOf": [{"pattern": "^x$"}]}, "z"),
        ({"anyOf": [{**TEXT, "pattern": "^x$"}, {**TEXT, "maxLength": 2}]}, "zzz"),
        (
            {**TEXT, "enum": ["2024-02-29", "2023-02-29"], "format": "date"},
            "2023-02-29",
        ),
        ({"anyOf": [{**TEXT, "pattern": "^x$"}, {"type": "null"}]}, "z"),
        ({"oneOf": [TEXT, {**TEXT, "minLength": 2}]}, "zzz"),
        ({**TEXT, "enum": ["x", 5]}, 5),
        ({**TEXT, "enum": ["x", "y"], "const": "y"}, "x"),
        ({"type": ["boolean", "null"], "not": {"const": True}}, True),
        ({"enum": [True, False, None], "not": {"const": True}}, True),
        ({"type": "array", "items": TEXT, "contains": {"const": "x"}}, ["z"]),
        ({"type": "array", "items": TEXT, "maxItems": 0}, ["z"]),
        ({**of(b=TEXT), "minProperties": 1}, {}),
        ({**of(b=TEXT), "required": ["q"]}, {}),
    ],
)
def test_a_strict_argument_is_refused_or_bound_whole(name, schema, wrong):
    schema = of(a=schema)
    try:
        made = compiled(name, schema)
    except SchemaError as error:
        refusal = error
    else:
        assert made["relaxed"] == []
        assert not takes(name, made, schema, {"a": wrong})
        return
    assert refusal.code == "schema_unsupported"
    assert refusal.path.startswith("/0/function/parameters/properties/a")


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({**TEXT, "title": "A", "description": "b", "default": "c", "x-order": 1}, "z"),
        ({"type": ["string", "null"], "enum": ["x", "y", None]}, "y"),
        ({"oneOf": [{"const": "x", "title": "X"}, {"const": "y"}]}, "y"),
        ({"anyOf": [TEXT, {"type": "null"}], "default": None}, "y"),
        ({"type": "array", "items": {"type": "integer", "minimum": 3}, "minItems": 1}, [4]),
        ({**of(b=TEXT), "required": ["b"], "additionalProperties": False}, {"b": "x"}),
    ],
)
def test_a_strict_argument_that_can_be_bound_is(name, schema, value):
    schema = of(a=schema)
    made = compiled(name, schema)
    assert made["relaxed"] == []
    assert takes(name, made, schema, {"a": value})


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("more", [{"required": None}, {"required": True}])
def test_keywords_that_are_no_lists_mean_nothing(name, more):
    """Encoders that write an empty list as null got Python's own error."""
    assert compiled(name, {**of(a=TEXT), **more}, strict=False)["grammar"]


@pytest.mark.parametrize("name", ["glm", "gemma"])
def test_a_format_is_named_as_it_was_sent(name):
    """Dates are enforced by patterns, and the pattern was named."""
    relaxed = compiled(name, of(a={**TEXT, "format": "date"}), strict=False)["relaxed"]
    assert relaxed == ["f/properties/a/format"]
    schema = of(a={**TEXT, "format": "date", "pattern": "2$"})
    relaxed = compiled(name, schema, strict=False)["relaxed"]
    assert relaxed == ["f/properties/a/pattern", "f/properties/a/format"]
    with pytest.raises(SchemaError, match=r"^format "):
        compiled(name, of(a={**TEXT, "format": "date"}))


@pytest.mark.parametrize("odd", ["a b", "$id", "a:b", "@type"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_name_that_gemma_cannot_write_is_refused_at_every_level(odd, strict):
    """Names were looked at on the first level alone, and others gave arguments that are no JSON."""
    for schema in (
        of(**{odd: TEXT}),
        {"type": "array", "items": of(**{odd: TEXT})},
        {"enum": [{"fine": [{odd: 1}]}]},
    ):
        with pytest.raises(SchemaError, match="cannot write the name") as caught:
            compiled("gemma", of(a=schema), strict)
        assert caught.value.code == "schema_unsupported"
        assert caught.value.path.startswith("/0/function/parameters/properties/a")


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder"])
def test_a_number_of_properties_that_is_not_enforced_asks_for_no_others(name):
    """Beside optional properties, `minProperties` of a tool that is not strict forced the model to
    invent as many others."""
    inner = {**of(x=TEXT, y=TEXT), "minProperties": 1, "maxProperties": 1}
    schema = {**of(a=TEXT, b=inner), "minProperties": 1}
    made = compiled(name, schema, strict=False)
    for word in ("minProperties", "maxProperties"):
        assert any(word in one for one in made["relaxed"]), made["relaxed"]
    assert takes(name, made, schema, {"a": "t"})
    assert takes(name, made, schema, {"b": {"x": "t"}})
    closed = {**of(a=TEXT), "additionalProperties": False, "minProperties": 1}
    answer = {**of(list={"type": "array", "uniqueItems": True}, a=closed), "minProperties": 1}
    alone = compile_job("json", answer, False)
    assert "/minProperties" in alone["relaxed"]
    hf = byte_tokenizer()
    library = LLTokenizer(hf.backend_tokenizer.to_str(), n_vocab=len(hf), eos_token=[EOS])
    for text, is_taken in (('{"list": [1]}', True), ('{"a": {}}', False)):
        matcher = LLMatcher(library, alone["grammar"], log_level=0)
        assert (matcher.validate_tokens(list(text.encode())) == len(text)) == is_taken
