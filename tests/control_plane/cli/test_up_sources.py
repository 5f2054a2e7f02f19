"""`foveal up` for models of a hub or a registry, and for resources that ask for GPUs: as far as any
machine gets.

The hub is a loopback server and the fetch is the runtime's own. The profile (20 s with torch),
frontends and engines are fakes: test_fetch_progress.py and tests/processes/test_up.py run the real
ones.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_runtime.main.revision import resolved_revision
from tests.support.model_hub import COMMIT, Hub
from tests.support.registry import Registry, layer
from tests.support.up_process import PROFILE, ROOT, Up, fake_runtime

MODEL = ROOT / "examples/tiny-vlm/model"
URI = "hf://org/tiny"
Start = Callable[..., Up]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("org/tiny", MODEL).running() as running:
        yield running


@pytest.fixture
def up(tmp_path: Path, hub: Hub) -> Iterator[Start]:
    """Starts it with a resource of the hub's model."""
    runtime = tmp_path / "foveal-runtime"
    runtime.write_text(
        fake_runtime(
            f'  fetch) exec {sys.executable} -m foveal_runtime.main.cli "$@";;\n'
            f'  profile) for last; do :; done; exec cp {PROFILE} "$last";;\n'
        )
    )
    runtime.chmod(0o755)
    (tmp_path / "bin").mkdir()
    started: list[Up] = []

    def start(*more: str, num_gpus: int = 0, **spec: Any) -> Up:
        if num_gpus:
            driver = tmp_path / "bin/nvidia-smi"
            lines = (f"echo GPU-{i}, 81920\n" for i in range(num_gpus))
            driver.write_text("#!/bin/sh\n" + "".join(lines))
            driver.chmod(0o755)
        body = yaml.safe_load((ROOT / "examples/mmi-cpu-laptop.yaml").read_text())
        body["spec"]["model"] = {"uri": URI, "cache": {"size": "1Gi"}}
        body["spec"]["rollout"] = {"drainTimeoutSeconds": 1, "progressDeadlineSeconds": 60}
        body["spec"].update(spec)
        (tmp_path / "mmi.yaml").write_text(yaml.safe_dump(body))
        arguments = ["-f", str(tmp_path / "mmi.yaml"), "--port", "0", "--runtime", str(runtime),
                     "--folder", str(tmp_path / "up"), *more]  # fmt: skip
        # Only what the test puts there: a machine with real devices must not change the answers.
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        environment = {**hub.environment(tmp_path / "hf"), "HOME": str(tmp_path), "PATH": path,
                       "XDG_CACHE_HOME": ""}  # fmt: skip
        started.append(Up(arguments, environment))
        return started[-1]

    yield start
    for one in started:
        one.stop()


GPU = {"replicas": 2, "accelerator": {"type": "GPU", "count": 1}}


@pytest.mark.timeout(400)  # it starts real processes
def test_a_hubs_model_is_fetched_profiled_and_served(up: Start, hub: Hub, tmp_path: Path) -> None:
    """A GPU resource, too, with --cpu. The second run asks nobody."""
    running = up("--cpu", engine={"accelerator": {"type": "GPU", "count": 1}})
    running.read_until("serving tiny on http://127.0.0.1:")
    running.signal(signal.SIGINT)
    assert running.end() == 0, running.text
    folder = tmp_path / ".cache/foveal/models/hf--org--tiny--main"
    assert f"fetching {URI} into {folder}" in running.text
    assert resolved_revision(folder) == COMMIT
    num_asked = len(hub.asked)
    again = up("--cpu", "--dry-run", "--profile", str(PROFILE))
    assert again.end() == 0, again.text
    assert len(hub.asked) == num_asked


