"""The termination message: there before the kernel kills, and the last error at its end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foveal_operator.pods.diagnose import diagnose, last_failure
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.memory import ContainerMemory
from foveal_runtime.telemetry.termination_message import TerminationMessage

MIB = 1 << 20


def memory_of(folder: Path, peak: int, limit: str = "max") -> ContainerMemory:
    (folder / "memory.peak").write_text(f"{peak}\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    return ContainerMemory(folder)


def test_the_peak_is_written_as_it_grows(tmp_path: Path) -> None:
    note = tmp_path / "note"
    message = TerminationMessage(note, memory_of(tmp_path, 100 * MIB, str(512 * MIB)))
    message.write()
    assert note.read_text() == "memory_peak=100Mi memory_limit=512Mi\n"
    memory_of(tmp_path, 101 * MIB, str(512 * MIB))
    message.look()
    assert note.read_text().startswith("memory_peak=100Mi")
    memory_of(tmp_path, 300 * MIB)
    message.look()
    assert note.read_text() == "memory_peak=300Mi\n"


def test_the_newest_warning_is_the_last_line(tmp_path: Path) -> None:
    note = tmp_path / "note"
    message = TerminationMessage(note, memory_of(tmp_path, 5 * MIB))
    log = logging.getLogger("test-termination-message")
    log.addHandler(message)
    log.info("nothing")
    log.warning("first %d", 1)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("the step loop failed")
    log.removeHandler(message)
    last = "the step loop failed: ValueError: two lines"
    assert note.read_text().splitlines() == ["memory_peak=5Mi", last]


def test_growth_keeps_what_another_process_of_the_container_said(tmp_path: Path) -> None:
    note = tmp_path / "note"
    one = TerminationMessage(note, memory_of(tmp_path, 5 * MIB))
    other = TerminationMessage(note, memory_of(tmp_path, 5 * MIB))
    one.say("old news")
    other.say("it broke")
    memory_of(tmp_path, 50 * MIB)
    one.look()
    assert note.read_text() == "memory_peak=50Mi\nit broke\n"


def test_configuring_logs_keeps_the_termination_message(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    message = TerminationMessage(tmp_path / "note", memory_of(tmp_path, MIB))
    try:
        root.addHandler(message)
        configure_logging("json", stream=sys.stderr)
        assert message in root.handlers
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    TerminationMessage(tmp_path / "absent" / "note", memory_of(tmp_path, MIB)).say("x")


def ended(note: Path, code: int) -> dict[str, object]:
    """A pod as the kubelet reports it: negative codes of Python are signals."""
    exit_code = code if code >= 0 else 128 - code
    terminated = {"exitCode": exit_code, "message": note.read_text(), "reason": "Error"}
    status = {"name": "engine", "state": {"terminated": terminated}}
    spec = {"containers": [{"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}]}
    return {
        "metadata": {"name": "e-0"},
        "spec": spec,
        "status": {"containerStatuses": [status]},
    }


@contextlib.contextmanager
def running(role: str, document: Path, note: Path) -> Iterator[subprocess.Popen[bytes]]:
    note.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "foveal_runtime.main.cli", role, "--config", str(document)],
        env={**os.environ, "FOVEAL_TERMINATION_LOG": str(note)},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("role", "config", "said"),
    [
        ("engine", {"engine_id": "e", "model": {"path": 7}}, "path"),
        ("frontend", {"model": {"path": "/nowhere", "name": "m"}, "port": 0}, "/nowhere"),
    ],
)
def test_a_refused_document_is_a_reason_with_its_line(
    tmp_path: Path, role: str, config: dict[str, object], said: str
) -> None:
    document = tmp_path / "document"
    document.write_text(json.dumps(config))
    with running(role, document, tmp_path / "note") as process:
        assert process.wait(100) == 2
    pod = ended(tmp_path / "note", 2)
    found, failure = diagnose([pod]), last_failure([pod])
    assert found is not None
    assert failure is not None
    assert found.reason.name == "InvalidArgument"
    assert said in found.message
    assert failure.memory_peak.endswith("Mi")
    assert failure.memory_limit == "2Gi"


def test_a_killed_process_has_left_its_peak(tmp_path: Path) -> None:
    """SIGBUS stands for a full /dev/shm; nobody can write anything any more then."""
    fifo = tmp_path / "document"
    os.mkfifo(fifo)
    note = tmp_path / "note"
    with running("engine", fifo, note) as process, fifo.open("w"):
        process.send_signal(signal.SIGBUS)  # it has come as far as reading its document
        code = process.wait(60)
    pod = ended(note, code)
    found, failure = diagnose([pod]), last_failure([pod])
    assert found is not None
    assert failure is not None
    assert found.reason.name == "ShmFull"
    assert failure.memory_peak.endswith("Mi")
