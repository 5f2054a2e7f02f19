"""One `foveal up` as a process, with its output."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/support/fake_runtime.py"
PROFILE = ROOT / "examples/profiles/tiny-vlm.json"


class Up:
    """One `foveal up` with its output."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "foveal_operator.cli.main", "up", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self.text = ""
        self._watchdog = threading.Timer(240, self._process.kill)
        self._watchdog.start()

    def read_until(self, text: str) -> None:
        while text not in self.text:
            line = self._out.readline()
            assert line, self.text
            self.text += line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Its exit code, once all its output is read."""
        self.text += self._out.read()
        code = self._process.wait(240)
        self._watchdog.cancel()
        self._out.close()
        return code

    def stop(self) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        self._out.close()


def fake_runtime(more: str = "") -> str:
    """A program with the real launcher, whose frontends and engines only answer probes."""
    real = f"{sys.executable} -m foveal_runtime.main.cli"
    return (
        f'#!/bin/sh\ncase "$1" in\n{more}'
        f'  launch) exec {real} "$@" --runtime "{sys.executable} {FAKE}";;\nesac\nexit 99\n'
    )
