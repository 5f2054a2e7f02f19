"""JSON schemas from an API server's OpenAPI: whole, closed, and named as kubeconform asks."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from e2e.schemas import convert

KIND = "x-kubernetes-group-version-kind"
REF = "#/components/schemas/"
DOCUMENT: dict[str, Any] = {
    "components": {
        "schemas": {
            "Pod": {
                "type": "object",
                KIND: [{"group": "", "version": "v1", "kind": "Pod"}],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"allOf": [{"$ref": REF + "Meta"}], "default": {}},
                    "spec": {"$ref": REF + "Spec"},
                },
            },
            "Meta": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                },
            },
            "Spec": {
                "type": "object",
                "required": ["port"],
                "properties": {
                    "port": {"x-kubernetes-int-or-string": True},
                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                    "maybe": {"type": "string", "nullable": True},
                },
            },
            "NotAKind": {"type": "object"},
        }
    }
}
GOOD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "labels": {"b": "c"}},
    "spec": {"port": "http", "free": {"anything": 1}, "maybe": None},
}


def test_one_file_for_each_kind() -> None:
    assert [name for name, _ in convert.files(DOCUMENT)] == ["v1/pod_v1.json"]


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"kind": "Pods"}, False),
        ({"apiVersion": "v2"}, False),
        ({"nonsense": 1}, False),
        ({"metadata": {"name": "a", "nonsense": 1}}, False),
        ({"metadata": {"labels": {"b": 1}}}, False),
        ({"spec": {"port": 80}}, True),
        ({"spec": {"port": 1.5}}, False),
        ({"spec": {}}, False),
        ({"spec": {"port": 80, "typo": 1}}, False),
    ],
)
def test_objects_are_judged_strictly(change: dict[str, Any], is_valid: bool) -> None:
    [(_, schema)] = convert.files(DOCUMENT)
    assert jsonschema_rs.validator_for(schema).is_valid({**GOOD, **change}) == is_valid


def test_the_document_is_left_as_it_was() -> None:
    before = repr(DOCUMENT)
    list(convert.files(DOCUMENT))
    assert repr(DOCUMENT) == before
