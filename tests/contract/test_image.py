"""The Dockerfile: lint-clean, pinned, one user everywhere, nothing of the builder's settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from foveal_operator.manifests.context import ENGINE_HTTP_PORT, ENGINE_PORT
from foveal_operator.manifests.pods import USER_ID

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LOCKS = ("operator", "torch", "runtime", "build")


def stage(name: str) -> str:
    """What an image is made of: its files, and what the last stage adds to them."""
    parts = [rf"base AS {name}-files", rf"{name}-files AS {name}"]
    found = [
        re.search(rf"^FROM {part}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S) for part in parts
    ]
    assert all(found), name
    return "\n".join(part.group(1) for part in found if part)


def test_hadolint_finds_nothing() -> None:
    """It comes with the development packages; these need not be on the PATH of who runs tests."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    tool = shutil.which("hadolint", path=os.pathsep.join(folders))
    assert tool, "hadolint is missing: make setup"
    done = subprocess.run(
        [tool, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_base_is_pinned_by_digest() -> None:
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.M)
    found = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.M)
    stages = {new: old for old, new in found}
    assert len(found) == len(re.findall(r"^FROM", DOCKERFILE, re.M))
    assert stages.pop("base") == "${BASE}"
    assert set(stages.values()) <= {"base", *stages}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_with_hashes(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    entries = re.findall(
        r"^([a-z][^\n]*==[^\n]*\\\n(?:    --hash=sha256:\w{64}[^\n]*\n)+)", text, re.M
    )
    names = re.findall(r"^[a-z0-9]\S*==", text, re.M)
    assert names
    assert len(entries) == len(names)
    assert "://" not in text


def test_images_hold_what_run_txt_holds() -> None:
    """One set of versions: tests run with what images ship."""
    wanted = set(re.findall(r"^(\S+==\S+)", (ROOT / "requirements/run.txt").read_text(), re.M))
    for name in ("operator", "torch", "runtime"):
        found = re.findall(r"^(\S+==\S+)", (ROOT / f"requirements/{name}.txt").read_text(), re.M)
        assert set(found) <= wanted, name


def test_operator_has_no_torch() -> None:
    text = (ROOT / "requirements/operator.txt").read_text()
    assert not re.search(r"^(torch|transformers|numpy|pyzmq)==", text, re.M)
    assert "runtime.txt" not in stage("operator")


@pytest.mark.parametrize("name", ["operator", "runtime"])
def test_one_user_everywhere(name: str) -> None:
    assert f"\nUSER {USER_ID}:{USER_ID}\n" in stage(name)
    chart = (ROOT / "charts/foveal/values.yaml").read_text()
    assert set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", chart)) == {str(USER_ID)}


def test_ports_are_the_manifests() -> None:
    assert f"EXPOSE 8000 {ENGINE_PORT} {ENGINE_HTTP_PORT}\n" in stage("runtime")
    values = yaml.safe_load((ROOT / "charts/foveal/values.yaml").read_text())
    assert values["image"]["repository"] in DOCKERFILE
    assert values["runtimeImage"]["repository"] in DOCKERFILE


def test_builders_settings_reach_no_layer() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))
    assert arguments == {"BASE", "SOURCE_DATE_EPOCH"}
    for word in ("index-url", "PIP_INDEX", "trusted-host", "http_proxy", "HTTP_PROXY"):
        assert word not in DOCKERFILE


def test_a_change_of_code_leaves_the_large_layers_alone() -> None:
    text = stage("runtime")
    order = [
        text.index(part) for part in ("torch.txt", "runtime.txt", "foveal_runtime-*.whl", "sbom")
    ]
    assert order == sorted(order)
    assert "COPY runtime" not in text


def test_context_is_small() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert "*" in lines
    assert {"**/*.so", "**/__pycache__"} <= set(lines)
    assert not any(line.startswith(("!examples", "!tests", "!docs")) for line in lines)
