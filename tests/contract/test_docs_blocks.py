"""Shell blocks of the documentation that are marked `sh run` do what the page says.

They run in the repository's folder with an empty folder of their own as HOME and TMPDIR, and a free
port as PORT. What a block starts in the background ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foveal_runtime.plan.local import free_port
from tests.support.markdown import ROOT, Runnable, matches, pages, runnables

ALL = [block for page in pages() for block in runnables(page)]
FAST_SECONDS, SLOW_SECONDS = 90, 420


def _parameters() -> list[object]:
    return [
        pytest.param(
            block,
            id=block.where,
            marks=[pytest.mark.timeout(SLOW_SECONDS + 60), *([pytest.mark.slow] * block.is_slow)],
        )
        for block in ALL
    ]


@pytest.mark.parametrize("block", _parameters())
def test_a_block_does_what_the_page_says(block: Runnable, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path), "PORT": str(free_port()), "COLUMNS": "100", "NO_COLOR": "1",
        "KUBECONFIG": str(tmp_path / "none"), "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block.script], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SLOW_SECONDS if block.is_slow else FAST_SECONDS)
    finally:
        _end_group(process)
    assert process.returncode == 0, f"{block.where}\n{out}\n{err}"
    if block.output is not None:
        assert matches(block.output, out), f"{block.where} printed:\n{out}"


def _end_group(process: subprocess.Popen[str]) -> None:
    """The block and whatever it left running; the group is ours alone."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    process.communicate()


def test_blocks_are_found() -> None:
    assert any(not block.is_slow and block.output for block in ALL)
    assert len({block.where.split(":")[0] for block in ALL}) >= 3
