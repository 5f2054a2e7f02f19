"""Operators that start in a moment: a process that has imported everything forks one per request.

A start costs seconds of imports, and the crash tests start hundreds of lives. Each child is a
process of its own with a pid, a log and an end of its own, to be killed like any other. Run as a
script this file is the server; imported, it is the tests' side of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

IMPORTED = (
    "aiohttp",
    "kopf",
    "kubernetes.aio.client",
    "kubernetes.aio.config",
    "foveal_operator.kube.kopf_watch",
    "foveal_operator.process.main",
)
POLL_SECONDS = 0.02
START_SECONDS = 120.0


class Forked:
    """As much of subprocess.Popen as programs.Program and OperatorProcess use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.has_ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"operator {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Use it in a with statement; `spawn` has the signature of programs.start."""

    def __init__(self, log: Path, packages: list[str]) -> None:
        self._log = log
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
        self._children: dict[int, Forked] = {}
        self._replies: list[int] = []
        self._has_reply = threading.Condition()

    def __enter__(self) -> ForkServer:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=self._env,
            )
        self._reader = threading.Thread(target=self._read, name="fork-server")
        self._reader.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def spawn(self, arguments: list[str], folder: Path, env: dict[str, str], log: Path) -> Forked:
        asked = {"arguments": arguments, "folder": str(folder), "env": env, "log": str(log)}
        assert self._process.stdin is not None
        with self._has_reply:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            assert self._has_reply.wait_for(lambda: self._replies, START_SECONDS), "no fork server"
            return self._children[self._replies.pop()]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._has_reply:
                child = self._children.setdefault(told["pid"], Forked(told["pid"]))
                if "code" in told:
                    child.returncode = told["code"]
                    child.has_ended.set()
                else:
                    # Pids come round again: the new one is another child.
                    if child.returncode is not None:
                        self._children[told["pid"]] = Forked(told["pid"])
                    self._replies.append(told["pid"])
                    self._has_reply.notify_all()


# --- in the fork server -------------------------------------------------------------------------
def _tell(**what: int) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _tell(pid=pid, code=os.waitstatus_to_exitcode(status))


def _live(asked: dict[str, Any]) -> None:
    """The child: never returns."""
    out = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.chdir(asked["folder"])
    os.environ.update(asked["env"])
    random.seed()
    sys.argv = ["foveal-operator", *asked["arguments"]]
    from foveal_operator.process.main import process

    try:
        process()
    finally:
        os._exit(70)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    data = b""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        _reap()
        if not readable:
            continue
        got = os.read(0, 1 << 16)
        if not got:
            return
        data += got
        *lines, data = data.split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                _live(json.loads(line))
            _tell(pid=pid)


if __name__ == "__main__":
    main()
