"""A page's commands on the node: its blocks `sh cluster`, as they are written, in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.support.markdown import runnables
from tests.support.node import commands


def commands_of(page: str) -> list[str]:
    """Those of the page's blocks `sh cluster`, each with its continued lines."""
    found = "".join(b.script for b in runnables(commands.REPOSITORY / page, "cluster"))
    assert found, f"{page} has no block that opens with ```sh cluster"
    return re.findall(r"(?:[^\n]*\\\n)*[^\n]+\n", found)


def follow(page: str, folder: Path, seconds: float = 600, **variables: str) -> str:
    """Runs the page's commands in one shell, in a clone that holds what pages read; what they print
    is returned. Fails at the first command that fails, with everything printed until then."""
    for name in ("charts", "examples"):
        (folder / name).symlink_to(commands.REPOSITORY / name)
    script = commands_of(page)
    timed = "".join(f'{command}echo "=== $SECONDS s" >&2\n' for command in script)
    environment = commands.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"REGISTRY": commands.REGISTRY, "COLUMNS": "100", "NO_COLOR": "1"}
    environment |= variables
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
