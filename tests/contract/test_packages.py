"""Published packages that tests read: what cannot be had is skipped, what is another one fails."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.support import packages

INFO = "one-1.0.dist-info"


def pinned(folder: Path, digest: str) -> Path:
    file = folder / "pinned.txt"
    file.write_text(f"--no-index\n--find-links {folder}\none==1.0 --hash=sha256:{digest}\n")
    return file


def test_another_hash_is_no_reason_to_skip(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("one.py", "")
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    packages.install(pinned(tmp_path, digest), tmp_path / "out")
    assert (tmp_path / "out/one.py").exists()
    with pytest.raises(packages.Mismatch, match=digest):
        packages.install(pinned(tmp_path, "0" * 64), tmp_path / "other")


def test_a_package_that_nobody_has_is(tmp_path: Path) -> None:
    with pytest.raises(packages.Unavailable, match=r"pinned.txt cannot be had"):
        packages.install(pinned(tmp_path, "0" * 64), tmp_path / "out")
