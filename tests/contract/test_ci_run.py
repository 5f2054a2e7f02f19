"""What `.ci/run` says and how it ends: the targets, and what else it starts, are scripts here."""

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
    """A source tree in which every step passes: a target runs the script of its name in `steps`."""
    scripts = {
        "bin/apt-get": "", "bin/df": "echo Avail; echo 99999999999",
        "e2e/cluster/build.sh": "", "e2e/cluster/can.sh": "",
    }  # fmt: skip
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for name, body in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (tmp_path / "steps").mkdir()
    (tmp_path / "Makefile").write_text(".DEFAULT:\n\t@! [ -e steps/$@ ] || sh steps/$@\n")
    return tmp_path


def run(tree: Path, seconds: int = 0) -> subprocess.CompletedProcess[str]:
    """`seconds`: for how long it has run already, by bash's own count."""
    environment = {**os.environ, "PATH": f"{tree}/bin:{os.environ['PATH']}"}
    environment["XDG_CACHE_HOME"] = str(tree / "cache")
    return subprocess.run(
        [tree / ".ci/run"], env={**environment, "SECONDS": str(seconds)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


def test_what_steps_skip_is_named_at_the_end(tree: Path) -> None:
    (tree / "steps/chart").write_text('echo "make chart: no Helm 4" >>"$FOVEAL_NOT_RUN"\n')
    done = run(tree)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SKIPPED: make chart: no Helm 4"


@pytest.mark.parametrize(
    ("cached", "built", "gib", "lacks"),
    [
        (False, True, 14, 15),
        (True, False, 14, 15),
        (True, True, 14, None),  # regression: refused for what no step would write
        (True, True, 5, 6),
    ],
)
def test_disk_is_asked_for_what_is_still_missing(
    tree: Path, cached: bool, built: bool, gib: int, lacks: int | None
) -> None:
    (tree / "bin/df").write_text(f"#!/bin/sh\necho Avail; echo {gib * 1024 * 1024}\n")
    (tree / "e2e/cluster/build.sh").write_text(f"#!/bin/sh\nexit {0 if built else 1}\n")
    if cached:
        (tree / "cache/foveal-tests").mkdir(parents=True)
    done = run(tree)
    assert done.returncode == (1 if lacks else 0), done.stderr
    said = f"needs {lacks} GiB of free disk, found {gib} GiB\n" if lacks else ""
    assert done.stderr == said


def test_kernels_are_required(tree: Path) -> None:
    (tree / "steps/check").write_text('[ "$FOVEAL_REQUIRE_KERNELS" = 1 ]\n')
    assert run(tree).returncode == 0


@pytest.mark.parametrize("seconds", [0, LIMIT_SECONDS])
def test_a_failing_step_fails_the_run(tree: Path, seconds: int) -> None:
    """Regression: near the end of the run's time, it was named as cut off."""
    (tree / "steps/check").write_text("exit 2\n")
    done = run(tree, seconds)
    assert done.returncode == 2
    assert "NOT RUN" not in done.stdout


def test_a_step_that_the_end_cuts_off_is_named(tree: Path) -> None:
    (tree / "steps/check").write_text("sleep 120\n")
    done = run(tree, LIMIT_SECONDS - 3)
    assert done.returncode == 0, done.stderr
    assert "NOT RUN: make check: cut off" in done.stdout


def test_tests_on_a_node_end_before_the_run_does(tree: Path) -> None:
    """Regression: time ran out inside of make, whose own exit code is 2, and the run failed."""
    (tree / "steps/cluster").write_text('echo "until=$((FOVEAL_E2E_UNTIL - $(date +%s)))"\n')
    done = run(tree, LIMIT_SECONDS - 20 * 60)
    assert done.returncode == 0, done.stderr
    until = next(line for line in done.stdout.splitlines() if line.startswith("until="))
    assert 13 * 60 <= int(until.removeprefix("until=")) <= 15 * 60


def test_no_test_on_a_node_begins_after_the_time(tmp_path: Path) -> None:
    named = tmp_path / "named"
    environment = {**os.environ, "FOVEAL_E2E_UNTIL": "1", "FOVEAL_NOT_RUN": str(named)}
    tests = ["-m", "cluster", "tests/cluster/test_chart.py"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", *tests],
        cwd=ROOT, env=environment, timeout=120, check=True, capture_output=True,
    )  # fmt: skip
    (line,) = named.read_text().splitlines()
    assert line.endswith("tests: no time was left for it on a node")


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
