"""The documents that messages point to have the headings that they point to."""

from __future__ import annotations

from pathlib import Path

from foveal_operator.api import reasons
from tests.support import api_page, regenerate

DOCS = Path(__file__).parents[2] / "docs"


def test_every_reason_has_its_heading() -> None:
    text = (DOCS / "reference" / "reasons.md").read_text(encoding="utf-8")
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert headings == [reason.name for reason in reasons.ALL]
    for reason in reasons.ALL:
        assert reason.action in text


def test_every_misfit_is_in_the_budgets_page() -> None:
    text = (DOCS / "reference" / "budgets.md").read_text(encoding="utf-8")
    source = Path(__file__).parents[2] / "runtime/src/foveal_runtime/plan/budget"
    for file in ("planner.py", "needs.py"):
        for line in (source / file).read_text(encoding="utf-8").splitlines():
            if line.strip().startswith('reason="'):
                assert line.split('"')[1] in text


def test_the_page_of_the_resource_is_what_is_generated() -> None:
    assert regenerate.API_PAGE.read_text(encoding="utf-8") == api_page.text(), "run: make generate"


def test_the_page_of_the_resource_tells_every_field() -> None:
    text = api_page.text()
    for part in ("| `cache.size` |", "## spec.caches", "| `ipc.size` |",
                 "`FreeFirst`", "caches.ipc.size must be below engine.hostMemory"):  # fmt: skip
        assert part in text
    assert "|  |\n" not in text.partition("## status")[0], "a field of the spec without meaning"
