"""The C kernels are built, all of them, of the sources that are here.

Tests of a kernel are skipped where it is missing, these are not.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from foveal_runtime.model.cpu import kernels

RUNTIME = Path(__file__).parents[2] / "runtime"
LOADERS = (
    kernels.load_kernel, kernels.load_prefill_kernel, kernels.load_row_kernels,
    kernels.load_decoder_kernel, kernels.load_recurrent_kernels,
)  # fmt: skip
COMPILED = pytest.mark.skipif(
    not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc"))
    and os.environ.get("FOVEAL_REQUIRE_KERNELS") != "1",
    reason="no C compiler here: Foveal computes without kernels",
)


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> list[setuptools.Extension]:
    """Those that setup.py names for this architecture."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(RUNTIME / "setup.py"))
    return list(given["ext_modules"])


@COMPILED
def test_every_kernel_is_as_new_as_its_sources(extensions: list[setuptools.Extension]) -> None:
    assert len(extensions) >= len(LOADERS)
    bad = []
    for extension in extensions:
        library = RUNTIME / "src" / (extension.name.replace(".", "/") + ".so")
        sources = [RUNTIME / name for name in (*extension.sources, *extension.depends)]
        if not library.exists():
            bad.append(f"{library.name} is missing")
        elif library.stat().st_mtime < max(path.stat().st_mtime for path in sources):
            bad.append(f"{library.name} is older than its sources")
    assert not bad, "run `make setup`; FOVEAL_REQUIRE_KERNELS=1 shows what the compiler says"


@COMPILED
@pytest.mark.parametrize("load", LOADERS)
def test_every_kernel_can_be_loaded(load: Any) -> None:
    loaded = load()
    assert not isinstance(loaded, str), loaded


def test_a_kernel_that_does_not_compile_leaves_no_older_one(
    extensions: list[setuptools.Extension], tmp_path: Path
) -> None:
    """As `make setup` builds. Where kernels are required, that is an error instead."""
    compiler = tmp_path / "compiler.py"
    compiler.write_text(
        "import pathlib, sys\n"
        "if any(word.endswith('rows.c') for word in sys.argv): sys.exit('rows.c: error')\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('new')\n"
    )
    folder = tmp_path / "src/foveal_runtime/model/cpu/kernels"
    folder.mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(RUNTIME / name, tmp_path)
    libraries = [folder / f"{one.name.rpartition('.')[2]}.so" for one in extensions]
    for library in libraries:
        library.write_text("old")

    def build(required: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", "from setuptools import build_meta as b; b.build_editable('.')"],
            cwd=tmp_path, timeout=120, check=False, capture_output=True,
            env={**os.environ, "CC": f"{sys.executable} {compiler}",
                 "FOVEAL_REQUIRE_KERNELS": required},
        ).returncode  # fmt: skip

    assert build(required="1") != 0
    assert build(required="") == 0
    for library in libraries:
        if library.name.startswith("rows_"):
            assert not library.exists(), library.name
        else:
            assert library.read_text() == "new", library.name
