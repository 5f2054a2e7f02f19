"""The documents that messages point to have the headings that they point to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from foveal_operator.api import reasons
from tests.support import api_page, regenerate, restart_table, values_table

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


def test_the_kubernetes_version_is_stated_once() -> None:
    """README said 1.35, the chart's README 1.34."""
    chart = yaml.safe_load((DOCS.parent / "charts/foveal/Chart.yaml").read_text(encoding="utf-8"))
    least = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    pages = [DOCS.parent / "README.md", DOCS.parent / "charts/foveal/README.md"]
    pages += [page for part in ("get-started", "how-to") for page in (DOCS / part).glob("*.md")]
    for page in pages:
        assert not re.search(r"Kubernetes 1\.\d+ or newer", page.read_text(encoding="utf-8")), page
    stated = (DOCS / "reference/versions.md").read_text(encoding="utf-8")
    assert f"Kubernetes {least} or newer" in stated
