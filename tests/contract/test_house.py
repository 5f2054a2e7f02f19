"""The house keeps its shape: layout, import weight, and what must never be in a process."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST_NAMES = ("test_", "conftest")


def test_operator_folder_is_no_package():
    """operator/__init__.py would shadow the standard library's `operator` and break Python."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_tests_hold_no_packages():
    """importlib mode: an __init__.py in tests/ makes equal file names collide."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def _modules_after(import_line: str) -> set[str]:
    code = f"{import_line}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    return {name.split(".")[0] for name in json.loads(out.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    "module",
    [
        "foveal_runtime.plan.config",
        "foveal_runtime.mirror.messages",
        "foveal_runtime.engine.types.step",
        "foveal_operator",
        "foveal_runtime.main.local.serve",  # its refusals come at once
    ],
)
def test_light_rooms_load_no_torch(module):
    loaded = _modules_after(f"import {module}")
    assert not loaded & {"torch", "transformers", "numpy"}


def test_plan_loads_only_the_standard_library_and_msgspec():
    import pkgutil

    import foveal_runtime.plan as plan

    names = [f"foveal_runtime.plan.{m.name}" for m in pkgutil.iter_modules(plan.__path__)]
    before = _modules_after("import msgspec")
    loaded = _modules_after("import msgspec, " + ", ".join(names)) - before
    assert not loaded - set(sys.stdlib_module_names) - {"foveal_runtime"}


def test_no_pickle_or_eval_in_the_sources():
    bad = ("import pickle", "pickle.loads", "yaml.load(", " eval(", "broadcast_object_list")
    hits = [
        f"{path.relative_to(ROOT)}: {word}"
        for room in ("operator/src", "runtime/src")
        for path in (ROOT / room).rglob("*.py")
        for word in bad
        if word in path.read_text()
    ]
    assert not hits


def _sources() -> list[Path]:
    return [p for room in ("operator/src", "runtime/src") for p in (ROOT / room).rglob("*.py")]


def _test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def test_test_files_hold_one_idea():
    """Past this size a test file is split by what its tests are about."""
    assert not [p.name for p in _test_files() if len(p.read_text().splitlines()) > 450]


def test_no_test_module_is_imported():
    """Helpers live in tests/support, so a test module can be moved or split without harm."""
    hits = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*_test_files(), *(ROOT / "e2e").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported_modules(node)
        if name.startswith("tests.")
        and any(part.startswith(TEST_NAMES) for part in name.split("."))
    ]
    assert not hits


def _imported_modules(node: ast.AST) -> list[str]:
    """Modules of an import statement, each name of `from package import name` with its package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def test_files_are_one_noun_and_functions_fit_a_screen():
    """Not a style limit: past these sizes a file holds two ideas, a function two steps."""
    long_files = [p.name for p in _sources() if len(p.read_text().splitlines()) > 450]
    long_functions = [
        f"{path.name}:{node.name}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 70
    ]
    assert not long_files
    assert not long_functions


def test_what_programs_and_tests_import_of_ours_is_there():
    """Nothing starts the GPU bench or imports a slow test's helpers before they are needed."""
    folders = {"foveal_runtime": "runtime/src", "foveal_operator": "operator/src"}
    missing = []
    for path in (*(ROOT / "e2e").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            room = (
                node.module.split(".")[0]
                if isinstance(node, ast.ImportFrom) and node.module
                else ""
            )
            if room not in (*folders, "e2e", "tests") or node.level:
                continue
            target = ROOT / folders.get(room, "") / node.module.replace(".", "/")
            names = _names(target / "__init__.py" if target.is_dir() else target.with_suffix(".py"))
            missing += [
                f"{path.relative_to(ROOT)}: {alias.name} of {node.module}"
                for alias in node.names
                if alias.name not in names
                and not (target / alias.name).is_dir()
                and not (target / f"{alias.name}.py").is_file()
            ]
    assert not missing, missing


@cache
def _names(path: Path) -> set[str]:
    """What a module binds, at any depth of it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names
