"""`foveal up` from start to drained end, with processes that only answer probes.

The real ones are asked in tests/processes/test_up.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from foveal_operator.kube.types import Obj
from tests.support.up_process import PROFILE, ROOT, Up, fake_runtime

Start = Callable[..., Up]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Start]:
    """Starts it on a small resource; keyword arguments change the fakes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    runtime = tmp_path / "foveal-runtime"
    runtime.write_text(fake_runtime())
    runtime.chmod(0o755)
    body: Obj = yaml.safe_load((ROOT / "examples/mmi-cpu-laptop.yaml").read_text())
    body["spec"]["rollout"] = {"drainTimeoutSeconds": 1, "progressDeadlineSeconds": 60}
    started: list[Up] = []

    def start(*more: str, folder: bool = True, **fakes: str) -> Up:
        (tmp_path / "mmi.yaml").write_text(yaml.safe_dump(body))
        arguments = ["-f", str(tmp_path / "mmi.yaml"), "--profile", str(PROFILE), "--port", "0",
                     "--model", str(model), "--runtime", str(runtime), *more]  # fmt: skip
        if folder:
            arguments += ["--folder", str(tmp_path / "up")]
        (tmp_path / "tmp").mkdir(exist_ok=True)
        modes = {f"FOVEAL_FAKE_{role.upper()}": mode for role, mode in fakes.items()}
        started.append(Up(arguments, {**modes, "TMPDIR": str(tmp_path / "tmp")}))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_ctrl_c_drains_frontends_before_engines(up: Start, tmp_path: Path) -> None:
    running = up("--frontends", "2")
    running.read_until("serving tiny on http://127.0.0.1:")
    assert "tiny-engine-0 is ready\n" in running.text
    assert "  frontend  2 x " in running.text, "the plan is printed before anything is loaded"
    assert "\x1b" not in running.text
    running.signal(signal.SIGINT)
    assert running.end() == 0
    ends = (tmp_path / "up/ends.txt").read_text().split()
    assert sorted(ends[:2]) == ["tiny-frontend-0", "tiny-frontend-1"]
    assert ends[2:] == ["tiny-engine-0"]
    assert running.text.endswith("drained and ended\n")
    assert (tmp_path / "up/curve/server-secret").stat().st_mode & 0o077 == 0


def test_sigterm_drains_too(up: Start) -> None:
    running = up()
    running.read_until("serving tiny on ")
    running.signal(signal.SIGTERM)
    assert running.end() == 0


def test_a_process_that_refuses_its_document_ends_everything_with_its_words(up: Start) -> None:
    running = up(engine="refuse")
    assert running.end() == 1
    said = "foveal-runtime: tiny-engine-0 ended with exit code 2 before it was ready"
    assert said in running.text
    assert "  foveal-runtime: model.max_model_len 9 is too small; raise it" in running.text


def test_a_process_that_keeps_dying_is_given_up_with_its_last_lines(
    up: Start, tmp_path: Path
) -> None:
    running = up(frontend="die")
    assert running.end() == 1
    again = "tiny-frontend-0 ended with exit code 7; it is started again in "
    assert [line for line in running.text.splitlines() if line.startswith(again)] == [
        f"{again}{pause} s" for pause in ("0.5", "1", "2")
    ]
    said = "foveal-runtime: tiny-frontend-0 ended with exit code 7, 4 times in a row"
    assert said in running.text
    assert f"the end of {tmp_path / 'up/tiny-frontend-0.log'}:" in running.text
    assert "  ValueError: tensors do not match" in running.text


def test_a_process_that_dies_while_it_serves_is_started_again(up: Start, tmp_path: Path) -> None:
    running = up()
    running.read_until("serving tiny on ")
    os.kill(int((tmp_path / "up/tiny-engine-0.pid").read_text()), signal.SIGKILL)
    running.read_until("tiny-engine-0 was ended by SIGKILL")
    running.read_until("it is started again in 0.5 s")
    running.read_until("serving tiny on ")
    running.signal(signal.SIGINT)
    assert running.end() == 0, running.text
    assert "2" not in (tmp_path / "up/ends.txt").read_text()


