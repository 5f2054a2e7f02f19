"""The images as built: size, user, contents, and nothing of the machine that built them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.node import commands

pytestmark = pytest.mark.cluster
BASE = "localhost/python:3.11-slim-bookworm"
TARGETS = ("operator", "runtime")
MAX_OPERATOR_BYTES = 200 * 1000 * 1000
HOSTS_OF_ALL = {"", "localhost", "127.0.0.1", "::1"}


def buildah(*arguments: str) -> str:
    store = commands.ROOT / "containers"
    folders = ["--root", str(store / "storage"), "--runroot", str(store / "run")]
    return commands.run("buildah", *folders, "--storage-driver", "overlay", *arguments)


def image(target: str) -> str:
    return f"{commands.REGISTRY}/foveal/{target}:0.1.0"


def inspected(name: str) -> commands.Obj:
    found: commands.Obj = json.loads(buildah("inspect", "--type", "image", name))
    return found


def size_bytes(name: str) -> int:
    folder = next((commands.ROOT / "containers/storage").glob("overlay-images"))
    images = json.loads((folder / "images.json").read_text())
    layers = json.loads((folder.parent / "overlay-layers/layers.json").read_text())
    by_id = {layer["id"]: layer for layer in layers}
    layer = next(i["layer"] for i in images if name in i.get("names", []))
    total = 0
    while layer:
        total += by_id[layer].get("diff-size", 0)
        layer = by_id[layer].get("parent", "")
    return total


@pytest.fixture(scope="module", params=TARGETS)
def tree(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """An image's name and its files."""
    container = buildah("from", "--pull-never", image(request.param)).strip()
    try:
        yield request.param, Path(buildah("mount", container).strip())
    finally:
        buildah("umount", container)
        buildah("rm", container)


def builders_words() -> set[str]:
    """Hosts that this machine's package settings and proxies name."""
    named = re.compile(r"(?i)(PIP|UV)_.*|.*_PROXY")
    texts = [value for name, value in os.environ.items() if named.fullmatch(name)]
    for path in (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf",
                 commands.ROOT / "containers/lend/pip.conf"):  # fmt: skip
        texts += path.read_text().split() if path.is_file() else []
    hosts = {urlsplit(text).hostname or "" for text in texts if "://" in text}
    for folder in ("/etc/apt/sources.list.d", "/etc/apt/apt.conf.d"):
        for file in Path(folder).glob("*"):
            words = file.read_text(errors="ignore").replace('"', " ").replace(";", " ").split()
            hosts |= {urlsplit(word).hostname or "" for word in words if "://" in word}
    return {host for host in hosts - HOSTS_OF_ALL if not host.endswith("debian.org")}


def test_the_operator_is_small() -> None:
    above = size_bytes(image("operator")) - size_bytes(BASE)
    print(f"operator: {above / 1e6:.0f} MB above its base")
    assert 0 < above <= MAX_OPERATOR_BYTES


@pytest.mark.parametrize("target", TARGETS)
def test_configuration(target: str) -> None:
    config = inspected(image(target))["OCIv1"]["config"]
    assert config["User"] == "10001:10001"
    assert config["Labels"]["org.opencontainers.image.title"] == f"foveal-{target}"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    names = {entry.partition("=")[0].upper() for entry in config["Env"]}
    assert not [name for name in names if "PROXY" in name or "INDEX" in name]


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_of_the_builder_is_in_the_history(target: str) -> None:
    found = inspected(image(target))
    text = json.dumps([found["OCIv1"], found["Docker"], found.get("History")])
    assert found["OCIv1"]["history"]
    for word in (*builders_words(), "index-url", "PIP_INDEX", "trusted-host", "_proxy"):
        assert word not in text, f"the history names {word}"


def test_nothing_of_the_builder_is_in_the_files(tree: tuple[str, Path]) -> None:
    _, root = tree
    for name in ("etc/pip.conf", "root/.config/pip/pip.conf", "root/.pip/pip.conf"):
        path = root / name
        assert not path.is_file() or path.read_text() == ""
    folders = [root / name for name in ("etc", "root", "opt/init", "var/lib/apt", "var/log")]
    folders += (root / "opt/venv/lib").glob("python3*/site-packages/*.dist-info")
    for word in builders_words():
        done = subprocess.run(
            ["grep", "-rlF", "--", word, *map(str, folders)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == "", f"{word} is in {done.stdout}"


def test_user_and_contents(tree: tuple[str, Path]) -> None:
    target, root = tree
    entries = (root / "etc/passwd").read_text().splitlines()
    assert any(line.startswith("foveal:x:10001:10001:") for line in entries)
    bill = json.loads((root / "opt/venv/sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    parts = {part["name"]: part.get("version") for part in bill["components"]}
    assert f"foveal-{target}" in parts
    installers = [root / "opt/venv/bin/pip", *(root / "opt/venv/lib").glob("python3*/*/pip")]
    assert not [path for path in installers if path.exists()], "the image holds an installer"
    assert ("torch" in parts) == (target == "runtime")
    if target == "runtime":
        for kernel in ("decoder_layers", "paged_decode", "paged_prefill", "recurrent", "rows"):
            assert list((root / "opt/venv/lib").glob(f"python3*/**/kernels/{kernel}_*.so")), kernel
        assert (root / "usr/bin/tini").is_file()
        assert not (root / "usr/bin/gcc").exists()


@pytest.mark.slow
def test_the_operator_built_again_has_the_same_layers() -> None:
    print(commands.run("e2e/cluster/images.sh", "--again", "operator", seconds=600))


def test_an_engine_has_an_init_and_ends_in_seconds(tiny: str) -> None:
    """SIGTERM reaches it through the init; the grace period is for streams, not for waiting."""
    name = sorted(commands.pods("engine"))[0]
    assert commands.kubectl("exec", name, "--", "cat", "/proc/1/comm").strip() == "tini"
    assert commands.kubectl("exec", name, "--", "id", "-u").strip() == "10001"
    commands.kubectl("delete", "pod", name, "--timeout=30s", seconds=40)
    commands.until("Ready again", lambda: commands.is_current("tiny"), 400)
