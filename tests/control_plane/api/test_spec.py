"""The resource: legal ones parse, illegal ones are refused by schema, CEL and parser alike."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from foveal_operator.api import crd
from foveal_operator.api.parse import SpecError, parse, transition_problems
from foveal_runtime.plan.config import RequestDefaults
from tests.support import api_server_rules
from tests.support.regenerate import CRD_FILE
from tests.support.samples import ILLEGAL, LEGAL, TOGETHER, TRANSITIONS, put, resource


def parser_fields(obj: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(obj)
    return [path for path, _ in caught.value.problems]


def refused(obj: Any, field: str) -> None:
    """Both say no, and both messages name the field."""
    server = [f"{path}: {message}" for path, message in api_server_rules.problems(obj)]
    assert any(field in text for text in server), server
    assert any(field in path for path in parser_fields(obj))


@pytest.mark.parametrize("name", LEGAL)
def test_legal_resources_pass_both_gates(name: str) -> None:
    assert api_server_rules.problems(LEGAL[name]) == []
    assert parse(LEGAL[name]).name == "qwen"


@pytest.mark.parametrize(("path", "value", "field"), [c[1:] for c in ILLEGAL], ids=lambda v: "")
def test_illegal_resources_are_refused_by_name(path: str, value: Any, field: str) -> None:
    refused(put(resource(), path, value), field)


@pytest.mark.parametrize(("changes", "field"), [c[1:] for c in TOGETHER], ids=lambda v: "")
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any], field: str) -> None:
    obj = resource()
    for path, value in changes.items():
        obj = put(obj, path, value)
    refused(obj, field)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.engin", {}, "spec.engin: unknown field (did you mean engine?)"),
        ("spec.engine.lora", {"adapters": [{"nam": "a"}]},
         "spec.engine.lora.adapters[0].nam: unknown field (did you mean name?)"),
        ("spec.engine.gpus", 1, "spec.engine.gpus: unknown field"),
        ("spec.engine.hostMemory", 3, "spec.engine.hostMemory: is 3; write a string"),
        ("spec.engine.replicas", -1, "spec.engine.replicas: is -1; write an integer >= 0"),
        ("spec.engine.dtype", "fp16",
         'spec.engine.dtype: is "fp16"; write one of auto, bfloat16, float16, float32'),
        ("spec.modalities", [], "spec.modalities: is a list; write a mapping"),
        ("spec.networking.service", {"annotations": {"a": 1}},
         "spec.networking.service.annotations[...]: is an integer; write a string"),
        ("spec.networking.service", {"annotations": {1: "a"}},
         "spec.networking.service.annotations: a key is an integer; write a string"),
    ],
)  # fmt: skip
def test_a_refusal_names_field_value_and_fix(path: str, value: Any, message: str) -> None:
    """They read as a library's: expected `str | null`, got `int`."""
    with pytest.raises(SpecError) as caught:
        parse(put(resource(), path, value))
    assert str(caught.value) == message


def test_the_table_of_illegal_resources_is_long_enough() -> None:
    assert len(ILLEGAL) + len(TOGETHER) >= 60


@pytest.mark.parametrize(("old", "new", "field"), TRANSITIONS)
def test_what_cannot_change_is_refused(
    old: dict[str, str], new: dict[str, str] | None, field: str
) -> None:
    before = put(resource(), "spec.model.cache", old)
    after = resource() if new is None else put(resource(), "spec.model.cache", new)
    server = [path for path, _ in api_server_rules.problems(after, before)]
    assert any(field in path for path in server)
    found = transition_problems(parse(after).spec, parse(before).spec)
    assert f"spec.model.{field}" in [path for path, _ in found]


@pytest.mark.parametrize(
    ("old", "new"),
    [(None, {"claimName": "c"}), ({"size": "1Gi"}, {"size": "2Gi"}), ({"size": "1Gi"}, None),
     ({"size": "200Gi"}, {"claimName": "c"})],
)  # fmt: skip
def test_what_may_change_may_change(old: dict[str, str] | None, new: dict[str, str] | None) -> None:
    before = resource() if old is None else put(resource(), "spec.model.cache", old)
    after = resource() if new is None else put(resource(), "spec.model.cache", new)
    assert api_server_rules.problems(after, before) == []
    assert transition_problems(parse(after).spec, parse(before).spec) == []


@pytest.mark.parametrize(
    ("old", "new", "field"), [one for one in TRANSITIONS if one[2] != "cache.size"]
)
def test_the_cache_of_another_model_may_be_any(
    old: dict[str, str], new: dict[str, str] | None, field: str
) -> None:
    """From hf:// to pvc:// there was no way: `cache` had to go and had to stay. The resource's own
    claim, whose class and access mode never change, serves every model that is fetched."""
    before = put(resource(), "spec.model.cache", old)
    after = resource() if new is None else put(resource(), "spec.model.cache", new)
    after = put(after, "spec.model.uri", "hf://org/other")
    is_fixed = field != "cache.claimName"
    assert bool(api_server_rules.problems(after, before)) == is_fixed
    assert bool(transition_problems(parse(after).spec, parse(before).spec)) == is_fixed
    for model in ({"uri": "pvc://c/m"}, {"uri": "s3://b/m", "cache": {"claimName": "new"}}):
        after = put(resource(), "spec.model", model)
        assert api_server_rules.problems(after, before) == []
        assert transition_problems(parse(after).spec, parse(before).spec) == []


