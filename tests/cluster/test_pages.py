"""README's cluster quick start, word for word; conftest runs it before anything is installed.

The chart stays: what comes after it upgrades the release.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.node import commands

pytestmark = pytest.mark.cluster


def readme_commands() -> list[str]:
    """The commands of README's block `sh cluster`, each with its continued lines."""
    text = (commands.REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh cluster\n(.*?)^```", text, re.M | re.S)
    assert block, "README has no block that opens with ```sh cluster"
    return re.findall(r"(?:[^\n]*\\\n)*[^\n]+\n", block[1])


def test_quick_start(cluster: None, tmp_path: Path) -> None:
    script = readme_commands()
    assert len(script) <= 5
    timed = "".join(f'{command}echo "=== $SECONDS s" >&2\n' for command in script)
    started = time.monotonic()
    log = tmp_path / "log"
    try:
        with log.open("w") as output:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", timed],
                env={**commands.environment(), "REGISTRY": commands.REGISTRY},
                cwd=commands.REPOSITORY,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            shell.wait(600)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)  # the port-forward
        said = log.read_text(encoding="utf-8")
        print(f"\n{said}{len(script)} commands: {time.monotonic() - started:.0f} s")
        assert shell.returncode == 0, said
        assert re.search(r'"content": ?"[^"]*7', said), said
        assert re.search(r"^foveal_cache_queries_total\{.*\} [1-9]", said, re.M), said
    finally:
        commands.kubectl("delete", "mmi", "tiny", "--ignore-not-found", "--timeout=60s")
