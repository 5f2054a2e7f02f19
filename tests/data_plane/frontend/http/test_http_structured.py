"""response_format and structured_outputs over HTTP: what is sent on, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foveal_runtime.frontend.grammars import compiler

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BOMB = "start: A\nA: " + " & ".join(f"/(.|\\n)*a(.|\\n){{{i}}}b(.|\\n)*/" for i in range(30))


def named(schema: Any, strict: bool = True) -> dict[str, Any]:
    body = {"name": "x", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": body}}


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        named(SCHEMA),
        named({}),
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        {"response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": [
            {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}},
        {"structured_outputs": {"structural_tag": {"format": {
            "type": "triggered_tags", "triggers": ["<f"], "tags": [
                {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA},
                 "end": "</f>"}]}}}},
    ],
)  # fmt: skip
async def test_a_grammar_reaches_every_choice(harness: Any, options: dict[str, Any]) -> None:
    for path, body in (
        ("/v1/chat/completions", harness.body(n=2, ignore_eos=True, **options)),
        ("/v1/completions", {"prompt": "a", "n": 2, "ignore_eos": True, **options}),
    ):
        response = await harness.http.post(path, json=body)
        assert response.status_code == 200, response.text
        for request in harness.generator.requests[-2:]:
            assert request.sampling.grammar
            assert not request.sampling.ignore_eos


async def test_text_is_not_bound(harness: Any) -> None:
    await harness.chat(response_format={"type": "text"})
    assert harness.generator.requests[-1].sampling.grammar == ""


@pytest.mark.parametrize(
    ("options", "code", "where"),
    [
        (named({"type": "object", "properties": {"t": {"type": "array", "uniqueItems": True}}}),
         "schema_unsupported", "/properties/t"),
        (named({"type": "object", "required": ["n"], "properties": {
            "n": {"type": "integer", "minimum": 3, "maximum": 1}}}),
         "schema_invalid", "/properties/n"),
        (named({"type": "strin"}), "schema_invalid", "strin"),
        (named(False), "schema_invalid", "nothing satisfies"),
        (named({"enum": list(range(20_000))}), "schema_too_large", "10000"),
        (named({"properties": {f"p{i}": {} for i in range(900)}}), "schema_too_large", "optional"),
        (named({"description": "x" * 300_000}), "schema_too_large", "bytes"),
        ({"structured_outputs": {"regex": "(a|"}}, "grammar_invalid", "regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "grammar_invalid", "unknown name"),
        ({"structured_outputs": {"grammar": BOMB}}, "schema_too_slow", "simplify"),
        ({"structured_outputs": {"structural_tag": {"format": {
            "type": "triggered_tags", "triggers": ["<f"], "at_least_one": True, "tags": [
                {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA},
                 "end": "</f>"}]}}}},
         "schema_unsupported", "/format/at_least_one: at_least_one is not enforced"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_request_error", "one"),
        ({**named(SCHEMA), "structured_outputs": {"regex": "a"}}, "invalid_request_error", "both"),
        ({"structured_outputs": {"whitespace_pattern": "a", "regex": "a"}},
         "unsupported_feature", "whitespace_pattern"),
        ({"guided_json": SCHEMA}, "unsupported_feature", "structured_outputs.json"),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_refused(
    harness: Any, options: dict[str, Any], code: str, where: str
) -> None:
    """The last of the grammars takes a compiler hours: it is killed, and the next is served."""
    response = await harness.chat(**options)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert where in error["message"]
    assert not harness.generator.requests
    assert (await harness.chat(**named(SCHEMA))).status_code == 200


async def test_what_is_not_strict_is_relaxed_and_named(harness: Any) -> None:
    schema = {"type": "object", "properties": {"t": {"type": "array", "uniqueItems": True}}}
    response = await harness.chat(**named(schema, strict=False))
    assert response.status_code == 200, response.text
    assert "uniqueItems" in response.headers["x-foveal-schema-relaxed"]
    assert "x-foveal-schema-relaxed" not in (await harness.chat(**named(SCHEMA))).headers


async def test_the_schema_of_json_object_binds_as_that_of_json_schema(harness: Any) -> None:
    """It was ignored, so that any object was an answer."""
    await harness.chat(**named(SCHEMA, strict=False))
    given = {"type": "json_object", "schema": SCHEMA}
    response = await harness.chat(response_format=given)
    assert response.status_code == 200, response.text
    bound, found = (request.sampling.grammar for request in harness.generator.requests)
    assert found == bound
    odd = {"type": "json_object", "schema": {"type": 5}}
    error = (await harness.chat(response_format=odd)).json()["error"]
    assert error["param"] == "response_format.schema"


async def test_a_grammar_is_compiled_once(harness: Any) -> None:
    for _ in range(3):
        await harness.chat(**named(SCHEMA))
    text = (await harness.http.get("/metrics?own=1")).text
    counts = [line for line in text.splitlines() if "grammar_compile_seconds_count" in line]
    assert counts[0].endswith(" 1.0")


async def test_without_the_library_it_is_refused(harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiler, "grammar_version", lambda: "")
    error = (await harness.chat(**named(SCHEMA))).json()["error"]
    assert error["code"] == "unsupported_feature"
