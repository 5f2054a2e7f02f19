"""Commands of README, quick start and chart page, word for word and in order; conftest runs them
before anything is installed.

The chart stays: what comes after it upgrades the release.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.node import commands
from tests.support.node.pages import commands_of, follow

pytestmark = pytest.mark.cluster


def test_readme(cluster: None, tmp_path: Path) -> None:
    assert len(commands_of("README.md")) <= 5
    try:
        said = follow("README.md", tmp_path)
        assert re.search(r'"content": ?"[^"]*7', said), said
        assert re.search(r"^foveal_cache_queries_total\{.*\} [1-9]", said, re.M), said
    finally:
        commands.kubectl("delete", "mmi", "tiny", "--ignore-not-found", "--timeout=60s")


def test_quick_start(cluster: None, tmp_path: Path) -> None:
    """With the chart of README, in a namespace that the page makes."""
    try:
        said = follow("docs/get-started/quick-start.md", tmp_path)
        assert re.search(r"^\+ .*Deployment", said, re.M), "plan --server names what it would make"
        assert '"id":"tiny-vlm"' in said.replace(" ", ""), said
        assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")[:500]
    finally:
        commands.kubectl("delete", "namespace", "models", "--ignore-not-found", "--timeout=120s")


def test_chart_page(cluster: None, tmp_path: Path) -> None:
    """Installed again after an uninstall that kept the definition, as the page says it does."""
    commands.run("helm", "uninstall", "foveal", "-n", "foveal-system", "--wait", seconds=120)
    assert "multimodalinferences.foveal.dev" in commands.kubectl("get", "crd", "-o", "name")
    said = follow("charts/foveal/README.md", tmp_path)
    assert re.search(r"Phase: +Succeeded", said), said
