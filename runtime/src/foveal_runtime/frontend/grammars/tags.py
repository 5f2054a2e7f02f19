"""Structural tags: free text in which some words begin a part that must follow a schema.

Used by the compiling worker. Takes vLLM's older form (`structures` and `triggers`) and, of the
newer one (`format`), triggered tags with JSON contents.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import StructTag

from foveal_runtime.frontend.grammars.schema import SchemaError, prepare

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
