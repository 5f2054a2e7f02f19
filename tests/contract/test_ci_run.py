"""What `.ci/run` says and how it ends: `make` and what else it starts are scripts here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 82 * 60


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree in which every step passes; `make` runs the file named like its target."""
    scripts = {
        "bin/apt-get": "", "bin/df": "echo Avail; echo 99999999999",
        "bin/make": 'if [ -e "$2" ]; then . "./$2"; fi',
        "e2e/cluster/build.sh": "", "e2e/cluster/can.sh": "",
    }  # fmt: skip
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for name, body in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (tmp_path / "Makefile").write_text("hostile:\n")
    return tmp_path


def run(tree: Path, seconds: int = 0) -> subprocess.CompletedProcess[str]:
    """`seconds`: for how long it has run already, by bash's own count."""
    environment = {**os.environ, "PATH": f"{tree}/bin:{os.environ['PATH']}"}
    return subprocess.run(
        [tree / ".ci/run"], env={**environment, "SECONDS": str(seconds)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


def test_what_steps_skip_is_named_at_the_end(tree: Path) -> None:
    (tree / "chart").write_text('echo "make chart: no Helm 4" >>"$FOVEAL_NOT_RUN"\n')
    done = run(tree)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SKIPPED: make chart: no Helm 4"


def test_kernels_are_required(tree: Path) -> None:
    (tree / "check").write_text('[ "$FOVEAL_REQUIRE_KERNELS" = 1 ]\n')
    assert run(tree).returncode == 0


@pytest.mark.parametrize("seconds", [0, LIMIT_SECONDS])
def test_a_failing_step_fails_the_run(tree: Path, seconds: int) -> None:
    """Regression: near the end of the run's time, it was named as cut off."""
    (tree / "check").write_text("exit 2\n")
    done = run(tree, seconds)
    assert done.returncode == 2
    assert "NOT RUN" not in done.stdout


def test_a_step_that_the_end_cuts_off_is_named(tree: Path) -> None:
    (tree / "check").write_text("exit 124\n")
    done = run(tree, LIMIT_SECONDS)
    assert done.returncode == 0
    assert "NOT RUN: make check: cut off" in done.stdout
    assert run(tree).returncode == 124, "it hung"


def test_skipped_tests_are_named_by_their_reasons(tmp_path: Path) -> None:
    test = tmp_path / "test_one.py"
    test.write_text(
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='no promtool')\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_a(n): pass\n"
        "def test_b(): pytest.skip('no Go')\n"
        "def test_c(): pass\n"
    )
    for workers in ("0", "2"):
        named = tmp_path / f"named-{workers}"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-n", workers, test],
            cwd=ROOT, env={**os.environ, "FOVEAL_NOT_RUN": str(named)}, timeout=120, check=True,
        )  # fmt: skip
        assert sorted(named.read_text().splitlines()) == ["1 tests: no Go", "2 tests: no promtool"]
