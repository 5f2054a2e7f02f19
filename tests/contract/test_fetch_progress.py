"""A download from a hub tells how far it is and what it fetched, and the operator reads both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from foveal_operator.pods.metrics import Seen, read_figures, report
from foveal_runtime.main.download import Progress, told
from foveal_runtime.main.profile import compact, profile_model
from foveal_runtime.main.revision import resolved_revision
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.fetch_progress import percent
from foveal_runtime.plan.local import free_port
from tests.support.model_hub import COMMIT, Hub

MODEL = Path(__file__).parents[2] / "examples/tiny-vlm/model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("org/tiny", MODEL, ("main", "v1")).running() as running:
        yield running


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Hub]:
    """The hub's library writes 10 MB at a time: this one is several of those."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(48 << 20))
    with Hub("org/tiny", folder, ("main", "v1")).running() as running:
        yield running


def start(hub: Hub, tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "foveal_runtime.main.cli", "fetch", "hf://org/tiny"]
    return subprocess.Popen(
        [*command, "--to", str(tmp_path / "model"), *more],
        env={**os.environ, **hub.environment(tmp_path / "home")},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def downloads(port: int) -> dict[str, int]:
    """What the operator makes of the pod's answer; {} while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    seen = Seen(pod="p", group="", is_ready=False,
                figures=read_figures(text), history=None)  # fmt: skip
    found = report([], [], [seen])
    return found.downloads


def test_a_download_tells_how_far_it_is_and_which_commit_it_was(
    large: Hub, tmp_path: Path, port: int
) -> None:
    large.gate.clear()
    fetching = start(large, tmp_path, "--revision", "v1", "--metrics-port", str(port))
    try:
        wait_for(lambda: 30 <= downloads(port).get("p", 0) <= 60)
        assert not (tmp_path / "model").exists()
        large.gate.set()
        _, said = fetching.communicate(timeout=60)
    finally:
        fetching.kill()
        fetching.communicate()
    assert fetching.returncode == 0, said
    assert resolved_revision(tmp_path / "model") == COMMIT
    assert (tmp_path / "model/model.safetensors").read_bytes() == (
        tmp_path / "large/model.safetensors"
    ).read_bytes()
    assert downloads(port) == {}, "nobody listens when it is over"
    # The branch was asked about once; every file is of that commit.
    assert {f"GET /org/tiny/resolve/{COMMIT}/{name}" for name in large.files} <= set(large.asked)


def test_the_profile_carries_the_commit(hub: Hub, tmp_path: Path) -> None:
    fetching = start(hub, tmp_path)
    _, said = fetching.communicate(timeout=120)
    assert fetching.returncode == 0, said
    limits = ModalitiesConfig(image=ModalityLimits(max_pixels=100_000))
    found = compact(profile_model(str(tmp_path / "model"), limits))
    assert msgspec.json.decode(found)["revision"] == COMMIT


def test_a_revision_that_the_hub_does_not_know(hub: Hub, tmp_path: Path) -> None:
    fetching = start(hub, tmp_path, "--revision", "v9")
    _, said = fetching.communicate(timeout=60)
    assert fetching.returncode == 2
    assert said.splitlines()[-1].startswith("foveal-runtime: hf://org/tiny: 404")


def test_a_port_that_is_taken_is_an_error_of_one_line(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        number = taken.getsockname()[1]
        refused = pytest.raises(StartupError, match=f"--metrics-port {number}")
        with refused, told(Progress(tmp_path), number):
            raise AssertionError


def test_other_paths_are_not_there(tmp_path: Path, port: int) -> None:
    with told(Progress(tmp_path), port), pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=5)


def test_percent_never_says_done() -> None:
    """Done is what the Job's end says."""
    assert percent(5, 0) is None
    assert [percent(n, 200) for n in (0, 1, 2, 199, 200, 900)] == [0, 0, 1, 99, 99, 99]


def test_text_without_and_with_a_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 4096)
    progress = Progress(tmp_path)
    assert progress.text() == "0.00 GiB fetched"
    progress.total_bytes = 8192
    assert progress.text() == "50 % of 0.00 GiB fetched"
