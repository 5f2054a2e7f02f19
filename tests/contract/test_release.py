"""The metadata of a release: one version everywhere, typed packages, a license in each."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.manifests import ClusterFacts
from foveal_operator.reconcile import observe

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
WITH_IMAGES = (
    "Dockerfile", "docs/how-to/images.md", "examples/mmi-cluster.yaml", "e2e/cluster/images.sh",
    "e2e/cluster/run.sh", "tests/support/node/commands.py",
    "operator/src/foveal_operator/manifests/context.py",
    "operator/src/foveal_operator/reconcile/observe.py",
)  # fmt: skip


def project(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert [project(name)["version"] for name in ("operator", "runtime", "packaging")] == [
        VERSION
    ] * 3
    assert f"foveal-runtime=={VERSION}" in project("operator")["dependencies"]
    chart = yaml.safe_load((ROOT / "charts/foveal/Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    labels = re.findall(r'image\.version="(.+?)"', (ROOT / "Dockerfile").read_text())
    assert labels == [VERSION] * 2
    assert ClusterFacts().runtime_image == f"foveal/runtime:{VERSION}"
    assert f"foveal/runtime:{VERSION}" in Path(observe.__file__).read_text(encoding="utf-8")


def test_pip_install_foveal_brings_both_distributions() -> None:
    about, runtime = project("packaging"), project("runtime")
    assert about["dependencies"] == [
        f"foveal-runtime[frontend,engine]=={VERSION}", f"foveal-operator=={VERSION}"
    ]  # fmt: skip
    assert about["optional-dependencies"] == {
        extra: [f"foveal-runtime[{extra}]=={VERSION}"] for extra in ("bench", "s3", "telemetry")
    }
    assert set(runtime["optional-dependencies"]) == {
        "frontend",
        "engine",
        *about["optional-dependencies"],
    }
    assert "matplotlib" in runtime["optional-dependencies"]["bench"]
    assert (ROOT / "packaging/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_are_named_with_the_version(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    tags = re.findall(r"foveal/(?:operator|runtime|tiny-vlm|\$target):(\d[\w.-]*)", text)
    assert tags
    assert set(tags) == {VERSION}


def test_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\]", text, flags=re.M)
    assert sections[0] == "Unreleased"
    assert VERSION in sections


@pytest.mark.parametrize("name", ["operator", "runtime"])
def test_distribution_is_typed_and_licensed(name: str) -> None:
    assert (ROOT / name / "src" / f"foveal_{name}" / "py.typed").is_file()
    assert (ROOT / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    about = project(name)
    assert about["license-files"] == ["LICENSE"]
    assert (ROOT / name / about["readme"]).is_file()
    assert "Typing :: Typed" in about["classifiers"]
    settings = tomllib.loads((ROOT / name / "pyproject.toml").read_text(encoding="utf-8"))
    [patterns] = settings["tool"]["setuptools"]["package-data"].values()
    assert "py.typed" in patterns