@pytest.mark.timeout(400)  # it starts real processes
def test_an_image_is_fetched_once_and_again_when_its_tag_has_moved(
    up: Start, tmp_path: Path
) -> None:
    """The first image of a tag was kept without limit."""
    registry = Registry()
    files = [(one.name, one.read_bytes()) for one in MODEL.iterdir()]
    first = registry.push([layer(*files)])
    cache = tmp_path / ".cache/foveal/models"

    def run() -> tuple[str, Path, list[str]]:
        """What it said, the model's folder, and what it asked the registry for."""
        registry.asked.clear()
        running = up("--cpu", "--dry-run", "--profile", str(PROFILE), model={"uri": uri})
        assert running.end() == 0, running.text
        found = json.loads((tmp_path / "up/tiny-engine-0.json").read_text())["model"]["path"]
        assert Path(found).parent == cache
        return running.text, Path(found), [one.rpartition("/")[2] for one in registry.asked]

    with registry.running():
        uri = registry.uri()
        text, folder, asked = run()
        assert f"fetching {uri} into {folder}" in text
        assert folder.name.endswith(first.replace(":", "--"))
        assert resolved_revision(folder) == first
        assert (folder / "model.safetensors").read_bytes() == dict(files)["model.safetensors"]
        assert asked == ["1", first, next(iter(registry.blobs))]
        assert run()[1:] == (folder, ["1"])
        registry.refusal = 503
        text, found, _ = run()
        assert found == folder
        why = "no answer (HTTP Error 503: Service Unavailable); as last time,"
        assert f"{uri}: {why} {first}" in text.splitlines()
        registry.refusal = 0
        second = registry.push([layer(*files, ("new.json", b"{}"))])
        _, moved, asked = run()
        assert resolved_revision(moved) == second
        assert (moved / "new.json").is_file()
        assert asked[:2] == ["1", second]
    uri = registry.uri(f"@{first}")
    assert run()[1:] == (folder, []), "a digest is what it is"


def test_a_name_that_no_file_can_have_is_one_line(up: Start) -> None:
    running = up("--model", "a" * 300)
    assert running.end() == 2
    assert running.text == f"foveal: {'a' * 300}/config.json: File name too long\n"


def test_a_claim_is_the_clusters(up: Start) -> None:
    running = up(model={"uri": "pvc://weights/tiny"})
    assert running.end() == 2
    said = "pvc://weights/tiny is the cluster's: say where the model is with --model"
    assert running.text == f"foveal: {said}\n"


def test_a_model_that_the_hub_does_not_have_ends_with_1_and_why(up: Start) -> None:
    running = up(model={"uri": "hf://org/other", "cache": {"size": "1Gi"}})
    assert running.end() == 1
    lines = running.text.splitlines()
    assert any(line.startswith("foveal-runtime: hf://org/other: 404") for line in lines)
    assert lines[-1].startswith("foveal: hf://org/other was not fetched")
    assert "--model DIRECTORY" in lines[-1]


@pytest.mark.parametrize(
    ("num_gpus", "more", "engine", "said"),
    [
        (0, [], GPU,
         "tiny asks for 2 x 1 GPUs and this machine has 0: run the engines on its CPUs with --cpu"),
        (1, [], GPU,
         "tiny asks for 2 x 1 GPUs and this machine has 1: lower --engines, or run the engines on "
         "its CPUs with --cpu"),
        (1, ["--engines", "1"], {"accelerator": {"type": "GPU", "count": 4}},
         "tiny asks for 1 x 4 GPUs and this machine has 1: run the engines on its CPUs with --cpu"),
    ],
)  # fmt: skip
def test_too_few_gpus_is_one_line_with_the_fix_before_any_download(
    up: Start, hub: Hub, num_gpus: int, more: list[str], engine: Any, said: str
) -> None:
    running = up(*more, num_gpus=num_gpus, engine=engine)
    assert running.end() == 3
    assert running.text == f"foveal: {said}\n"
    assert hub.asked == []


def test_each_engine_sees_its_own_gpus(up: Start, tmp_path: Path) -> None:
    """With a driver that tells of three: planned on their memory, two engines on one each."""
    running = up("--profile", str(PROFILE), "--model", str(MODEL), num_gpus=3, engine=GPU)
    running.read_until("serving tiny on http://127.0.0.1:")
    running.signal(signal.SIGINT)
    assert running.end() == 0, running.text
    seen = {file.stem: file.read_text() for file in (tmp_path / "up").glob("*.devices")}
    assert seen == {"tiny-engine-0": "0", "tiny-engine-1": "1", "tiny-frontend-0": "all"}
    engine = (tmp_path / "up/tiny-engine-0.json").read_text()
    assert '"cuda' in engine


def test_documents_for_a_machine_with_gpus_can_be_made_without_one(
    up: Start, tmp_path: Path
) -> None:
    running = up("--dry-run", "--device-memory", "80Gi", "--profile", str(PROFILE),
                 "--model", str(MODEL), engine=GPU)  # fmt: skip
    assert running.end() == 0, running.text
    assert (tmp_path / "up/tiny-engine-1.json").is_file()
