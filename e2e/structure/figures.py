"""Figures of the source tree: sizes, imports and names, counted the same way each time.

`python e2e/structure/figures.py [CHECKOUT]` prints a Markdown table. Counts every Python and C file
of the two distributions that is neither generated nor below `testing/`. What a request or a
reconcile enters is not counted here: `entered.py` traces a real one.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

SOURCES = ("operator/src/foveal_operator", "runtime/src/foveal_runtime")


def files(root: Path, source: str) -> list[Path]:
    """Product files: no test doubles, nothing generated."""
    found = [p for end in ("py", "c", "h") for p in (root / source).rglob(f"*.{end}")]
    return sorted(p for p in found if "testing" not in p.parts and "Generated" not in _head(p))


def _head(path: Path) -> str:
    return path.read_text(encoding="utf-8")[:200]


def num_lines(root: Path) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for source in SOURCES
        for path in files(root, source)
    )


def most_entries(root: Path) -> tuple[int, str]:
    """Entries of the fullest source folder but manifests/, where a file is a kind."""
    folders = [p for s in SOURCES for p in [root / s, *(root / s).rglob("*")] if p.is_dir()]
    counts = [
        (
            sum(
                e.name not in ("__pycache__", "py.typed") and e.suffix != ".so" for e in p.iterdir()
            ),
            p,
        )
        for p in folders
        if p.name not in ("manifests", "__pycache__")
    ]
    count, folder = max(counts)
    return count, str(folder.relative_to(root))


def imports(root: Path) -> dict[str, set[str]]:
    """Module → the modules of ours that it imports, testing/ left out."""
    modules = {
        ".".join(p.relative_to((root / s).parent).with_suffix("").parts): p
        for s in SOURCES
        for p in files(root, s)
        if p.suffix == ".py"
    }
    names = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            wanted: list[str] = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [one if one in names else str(node.module) for one in wanted]
            found[name] |= {one for one in wanted if one in names and one != name}
    return found


def single_importers(root: Path) -> int:
    """Modules, packages' __init__ left out, that exactly one other imports."""
    graph = imports(root)
    packages = {name.rpartition(".")[0] for name in graph}
    counts = Counter(one for wanted in graph.values() for one in wanted)
    return sum(count == 1 and name not in packages for name, count in counts.items())


def class_pairs(root: Path) -> dict[str, list[str]]:
    """Names that two public classes of one distribution have."""
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        seen: dict[str, list[str]] = {}
        for path in files(root, source):
            if path.suffix == ".py":
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        place = path.relative_to(root / source).with_suffix("")
                        seen.setdefault(node.name, []).append(".".join(place.parts))
        found |= {name: places for name, places in seen.items() if len(places) > 1}
    return found


def obj_definitions(root: Path) -> int:
    return sum(
        line.startswith("Obj = ")
        for source in SOURCES
        for path in (root / source).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def outside_layers(root: Path) -> int:
    """Files that no exhaustive layers contract covers below its distribution's own."""
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    covered: dict[str, set[str]] = {}
    for contract in config["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers":
            (container,) = contract.get("containers", [""])
            named = " | ".join(contract["layers"]).replace("|", " ").split()
            prefix = f"{container}." if container else ""
            covered.setdefault(container, set()).update(f"{prefix}{name}" for name in named)
    layers = {
        name.replace("(", "").replace(")", "") for names in covered.values() for name in names
    }
    inner = {"foveal_runtime.frontend", "foveal_runtime.engine", "foveal_runtime.model"}
    count = 0
    for source in SOURCES:
        for path in (root / source).rglob("*.py"):
            name = ".".join(path.relative_to((root / source).parent).with_suffix("").parts)
            parts = name.split(".")
            room = ".".join(parts[:2])
            deep = (
                [one for one in layers if one.startswith(f"{room}.")] if room in inner else layers
            )
            ok = any(name == one or name.startswith(f"{one}.") for one in (deep or ()))
            count += not ok and path.name not in ("__init__.py", "__main__.py")
    return count


def main(root: Path) -> None:
    count, folder = most_entries(root)
    pairs = class_pairs(root)
    print("| figure | value |\n|---|---|")
    print(f"| product lines (Python + C, without generated and testing/) | {num_lines(root):,} |")
    print(f"| entries in the fullest source folder | {count} ({folder}) |")
    print(f"| modules with a single importer | {single_importers(root)} |")
    print(f"| class names used twice in one distribution | {len(pairs)} |")
    print(f"| definitions of Obj | {obj_definitions(root)} |")
    print(f"| files outside every layer | {outside_layers(root)} |")
    for name, places in sorted(pairs.items()):
        print(f"\n{name}: {', '.join(places)}", end="")
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
