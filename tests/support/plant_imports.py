"""Upward imports planted in a copy of the sources, one at a time, and what the contracts say.

`python plant_imports.py COPY`, where COPY holds pyproject.toml, operator/src and runtime/src. For
each source folder and each layers contract over it, a file of the folder gets an import of the
layer above. Prints JSON, a list of [folder, contract, planted import, contract is broken], whose
first entry has nothing planted. Runs in a process
of its own, since the import graph is found by way of sys.path.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = ("operator/src", "runtime/src")


class Plant(NamedTuple):
    contract: str
    file: Path
    line: str


def plants(copy: Path, contracts: list[dict]) -> Iterator[Plant]:
    """An upward import in each folder below a layer that has another above it, and a file that
    stands beside the layers of each contract."""
    for contract in contracts:
        (container,) = contract["containers"]
        layers = [[name.strip() for name in row.split("|")] for row in contract["layers"]]
        root = next(p for s in SOURCES if (p := copy / s / container.replace(".", "/")).is_dir())
        yield Plant(contract["name"], root / "stray.py", "")
        for above, row in itertools.pairwise(layers):
            for name in row:
                files = list((root / name).rglob("__init__.py")) or [root / f"{name}.py"]
                for file in files:
                    yield Plant(contract["name"], file, f"import {container}.{above[0]}")


def main(copy: Path) -> None:
    sys.path[:0] = [str(copy / source) for source in SOURCES]
    os.chdir(copy)
    from importlinter.api import read_configuration
    from importlinter.application.use_cases import create_report
    from importlinter.application.user_options import UserOptions
    from importlinter.configuration import configure
    from importlinter.contracts.layers import LayersContract
    from importlinter.domain.contract import registry

    configure()
    registry.register(LayersContract, name="layers")
    config = read_configuration("pyproject.toml")
    layered = [c for c in config["contracts_options"] if c["type"] == "layers"]
    options = UserOptions(
        {**config["session_options"], "include_external_packages": False}, layered
    )

    def broken() -> set[str]:
        report = create_report(options, cache_dir=str(copy / ".cache"))
        assert not report.could_not_run
        assert not report.invalid_contract_options
        return {c.name for c, check in report.get_contracts_and_checks() if not check.kept}

    found = [["", "", "", bool(broken())]]
    for plant in plants(copy, layered):
        before = plant.file.read_text() if plant.file.exists() else None
        plant.file.write_text(f"{before or ''}\n{plant.line}\n")
        folder = str(plant.file.parent.relative_to(copy))
        found.append([folder, plant.contract, plant.line, plant.contract in broken()])
        if before is None:
            plant.file.unlink()
        else:
            plant.file.write_text(before)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