def test_a_taken_port_is_one_line_and_starts_nothing(up: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        running = up("--port", str(port))
        assert running.end() == 2
    last = running.text.splitlines()[-1]
    assert last.startswith(f"foveal-runtime: port {port} of 127.0.0.1 is in use by another program")
    assert not list((tmp_path / "up").glob("*.log"))


@pytest.mark.parametrize("fakes", [{}, {"engine": "refuse"}], ids=["well", "badly"])
def test_a_temporary_folder_stays_after_a_bad_end_only(
    up: Start, tmp_path: Path, fakes: dict[str, str]
) -> None:
    running = up(folder=False, **fakes)
    if not fakes:
        running.read_until("serving tiny on ")
        running.signal(signal.SIGINT)
    assert running.end() == (1 if fakes else 0), running.text
    (folder,) = re.findall(r"documents and logs: (\S+)", running.text)
    assert Path(folder).parent == tmp_path / "tmp"
    assert Path(folder).exists() == bool(fakes)


def test_what_does_not_drain_in_time_is_killed_and_named(up: Start) -> None:
    running = up("--drain-margin", "0.5", engine="stay")
    running.read_until("serving tiny on ")
    running.signal(signal.SIGINT)
    assert running.end() == 5
    assert "still running after the drain time, killed: tiny-engine-0" in running.text


def test_a_second_ctrl_c_ends_at_once(up: Start) -> None:
    running = up(frontend="stay")
    running.read_until("serving tiny on ")
    running.signal(signal.SIGINT)
    running.read_until("tiny-frontend-0 is draining")
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert "ended at once, without waiting for streams" in running.text


def test_never_ready_ends_with_5(up: Start) -> None:
    running = up("--start-timeout", "2", engine="never")
    assert running.end() == 5
    assert "tiny-engine-0 is not ready after 2 s" in running.text


def test_dry_run_writes_documents_and_starts_nothing(up: Start, tmp_path: Path) -> None:
    running = up("--dry-run", "--engines", "2")
    assert running.end() == 0
    names = ["tiny-engine-0.json", "tiny-engine-1.json", "tiny-frontend-0.json"]
    assert running.text.split() == [str(tmp_path / "up" / name) for name in names]
    assert not list((tmp_path / "up").glob("*.log"))


def changed(tmp_path: Path, part: str, **spec: object) -> list[str]:
    """Arguments that name the small resource with a change in a part of its spec."""
    body: Obj = yaml.safe_load((ROOT / "examples/mmi-cpu-laptop.yaml").read_text())
    body["spec"][part] = {**body["spec"].get(part, {}), **spec}
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(body))
    return ["-f", str(file)]


def test_dry_run_takes_no_shared_memory(up: Start, tmp_path: Path) -> None:
    shared = {"type": "SharedMemory", "claimName": "shm"}
    running = up("--dry-run", *changed(tmp_path, "caches", ipc=shared))
    assert running.end() == 0, running.text
    document = json.loads((tmp_path / "up/tiny-engine-0.json").read_text())
    assert document["shm_directory"] == "/dev/shm"


@pytest.mark.parametrize("part", ["engine", "frontend"])
def test_no_replicas_leave_no_folder(up: Start, tmp_path: Path, part: str) -> None:
    running = up(*changed(tmp_path, part, replicas=0), folder=False)
    assert running.end() == 2
    assert running.text.endswith(
        "foveal: the resource asks for no replicas: give --engines and --frontends\n"
    )
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--engines", "0"], 2, "--engines 0: give 1 to 64"),
        (["--port", "-1"], 2, "--port -1: give 0 to 65000"),
        (["--api-key-file", "/nowhere"], 2, "--api-key-file /nowhere: there is no such file"),
        (["--model", "/nowhere"], 2, "--model /nowhere holds no config.json"),
        (["--runtime", "no-such-program"], 2, "--runtime no-such-program is no program"),
    ],
)
def test_wrong_arguments(up: Start, more: list[str], code: int, said: str) -> None:
    running = up(*more)
    assert running.end() == code
    assert f"foveal: {said}" in running.text


@pytest.mark.parametrize("given", ["nan", "-1"])
@pytest.mark.parametrize("option", ["--start-timeout", "--drain-margin"])
def test_a_time_is_a_time(up: Start, option: str, given: str) -> None:
    """NaN never ran out, and went into documents as null."""
    running = up(f"{option}={given}")
    assert running.end() == 2
    assert f"argument {option}: '{given}' is no time; write 90s, 10m or 1h30m" in running.text
