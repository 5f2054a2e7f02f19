"""The documents that messages point to have the headings that they point to."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, cast

import yaml

from foveal_operator.api import crd, reasons
from foveal_operator.observability import promql
from foveal_runtime.frontend.http.app import build_app
from foveal_runtime.frontend.protocol.openai_responses import ResponsesRequest
from foveal_runtime.frontend.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from foveal_runtime.frontend.protocol.transcription import TranscriptionRequest
from foveal_runtime.frontend.testing.fake import FakeGenerator, FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, byte_tokenizer
from foveal_runtime.main.local.options import add_options
from foveal_runtime.plan import errors
from foveal_runtime.plan.config import FrontendConfig, InjectionConfig, ModelConfig
from foveal_runtime.plan.metrics import METRICS
from tests.support import api_page, api_server_rules, regenerate, restart_table, values_table
from tests.support.markdown import pages, split

DOCS = Path(__file__).parents[2] / "docs"


def test_every_reason_has_its_heading() -> None:
    text = (DOCS / "reference" / "reasons.md").read_text(encoding="utf-8")
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert headings == [reason.name for reason in reasons.ALL]
    for reason in reasons.ALL:
        assert reason.action in text


def test_troubleshooting_names_each_reason_that_asks_for_something() -> None:
    """Once, with its link and the action that the operator's message gives."""
    text = (DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    named = {row.split("]")[0][3:]: row for row in rows}
    assert len(named) == len(rows)
    # A pod in a queue asks for nothing, and looks like one that cannot be scheduled.
    wanted = {reason.name for reason in reasons.ALL if reason.action} | {reasons.QUEUED.name}
    assert named.keys() == wanted
    for reason in reasons.ALL:
        if reason.name in named:
            assert f"(../reference/reasons.md#{reason.name.lower()})" in named[reason.name]
            assert reason.action in named[reason.name]


def test_every_misfit_is_in_the_budgets_page() -> None:
    text = (DOCS / "reference" / "budgets.md").read_text(encoding="utf-8")
    source = Path(__file__).parents[2] / "runtime/src/foveal_runtime/plan/budget"
    for file in ("planner.py", "needs.py"):
        for line in (source / file).read_text(encoding="utf-8").splitlines():
            if line.strip().startswith('reason="'):
                assert line.split('"')[1] in text


def test_the_page_of_the_resource_is_what_is_generated() -> None:
    assert regenerate.API_PAGE.read_text(encoding="utf-8") == api_page.text(), "run: make generate"


def test_the_page_of_restarts_is_what_the_manifests_say() -> None:
    """A new field, or a pod template that has come to depend on one, fails here."""
    assert restart_table.PAGE.read_text(encoding="utf-8") == restart_table.page(), (
        "run: make generate"
    )


def test_what_concerns_no_engine_restarts_none() -> None:
    """Regression: the deadline stood in the engines' startup probe, the name that clients use in
    their document, and the revision of the frontends' Secrets on their pods."""
    for field in ("rollout.progressDeadlineSeconds", "model.name", "security.secretRevision"):
        assert restart_table.effect(f"spec.{field}").restarts.get("engines") != "", field
    assert restart_table.effect("spec.rollout.progressDeadlineSeconds").restarts == {}
    assert "engines" not in restart_table.effect("spec.model.name").restarts


def test_the_page_of_the_charts_values_is_what_is_generated() -> None:
    assert values_table.PAGE.read_text(encoding="utf-8") == values_table.page(), (
        "run: make generate"
    )


def test_the_page_of_the_charts_values_has_every_value_of_the_schema() -> None:
    """Written by hand, the chart's table had seven of them."""
    text = (values_table.VALUES.parent / "values.schema.json").read_text(encoding="utf-8")
    known = {
        path.split(".")[0] for path, _, _ in values_table.rows(values_table.VALUES.read_text())
    }
    assert known == json.loads(text)["properties"].keys() - {"global"}


def test_the_page_of_the_resource_tells_every_field() -> None:
    text = api_page.text()
    for part in ("| `cache.size` |", "## spec.caches", "| `ipc.size` |",
                 "`FreeFirst`", "caches.ipc.size must be below engine.hostMemory"):  # fmt: skip
        assert part in text
    assert "|  |\n" not in text.partition("## status")[0], "a field of the spec without meaning"


def test_the_page_of_the_http_api_has_every_route(tmp_path: Path) -> None:
    """It lacked /version and the quarantine's."""
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "key").write_text("k\n")
    processor = FakeInputProcessor({})
    app = build_app(
        FrontendConfig(
            model=ModelConfig(path=str(tmp_path)),
            admin_key_file=str(tmp_path / "key"),
            injection=InjectionConfig(enabled=True, api_key_file=str(tmp_path / "key")),
        ),
        processor=processor,
        info=processor,
        generator=FakeGenerator(lambda _: [], EOS),
        admin=cast(Any, object()),
        injector=cast(Any, object()),
        mirrors=lambda: {},
    )
    app.close()
    served = {
        f"{method} {_nameless(path)}"
        for path, methods in app.api.openapi()["paths"].items()
        for method in map(str.upper, methods)
    }
    text = (DOCS / "reference" / "http-api.md").read_text(encoding="utf-8")
    listed = set()
    for row in text.partition("An engine has a small HTTP port")[0].splitlines():
        method = ""
        for found in re.finditer(r"`(?:(GET|POST) )?(/[^ `]*)`", row.split(" | ")[0]):
            method = found[1] or method
            listed.add(f"{method} {_nameless(found[2])}")
    unlisted = {"GET /"}  # what is no API is not in the schema
    assert listed - {" /docs", " /openapi.json"} == served | unlisted


