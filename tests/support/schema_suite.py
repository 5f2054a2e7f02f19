"""The official JSON Schema test suite (MIT), of the source archive of the jsonschema package."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from tests.support import packages

PINNED = packages.REQUIREMENTS / "schema-suite.txt"
DRAFTS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft7": jsonschema.Draft7Validator,
}


@dataclass(frozen=True)
class Case:
    """A schema of the suite; `tests` are (description, instance, whether it is valid)."""

    draft: str
    file: str
    name: str
    schema: Any
    tests: tuple[tuple[str, Any, bool], ...]


@cache
def cases(draft: str) -> list[Case]:
    """The required ones and those of formats; schemas name their draft. Raises
    packages.Unavailable."""
    folder = packages.cached("schema-suite", PINNED, _make) / draft
    found = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("optional/format/*.json")]):
        for one in json.loads(path.read_text(encoding="utf-8")):
            tests = tuple((t["description"], t["data"], t["valid"]) for t in one["tests"])
            name, schema = one["description"], one["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"], **schema}
            found.append(Case(draft, str(path.relative_to(folder)), name, schema, tests))
    return found


def _make(work: Path) -> None:
    packages.archive(PINNED, "jsonschema-*/json/tests", work)


def spellings(value: Any, limit: int = 24) -> Iterator[str]:
    """A value as JSON with the members of its objects in every order, up to a limit."""
    if isinstance(value, dict):
        for names in itertools.islice(itertools.permutations(value), limit):
            parts = [list(spellings(value[name], limit)) for name in names]
            for texts in itertools.islice(itertools.product(*parts), limit):
                members = zip(names, texts, strict=True)
                yield "{" + ", ".join(f"{_text(name)}: {text}" for name, text in members) + "}"
    elif isinstance(value, list):
        parts = [list(spellings(one, limit)) for one in value]
        for texts in itertools.islice(itertools.product(*parts), limit):
            yield "[" + ", ".join(texts) + "]"
    else:
        yield _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def part_at(schema: Any, pointer: str) -> Any:
    """What a JSON pointer of an error points to. Raises LookupError."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    return schema
