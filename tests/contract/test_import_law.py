"""The layers contracts hold in every source folder, shown by imports that break them."""

import ast
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTER = ROOT / "tests" / "support" / "plant_imports.py"
SOURCES = ("operator/src", "runtime/src")


@pytest.mark.extended
def test_an_upward_import_breaks_a_contract_in_every_folder(tmp_path):
    """24 files stood in no layer, and an import of `main` planted in one passed all contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in SOURCES:
        shutil.copytree(
            ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("*.egg-info", "*.so")
        )
    found = subprocess.run(
        [sys.executable, PLANTER, tmp_path], capture_output=True, text=True, check=True, timeout=100
    )
    untouched, *planted = json.loads(found.stdout.splitlines()[-1])
    assert untouched == ["", "", "", False]
    assert [plant for plant in planted if not plant[3]] == []
    folders = {
        str(file.parent.relative_to(ROOT))
        for source in SOURCES
        for file in (ROOT / source).rglob("*.py")
    }
    top = ("operator/src/foveal_operator/testing", "runtime/src/foveal_runtime/main")
    unplanted = folders - {plant[0] for plant in planted}
    assert unplanted >= set(top)
    assert all(folder.startswith(top) for folder in unplanted), "nothing may import these at all"


def test_a_public_name_means_one_class_in_a_distribution():
    """Two classes were called Request, two Job, two EventStream: a reader took one for another."""
    for source in SOURCES:
        files = [file for file in (ROOT / source).rglob("*.py") if "testing" not in file.parts]
        bodies = [ast.parse(file.read_text(encoding="utf-8")).body for file in files]
        classes = Counter(
            node.name for body in bodies for node in body if isinstance(node, ast.ClassDef)
        )
        twice = [name for name, num in classes.items() if num > 1 and not name.startswith("_")]
        assert twice == []


def test_obj_is_defined_once():
    files = [file for source in SOURCES for file in (ROOT / source).rglob("*.py")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert sum(line.startswith("Obj = ") for line in lines) == 1
