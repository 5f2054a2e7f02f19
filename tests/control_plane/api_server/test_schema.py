"""The resource on a real API server: what it accepts, refuses and prints; our parser agrees."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.api.parse import SpecError, parse
from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api, Reply
from tests.support.api_server.programs import Cluster, missing_programs, program
from tests.support.api_server_rules import root_schema
from tests.support.regenerate import CRD_FILE, ROOT
from tests.support.samples import ILLEGAL, LEGAL, TOGETHER, TRANSITIONS, put, resource

STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
EXAMPLES = sorted((ROOT / "examples").glob("mmi-*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def models(api: Api) -> str:
    """The namespace of the samples."""
    return api.namespace("models")


def parser_accepts(obj: Any) -> bool:
    try:
        parse(obj)
    except SpecError:
        return False
    return True


def names_field(reply: Reply, field: str) -> bool:
    return reply.status in (400, 422) and field in reply.message


def test_the_crd_installs_by_client_side_apply(cluster: Cluster, tmp_path: Path) -> None:
    """Client-side apply keeps a copy in an annotation, which an object over 256 KiB cannot."""
    if missing_programs("kubectl"):
        pytest.skip("kubectl not built")
    command = [str(program("kubectl")), "--kubeconfig", str(cluster.kubeconfig("kubectl"))]
    command += [f"--cache-dir={tmp_path}", "apply", "--dry-run=server", "-f", str(CRD_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "multimodalinferences.foveal.dev" in done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_accepted(api: Api, path: Path) -> None:
    for obj in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        obj["metadata"].setdefault("namespace", "models")
        assert not api.create(obj, **STRICT).message
        assert parser_accepts(obj)


@pytest.mark.parametrize("name", LEGAL)
def test_legal_resources_are_accepted(api: Api, name: str) -> None:
    assert not api.create(LEGAL[name], **STRICT).message


@pytest.mark.parametrize(("path", "value", "field"), [c[1:] for c in ILLEGAL], ids=lambda v: "")
def test_illegal_resources_are_refused_by_name(api: Api, path: str, value: Any, field: str) -> None:
    reply = api.create(put(resource(), path, value), **STRICT)
    assert names_field(reply, field), f"{reply.status}: {reply.message}"


@pytest.mark.parametrize(("changes", "field"), [c[1:] for c in TOGETHER], ids=lambda v: "")
def test_parts_that_contradict_each_other_are_refused(
    api: Api, changes: dict[str, Any], field: str
) -> None:
    obj = resource()
    for path, value in changes.items():
        obj = put(obj, path, value)
    reply = api.create(obj, **STRICT)
    assert names_field(reply, field), f"{reply.status}: {reply.message}"


@pytest.mark.parametrize(("old", "new", "field"), TRANSITIONS)
def test_what_cannot_change_is_refused(
    api: Api, namespace: str, old: dict[str, str], new: dict[str, str] | None, field: str
) -> None:
    before = put(resource(), "metadata.namespace", namespace)
    after = copy.deepcopy(before)
    stored = api.create(put(before, "spec.model.cache", old)).must()
    if new is not None:
        after = put(after, "spec.model.cache", new)
    after = put(after, "metadata.resourceVersion", stored["metadata"]["resourceVersion"])
    reply = api.replace(after, **STRICT)
    assert names_field(reply, field), f"{reply.status}: {reply.message}"
    if field == "cache.claimName":  # the resource's own claim stays as it is, and never shrinks
        api.replace(put(after, "spec.model.uri", "hf://org/other"), **STRICT).must()


# --- boundaries of every field, from the schema itself -------------------------------------------
def _leaves(schema: Obj, path: str) -> Iterator[tuple[str, Obj]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _leaves(child, f"{path}.{name}")


def _edges(schema: Obj) -> Iterator[Any]:
    """Values just inside and just outside of what one field allows."""
    kind = schema["type"]
    yield from (v for v in ("text", 3, True, [], {}, None) if not _is(kind, v))
    yield from schema.get("enum", ())
    if "minimum" in schema:
        low, high = schema["minimum"], schema["maximum"]
        yield from (low - 1, low, high, high + 1)
    elif kind == "string":
        if "maxLength" in schema:
            yield from ("a" * schema["maxLength"], "a" * (schema["maxLength"] + 1))
        yield from ("", " ", "0", "1Gi", "1.5Gi", "-1Gi", "1e3", "Auto", "a-b.c/d", "ä", "A_b")
    elif kind == "array":
        yield [None] * (schema["maxItems"] + 1)


def _is(kind: str, value: Any) -> bool:
    names = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    return type(value) is names[kind]


def test_the_parser_and_the_server_agree_at_every_boundary(api: Api) -> None:
    """One field of the minimal resource at a time; a verdict of one alone is listed."""
    disagreements, num_refused, num_accepted = [], 0, 0
    spec = root_schema()["properties"]["spec"]
    for path, schema in _leaves(spec, "spec"):
        for value in _edges(schema):
            obj = put(resource(), path, value)
            server, ours = api.create(obj, **STRICT), parser_accepts(obj)
            num_accepted, num_refused = num_accepted + server.ok, num_refused + (not server.ok)
            if server.ok is not ours:
                disagreements.append(f"{path} = {value!r:.60}: server {server.message or 'agrees'}")
    print(f"{num_accepted} accepted, {num_refused} refused")
    assert not disagreements, "\n".join(disagreements)
    assert min(num_accepted, num_refused) > 50


# --- what is printed -----------------------------------------------------------------------------
STATUS = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "BudgetMisfit",
            "message": "m",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
    "frontend": {"desired": 2, "ready": 1},
    "engine": {"desired": 3, "ready": 2},
}


def test_kubectl_get_says_in_one_line_whether_and_why_not(api: Api, namespace: str) -> None:
    obj = put(resource(), "metadata.namespace", namespace)
    api.apply(obj).must()
    api.apply({**obj, "spec": None, "status": STATUS}, "status-test", sub="status")
    api.request(
        "PATCH",
        api.path_of(obj, "status"),
        {"status": STATUS},
        "application/merge-patch+json",
    ).must()
    columns, rows = api.table("MultiModalInference", namespace)
    assert columns[:8] == ["Name", "Ready", "Reason", "Frontends", "Engines", "MM", "KV", "Age"]
    assert rows[0][:3] == ["qwen", "False", "BudgetMisfit"]


def test_kubectl_explain_has_words_for_every_field(api: Api) -> None:
    """From the server's own OpenAPI document, which is what `kubectl explain` reads."""
    body = api.request("GET", "/openapi/v3/apis/foveal.dev/v1alpha1").must()
    schemas = body["components"]["schemas"]
    (ours,) = [
        s for name, s in schemas.items() if re.search(r"v1alpha1\.MultiModalInference$", name)
    ]
    blank = [
        path
        for path, schema in _leaves(ours["properties"]["spec"], "spec")
        if not schema.get("description")
    ]
    assert blank == []
