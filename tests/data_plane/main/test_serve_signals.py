"""Ctrl-C in each phase of `foveal serve DIRECTORY`: a line and an exit code, no process left.

The phase of a download is in test_serve_hub.py, that of streams in tests/processes/test_up.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.markdown import ROOT

MODEL = ROOT / "examples/tiny-vlm/model"


def _hear_interrupts() -> None:
    """What a shell starts in the background, these tests perhaps, ignores them, and so would all
    that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Start:
    """`foveal serve` in a session of its own, with its output read line by line."""

    def __init__(self, home: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "foveal_runtime.main.cli", "serve", str(MODEL), "--port",
                   "0", "--device", "cpu", "--kv-cache", "64Mi", *arguments]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=_hear_interrupts,
            env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home)},
        )  # fmt: skip

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(self.process.communicate())

    def interrupt(self) -> tuple[int, str, str]:
        """(exit code, what else was said, standard error) after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=100)
        return self.process.returncode, out, err

    def children(self) -> list[str]:
        """Command lines of what was started from here and still runs."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"FOVEAL_PARENT_PID={self.process.pid}".encode() in environment.split(b"\0"):
                found.append(command.replace(b"\0", b" ").decode())
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Start]]:
    started: list[Start] = []

    def run(*arguments: str) -> Start:
        started.append(Start(tmp_path, *arguments))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_while_the_models_costs_are_read(start: Callable[..., Start], tmp_path: Path) -> None:
    one = start()
    one.until("reading the model's costs")
    code, _, err = one.interrupt()
    assert (code, err) == (130, "foveal-runtime: interrupted; the next start continues\n")
    assert one.children() == []
    assert not list(tmp_path.glob("foveal-*")), "folders of a start that did not happen"


def test_while_weights_are_loaded(start: Callable[..., Start], tmp_path: Path) -> None:
    one = start()
    one.until("engine-0 is starting")
    code, out, err = one.interrupt()
    assert (code, err) == (0, ""), out
    assert out.endswith("drained and ended\n")
    assert one.children() == []
    assert not list(tmp_path.glob("foveal-*"))


def test_while_nobody_reads_the_output(start: Callable[..., Start], tmp_path: Path) -> None:
    """`foveal serve | tee log`: Ctrl-C ends tee, too, and streams may still finish."""
    one = start()
    one.until("engine-0 is starting")
    assert one.process.stdout is not None
    one.process.stdout.close()
    code, _, err = one.interrupt()
    assert (code, err) == (0, "")
    assert one.children() == []
    assert not list(tmp_path.glob("foveal-*"))


@pytest.mark.parametrize(
    ("options", "code"), [(["--print-config"], 0), (["--profile", "/nonexistent"], 2)]
)
def test_a_pipe_that_nobody_reads_changes_no_exit_code(options: list[str], code: int) -> None:
    """`foveal serve --print-config m | true`, and a mistake whose line nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "foveal_runtime.main.cli", "serve", str(MODEL), *options]
    is_said = bool(code)
    done = subprocess.run(
        command, stdout=writer, stderr=writer if is_said else subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (code, b"")