@pytest.mark.parametrize("part", ["frontend", "caches", "paused", "rollout"])
def test_a_field_set_to_nothing_is_absent(part: str) -> None:
    """Found on a real API server: it drops nulls, `foveal plan` refused the same file."""
    assert parse(resource(**{part: None})).spec == parse(resource()).spec
    nested = put(resource(), "spec.engine.accelerator", {"type": None, "count": 2})
    assert parse(nested).spec.engine.accelerator.count == 2


def test_several_mistakes_are_told_at_once() -> None:
    obj = resource(name="1x", caches={"encoder": {"size": "1Gi", "tokens": 4}})
    assert parser_fields(obj) == ["metadata.name", "spec.caches.encoder.tokens"]


@pytest.mark.parametrize("namespace", [True, 7, ["a"], "a\0", "A", "a" * 64])
def test_a_namespace_is_a_label(namespace: Any) -> None:
    """It went into dashboards' texts unread: `foveal plan` ended in a traceback."""
    assert parser_fields(put(resource(), "metadata.namespace", namespace)) == ["metadata.namespace"]


@pytest.mark.parametrize("obj", [None, [], {}, {"metadata": {}}, {"metadata": {"name": "x"}}])
def test_what_is_no_resource_is_refused(obj: Any) -> None:
    assert parser_fields(obj)


@pytest.mark.parametrize(
    ("given", "field"),
    [({"temperature": "warm"}, "temperature"), ({"top_p": 0}, "top_p"), ({"topP": 1}, "topP"),
     ({"max_tokens": 1.5}, "max_tokens"), ({"chat_template_kwargs": []}, "chat_template_kwargs")],
)  # fmt: skip
def test_request_defaults_are_checked(given: Any, field: str) -> None:
    """By the operator alone: the API server takes any object there."""
    path = "spec.frontend.requestDefaults"
    assert not api_server_rules.problems(put(resource(), path, given))
    assert parser_fields(put(resource(), path, given)) == [f"{path}.{field}"]
    defaults = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False, "x": None}}
    found = parse(put(resource(), path, defaults)).spec.frontend.request_defaults
    assert found == RequestDefaults(temperature=0, chat_template_kwargs={"enable_thinking": False})


def test_the_committed_crd_is_the_generated_one() -> None:
    assert CRD_FILE.read_text(encoding="utf-8") == crd.render()


def test_the_crd_is_small_and_has_no_defaults() -> None:
    text = CRD_FILE.read_bytes()
    assert len(text) <= 64 * 1024
    assert not list(_keys(yaml.safe_load(text)["spec"], "default"))


def test_every_field_is_described_and_bounded() -> None:
    for path, schema in _schemas(api_server_rules.root_schema(), ""):
        if path == ".metadata":
            continue
        assert schema.get("description") or path.endswith("[]") or path.endswith(".*"), path
        if schema["type"] == "string" and path not in (".apiVersion", ".kind"):
            assert "maxLength" in schema or "enum" in schema, path
        if schema["type"] == "array":
            assert "maxItems" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


def test_status_and_scale_are_subresources() -> None:
    (version,) = crd.custom_resource_definition()["spec"]["versions"]
    assert version["subresources"].keys() == {"status", "scale"}
    names = [column["name"] for column in version["additionalPrinterColumns"]]
    assert names[:7] == ["Ready", "Reason", "Frontends", "Engines", "MM", "KV", "Age"]


def _keys(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key and not isinstance(item, dict):
                yield item
            yield from _keys(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item, key)


def _schemas(schema: dict[str, Any], path: str) -> Any:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _schemas(child, f"{path}.{name}")
    if "items" in schema:
        yield from _schemas(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _schemas(schema["additionalProperties"], f"{path}.*")


@pytest.mark.parametrize(("name", "model"), [("qwen", {}), ("served", {"name": "served"})])
def test_an_adapter_has_another_name_than_the_model(name: str, model: dict[str, str]) -> None:
    def named(adapter: str) -> dict[str, Any]:
        lora = {"memory": "64Mi", "adapters": [{"name": adapter, "path": "red"}]}
        obj = resource(engine={"lora": lora})
        obj["spec"]["model"].update(model)
        return obj

    assert parse(named("red"))
    if model:
        assert parse(named("qwen"))
    with pytest.raises(SpecError, match="the name of the served model"):
        parse(named(name))
