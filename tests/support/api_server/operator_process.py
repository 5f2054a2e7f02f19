"""The operator as a real process, to be started, killed, paused and asked.

It sees the API server through whatever address its kubeconfig names: a fault proxy's, usually.
"""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import foveal_operator
import foveal_runtime
from foveal_runtime.plan.local import free_port
from tests.support.api_server.fork_server import ForkServer
from tests.support.api_server.programs import Program, start, wait_until

RESYNC_SECONDS = 5


def packages() -> list[str]:
    """Where the operator under test lies."""
    return sorted(
        {str(Path(str(m.__file__)).parents[1]) for m in (foveal_operator, foveal_runtime)}
    )


class OperatorProcess:
    """One replica. `flags` are added to those every test needs."""

    def __init__(self, name: str, kubeconfig: Path, namespace: str, *flags: str) -> None:
        self.name, self.kubeconfig, self._namespace = name, kubeconfig, namespace
        self._folder = kubeconfig.parent
        self._port = free_port()
        self._command = [sys.executable, "-m", "foveal_operator", f"--kubeconfig={kubeconfig}"]
        self._command += [f"--namespaces={namespace}", f"--bind=127.0.0.1:{self._port}"]
        self._command += [f"--lease-namespace={namespace}", "--log-format=text", "--workers=4"]
        self._command += [f"--resync-seconds={RESYNC_SECONDS}", *flags]
        self._program: Program | None = None
        self.fork_server: ForkServer | None = None
        self.packages = packages()

    def start(self) -> None:
        assert not self.is_alive
        # The namespace is in the name: operators of other tests have a log of their own.
        name, own = f"operator-{self._namespace}-{self.name}", {"POD_NAME": self.name}
        if self.fork_server is not None:
            log = self._folder / f"{name}.log"
            child = self.fork_server.spawn(self._command[3:], self._folder, own, log)
            self._program = Program(name, child, log)
        else:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(self.packages), **own}
            self._program = start(name, self._command, self._folder, env)

    @property
    def is_alive(self) -> bool:
        return self._program is not None and self._program.is_alive

    @property
    def pid(self) -> int:
        assert self._program is not None
        return self._program.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """SIGKILL."""
        assert self._program is not None
        self._program.process.kill()
        self._program.process.wait(60)

    def stop(self) -> int:
        """SIGTERM. Returns the exit code (negative: it had to be killed)."""
        assert self._program is not None
        self._program.process.send_signal(signal.SIGCONT)
        self._program.stop(patience_seconds=10.0)
        return int(self._program.process.returncode)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, path: str) -> tuple[int, str]:
        """(status, body) of /readyz, /livez or /metrics; (0, "") while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as reply:
                return int(reply.status), reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_ready(self, timeout_seconds: float = 180.0) -> None:
        def ready_or_dead() -> bool:
            assert self.is_alive, f"the operator ended:\n{self.log_tail()}"
            return self.ask("/readyz")[0] == 200

        wait_until(f"operator {self.name} is ready", ready_or_dead, timeout_seconds)

    def log_tail(self, num_lines: int = 40) -> str:
        return self._program.tail(num_lines) if self._program else ""
