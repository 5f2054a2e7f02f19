"""Commands of README, quick start and chart page, word for word and in order; conftest runs them
before anything is installed.

The chart stays: what comes after it upgrades the release.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.markdown import runnables
from tests.support.node import commands

pytestmark = pytest.mark.cluster


def commands_of(page: str) -> list[str]:
    """Those of the page's blocks `sh cluster`, each with its continued lines."""
    found = "".join(b.script for b in runnables(commands.REPOSITORY / page, "cluster"))
    assert found, f"{page} has no block that opens with ```sh cluster"
    return re.findall(r"(?:[^\n]*\\\n)*[^\n]+\n", found)


def follow(page: str, folder: Path, seconds: float = 600) -> str:
    """Runs the page's commands in one shell, in a clone that holds what pages read; what they print
    is returned. Fails at the first command that fails, with everything printed until then."""
    for name in ("charts", "examples"):
        (folder / name).symlink_to(commands.REPOSITORY / name)
    script = commands_of(page)
    timed = "".join(f'{command}echo "=== $SECONDS s" >&2\n' for command in script)
    environment = commands.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"REGISTRY": commands.REGISTRY, "COLUMNS": "100", "NO_COLOR": "1"}
    started = time.monotonic()
    log = folder / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", timed], env=environment, cwd=folder,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        shell.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)  # the port-forward
        said = log.read_text(encoding="utf-8")
        print(f"\n{said}{page}: {len(script)} commands: {time.monotonic() - started:.0f} s")
    assert shell.returncode == 0, f"{page}\n{said}"
    return said


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
