"""The constraint on a request's output: several fields of the API, as one value.

Called by chat and completions before anything costs something. Pure; nothing is compiled here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest, CompletionRequest
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "turn"]

RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_decoding_backend": "nothing: there is one library",
    "guided_whitespace_pattern": "nothing: blanks between JSON tokens are limited",
}
"""Older names of other servers, with what to send."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A constraint as the client wrote it.

    Attributes:
        source: a JSON schema, a pattern, strings, a grammar, a structural tag, or a whole turn
            (`text.turns`).
        strict: everything is enforced or refused; else what cannot be is left out.
        param: the request's field, for errors.
    """

    kind: Kind
    source: Any
    strict: bool
    param: str


def wanted_of(request: ChatCompletionRequest | CompletionRequest) -> Wanted | None:
    """Raises InvalidRequest or Unsupported."""
    for old, new in RENAMED.items():
        if (request.model_extra or {}).get(old) is not None:
            raise Unsupported(f"{old} is not supported; send {new}", param=old)
    found = [
        one
        for one in (_of_response_format(request), _of_structured_outputs(request))
        if one is not None
    ]
    if len(found) > 1:
        raise InvalidRequest(
            "response_format and structured_outputs both constrain the output; send one",
            param="structured_outputs",
        )
    return found[0] if found else None


def _of_response_format(request: ChatCompletionRequest | CompletionRequest) -> Wanted | None:
    given = request.response_format
    if given is None or given.type == "text":
        return None
    param = "response_format"
    if given.type == "json_object":
        return Wanted("json", {"type": "object"}, True, param)
    if given.type == "structural_tag":
        return Wanted("structural_tag", given.model_dump(exclude_none=True), True, param)
    if given.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing", param="response_format.json_schema"
        )
    schema = given.json_schema.body
    if schema in (None, {}, True):
        schema = {"type": "object"}
    return Wanted("json", schema, bool(given.json_schema.strict), f"{param}.json_schema.schema")


def _of_structured_outputs(request: ChatCompletionRequest | CompletionRequest) -> Wanted | None:
    given = request.structured_outputs
    if given is None:
        return None
    named: dict[str, Any] = {
        name: value
        for name in ("json", "regex", "choice", "grammar", "structural_tag")
        if (value := getattr(given, "body" if name == "json" else name)) is not None
    }
    if given.json_object:
        named["json_object"] = {"type": "object"}
    if len(named) != 1:
        raise InvalidRequest(
            "structured_outputs takes exactly one of json, json_object, regex, choice, grammar and "
            "structural_tag",
            param="structured_outputs",
        )
    name, source = next(iter(named.items()))
    param = f"structured_outputs.{name}"
    if given.whitespace_pattern is not None or given.disable_additional_properties:
        raise Unsupported(
            "structured_outputs takes neither whitespace_pattern nor disable_additional_properties",
            param="structured_outputs",
        )
    if name in ("json", "structural_tag") and isinstance(source, str):
        source = _parsed(source, param)
    kind: Kind = "json" if name == "json_object" else name  # type: ignore[assignment]
    return Wanted(kind, source, True, param)


def _parsed(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error
