"""Writes JSON schemas of everything that Foveal's objects may be: python -m e2e.schemas FOLDER

Starts etcd and kube-apiserver, installs Foveal's CustomResourceDefinition and those of the
Prometheus operator, KEDA and the Gateway API (as their pinned modules hold them), and writes what
the server then says of its kinds. Skipped when FOLDER holds schemas of the same input. Used by
e2e/chart.sh.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from e2e.schemas import convert
from tests.support.api_server.api import Api
from tests.support.api_server.programs import (
    missing_programs,
    program,
    running_cluster,
    wait_until,
)
from tests.support.regenerate import CRD_FILE

FOREIGN = (
    # module@version, where its definitions lie, those that are wanted
    (
        "github.com/prometheus-operator/prometheus-operator@v0.93.1",
        "example/prometheus-operator-crd/monitoring.coreos.com_*.yaml",
        ("podmonitors", "servicemonitors", "prometheusrules"),
    ),
    ("github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases/*.yaml", ("scaledobjects",)),
    ("sigs.k8s.io/gateway-api@v1.6.0", "config/crd/standard/*.yaml", ("httproutes",)),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.5.0",
        "config/crd/bases/inference.networking.k8s.io_*.yaml",
        ("inferencepools",),
    ),
)


class _Loader(yaml.CSafeLoader):
    """Reads a plain `=` as the text it is; YAML 1.1 has a meaning of its own for it."""


_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))


def foreign_definitions() -> list[dict[str, Any]]:
    """From Go's module cache; a module that cannot be had is said and left out."""
    found = []
    for module, pattern, plurals in FOREIGN:
        folder = _module(module)
        if folder is None:
            print(f"schemas: {module} cannot be downloaded; its kinds are not checked")
            continue
        files = [one for one in folder.glob(pattern) if one.stem.rpartition("_")[2] in plurals]
        for file in sorted(files):
            for body in yaml.load_all(file.read_text(encoding="utf-8"), _Loader):
                if body:
                    found.append(body)
    return found


def _module(module: str) -> Path | None:
    command = ["go", "mod", "download", "-json", module]
    # Outside of any module of ours, so that no go.mod is read or changed.
    reply = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd="/", check=False
    )
    answer = json.loads(reply.stdout or "{}")
    return Path(answer["Dir"]) if reply.returncode == 0 and "Dir" in answer else None


def stamp() -> str:
    version = subprocess.run(
        [str(program("kube-apiserver")), "--version"], capture_output=True, timeout=60, check=True
    ).stdout
    parts = [version, CRD_FILE.read_bytes(), repr(FOREIGN).encode()]
    parts += [(Path(__file__).parent / name).read_bytes() for name in ("convert.py", "__main__.py")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def write(folder: Path) -> int:
    """Number of files written; FOLDER is replaced."""
    ours = yaml.safe_load(CRD_FILE.read_text(encoding="utf-8"))
    num_files = 0
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_cluster(Path(scratch)) as cluster,
        Api(cluster) as api,
    ):
        groups = set()
        for body in (ours, *foreign_definitions()):
            api.install(body)
            for version in body["spec"]["versions"]:
                groups.add(f"apis/{body['spec']['group']}/{version['name']}")

        def index() -> dict[str, Any]:
            return api.request("GET", "/openapi/v3").must()["paths"]

        wait_until("the definitions are in /openapi/v3", lambda: groups <= set(index()))
        for path in index().values():
            document = api.request("GET", path["serverRelativeURL"]).must()
            for name, schema in convert.files(document):
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(schema), encoding="utf-8")
                num_files += 1
    return num_files


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    missing = missing_programs("etcd", "kube-apiserver")
    if missing:
        print(f"schemas: not built: {', '.join(missing)}; e2e/cluster/build.sh builds them")
        return 3
    wanted, mark = stamp(), folder / "stamp"
    if mark.exists() and mark.read_text() == wanted:
        print(f"schemas: of this API server and these definitions already in {folder}")
        return 0
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
    num_files = write(fresh)
    (fresh / "stamp").write_text(wanted)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    print(f"schemas: {num_files} kinds written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