def _nameless(path: str) -> str:
    return re.sub(r"{.*?}", "{}", path)


def test_the_pages_name_every_field_of_a_request() -> None:
    """`add_special_tokens` was in none, and the page says that what it does not list is refused."""
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    models = [ChatCompletionRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest,
              TranscriptionRequest, ResponsesRequest]  # fmt: skip
    fields = {name for model in models for name in model.model_fields}
    assert [name for name in sorted(fields) if not re.search(rf"\b{name}\b", text)] == []


def test_the_page_of_the_http_api_has_every_error_code() -> None:
    """It lacked those of slow uploads and of the quarantine."""
    text = (DOCS / "reference" / "http-api.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \d\d\d", line)]
    listed = {
        (int(status), code)
        for row in rows
        for status in re.findall(r"\d\d\d", row.split(" | ")[0])
        for code in re.findall(r"`([a-z_]+)`", row)
    }
    raised = {
        (error.status, error.code)
        for error in errors._leaves(errors.FovealError).values()
        if not issubclass(error, errors.StartupError)
    }
    assert raised <= listed


def test_options_and_fields_beside_vllms_exist() -> None:
    text = (DOCS / "reference" / "serve-options.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.count(" | ") == 2]
    assert len(rows) > 30
    parser = argparse.ArgumentParser()
    add_options(parser)
    flags = {flag for _, own, _ in rows for flag in re.findall(r"`(--[a-z-]+)", own)}
    assert flags <= set(parser._option_string_actions)
    fields = {name for *_, cell in rows for name in re.findall(r"`(\w+\.[\w.]+)`", cell)}
    root = yaml.safe_load(crd.render())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert fields
    for name in fields:
        found = root["properties"]["spec"]
        for part in name.split("."):
            assert part in found["properties"], name
            found = found["properties"][part]


def test_the_scrape_jobs_of_the_page_do_what_podmonitors_do() -> None:
    blocks = split((DOCS / "how-to" / "observability.md").read_text(encoding="utf-8"))[1]
    [text] = [block.text for block in blocks if "scrape_configs:" in block.text]
    job, operator = yaml.safe_load(text)["scrape_configs"]
    rules = {rule.get("target_label"): rule["source_labels"] for rule in job["relabel_configs"]}
    assert rules.keys() - {None} == promql.TARGET_LABELS
    golden = DOCS.parent / "tests/control_plane/golden/gpu.yaml"
    objects = yaml.safe_load_all(golden.read_text(encoding="utf-8"))
    [monitor] = [one for one in objects if one["kind"] == "PodMonitor"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    for rule in endpoint["relabelings"]:
        assert rules[rule["targetLabel"]] == rule["sourceLabels"]
    chart = (DOCS.parent / "charts/foveal/templates/podmonitor.yaml").read_text(encoding="utf-8")
    assert ("honorLabels: true" in chart, operator["honor_labels"]) == (True, True)
    found = {rule.get("target_label") for rule in operator["relabel_configs"]} - {None}
    assert found == {"namespace", "pod"}


def test_resources_on_pages_fit_the_schema() -> None:
    """Whole ones, and parts of a spec or of a field of it."""
    seen = 0
    for page in pages():
        for block in split(page.read_text(encoding="utf-8"))[1]:
            if block.info != "yaml":
                continue
            for found in yaml.safe_load_all(block.text):
                part = found.get("spec", found)
                if found.get("kind", "MultiModalInference") != "MultiModalInference":
                    continue
                if not part.keys() & {"networking", "frontend", "engine", "model"}:
                    continue
                seen += 1
                spec = {"model": {"uri": "pvc://models/qwen"}, **part}
                sample = {"apiVersion": "foveal.dev/v1alpha1", "kind": "MultiModalInference",
                          "metadata": {"name": "qwen"}, "spec": spec}  # fmt: skip
                assert api_server_rules.problems(sample) == [], f"{page}:{block.line}"
    assert seen >= 6


def test_the_page_of_keys_creates_the_examples_secrets() -> None:
    text = (DOCS / "how-to" / "keys.md").read_text(encoding="utf-8")
    spec = yaml.safe_load((DOCS.parent / "examples/mmi-gpu.yaml").read_text())["spec"]
    keys = spec["security"]["apiKeySecretRef"]
    for name, data in ((spec["model"]["secretRef"]["name"], "HF_TOKEN"), keys.values()):
        found = rf"create secret generic {name} -n models --from-(?:file|literal)={data}="
        assert re.search(found, text), name


def test_counters_are_named_as_they_are_exported() -> None:
    """Several pages left out the suffix, and a query by such a name finds nothing."""
    counters = {metric.name for metric in METRICS if metric.kind == "counter"}
    for page in pages():
        prose = split(page.read_text(encoding="utf-8"))[0]
        wrong = counters & set(re.findall(r"(?:foveal_|vllm:)\w+", prose))
        assert not wrong, f"{page}: {sorted(wrong)} end with _total"


def test_the_kubernetes_version_is_stated_once() -> None:
    """README said 1.35, the chart's README 1.34."""
    chart = yaml.safe_load((DOCS.parent / "charts/foveal/Chart.yaml").read_text(encoding="utf-8"))
    least = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    named = [DOCS.parent / "README.md", DOCS.parent / "charts/foveal/README.md"]
    named += [page for part in ("get-started", "how-to") for page in (DOCS / part).glob("*.md")]
    for page in named:
        assert not re.search(r"Kubernetes 1\.\d+ or newer", page.read_text(encoding="utf-8")), page
    stated = (DOCS / "reference/versions.md").read_text(encoding="utf-8")
    assert f"Kubernetes {least} or newer" in stated
