"""The official JSON Schema test suite: what compiles, what its grammar takes, what is refused."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from llguidance import LLMatcher, LLTokenizer

from foveal_runtime.frontend.grammars.schema import SchemaError
from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, byte_tokenizer
from tests.support import packages, schema_suite

pytestmark = pytest.mark.extended

ANNOTATIONS = {
    "ecmascript-regex", "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer",
    "regex", "relative-json-pointer", "unknown", "uri-reference", "uri-template",
}  # fmt: skip
"""Formats that are taken and not enforced, as JSON Schema lets them be."""
NARROWER = {
    "const.json": "float", "enum.json": r"float|\[[01]\.0\]", "type.json": "fractional part",
    "format.json": "annotation", "optional/format/date-time.json": "leap second",
    "optional/format/email.json": "quoted string|IPv6-address-literal",
    "optional/format/ipv6.json": "ipv4 section|double colons|ipv4-mapped|a long valid",
    "optional/format/time.json": "leap second",
    "ref.json": "maxItems ignored",
}  # fmt: skip
"""Valid instances that are not written: whole numbers as 1.0, formats where they are annotations,
leap seconds, odd addresses, and what draft 7 ignores beside $ref."""
NUM_COMPILED = {"draft2020-12": 240, "draft7": 190}
"""At least so many of the suite's schemas are served."""


@pytest.fixture(scope="module", params=schema_suite.DRAFTS)
def cases(request):
    return packages.or_skip(lambda: schema_suite.cases(request.param))


@pytest.fixture(scope="module")
def library():
    hf = byte_tokenizer()
    return LLTokenizer(hf.backend_tokenizer.to_str(), n_vocab=len(hf), eos_token=[EOS])


def takes(matcher, value) -> bool:
    """Whether some order of the members is an output that may end."""
    for text in schema_suite.spellings(value):
        one, tokens = matcher.deep_copy(), list(text.encode("utf-8", "surrogatepass"))
        if one.validate_tokens(tokens) == len(tokens):
            assert one.consume_tokens(tokens)
            if one.is_accepting():
                return True
    return False


def test_instances_are_taken_as_the_suite_says(cases, library):
    counts = Counter()
    for case in cases:
        try:
            grammar = compile_job("json", case.schema, True)["grammar"]
        except SchemaError as error:
            found = error
        else:
            found = None
        if found is not None:
            counts[found.code] += 1
            schema_suite.part_at(case.schema, found.path)
            assert found.message
            assert found.code in ("schema_invalid", "schema_unsupported"), case
            if found.code == "schema_invalid":  # nothing can satisfy it
                assert not any(valid for *_, valid in case.tests), case
            continue
        counts["compiled"] += 1
        matcher = LLMatcher(library, grammar, log_level=0)
        assert not matcher.get_error(), case
        for test, instance, valid in case.tests:
            taken = takes(matcher, instance)
            if taken and not valid:
                assert case.file.split("/")[-1].removesuffix(".json") in ANNOTATIONS, (case, test)
            elif valid and not taken:
                assert re.search(NARROWER.get(case.file, "$^"), test), (case, test)
            counts[valid, taken] += 1
    assert counts["compiled"] >= NUM_COMPILED[cases[0].draft], counts
    assert counts[True, True] > 600
    assert counts[False, False] > 350


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "/properties/a/items"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}}, "/properties/a"),
        ({"anyOf": [{"type": "null"}, {"$ref": "https://example.org/a"}]}, "/anyOf/1"),
        ({"properties": {"a": True, "b": {"not": {"type": "null"}}}}, "/properties/b"),
        ({"properties": {"a": {"unevaluatedProperties": False, "$ref": "#/$defs/b"}},
          "$defs": {"b": {"type": "object"}}}, "/properties/a"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place(schema, path):
    """Regression: a boolean anywhere in the schema hid the reason and the place."""
    with pytest.raises(SchemaError) as caught:
        compile_job("json", schema, True)
    assert (caught.value.code, caught.value.path) == ("schema_unsupported", path)
    assert "coerce_one_of" not in caught.value.message


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "uniqueItems": False, "maxItems": 2.0}, [1, 1], [1, 1, 1]),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [1], [1, 2]),
        (
            {"type": "array", "items": [{"type": "string"}], "unevaluatedItems": False},
            ["a"], ["a", "b"],
        ),
        ({"type": "integer", "then": {"minimum": 1}, "minContains": 2}, 0, "a"),
        ({"type": "array", "contains": True, "minContains": 0}, [], {}),
        (
            {"type": "object", "dependentRequired": {"a": []}, "propertyNames": True},
            {"a": 1}, [1],
        ),
    ],
)  # fmt: skip
def test_keywords_that_ask_for_nothing_more_are_taken(library, schema, valid, invalid):
    made = compile_job("json", schema, True)
    assert made["relaxed"] == []
    matcher = LLMatcher(library, made["grammar"], log_level=0)
    assert takes(matcher, valid)
    assert not takes(matcher, invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "contains": True, "minContains": 0, "maxContains": 1},
        {"type": "object", "dependentRequired": []},
        {"type": "object", "dependentSchemas": True},
    ],
)
def test_keywords_that_ask_for_something_are_refused(schema):
    with pytest.raises(SchemaError):
        compile_job("json", schema, True)


@pytest.mark.parametrize(
    ("name", "text", "taken"),
    [
        ("date", "2024-02-29", True), ("date", "2023-02-29", False), ("date", "1900-02-29", False),
        ("date", "2000-02-29", True), ("date", "0000-01-01", False), ("date", "2024-04-31", False),
        ("time", "23:59:59.123+23:59", True), ("time", "24:00:00Z", False),
        ("time", "12:00:00", False), ("date-time", "2024-12-31T23:59:59Z", True),
        ("date-time", "2023-02-29T00:00:00Z", False), ("date-time", "2024-01-01 00:00:00Z", False),
    ],
)  # fmt: skip
def test_dates_and_times_exist(library, name, text, taken):
    grammar = compile_job("json", {"type": "string", "format": name}, True)["grammar"]
    assert takes(LLMatcher(library, grammar, log_level=0), text) == taken
