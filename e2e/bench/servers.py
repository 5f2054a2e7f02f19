"""The servers the bench compares, each started as its users would start it, with its defaults.

A `Spec` is a command and how to know that it is ready; `Server` runs it in a session of its own and
ends exactly that. Foveal and vLLM are given the same context length and, on CPUs, the same KV
memory; on a GPU vLLM takes its own share of the memory, and transformers has an option for neither.
Everything else is their own default unless the variant's name says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from e2e.bench.checkpoints import cache_folder
from e2e.bench.processes import tree
from foveal_runtime.bench.client import Target
from foveal_runtime.plan.local import free_port

KV_GIB = 2
MAX_MODEL_LEN = 4096
START_SECONDS = 900.0
ITEM_EMBEDS = 750
"""Of 30 seconds of sound; less than two images of the bench's LLaVAs (576 each) take."""


class Options(NamedTuple):
    """What all servers of a run are given. `threads` 0: each as it decides itself, as vLLM always
    does."""

    model: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0


class Spec(NamedTuple):
    """`ready`: paths below every URL of `target` that answer 200 when it serves. `engine_ports`:
    where bytes from frontends arrive, if that is TCP."""

    name: str
    command: list[str]
    env: dict[str, str]
    target: Target
    ready: str
    engine_ports: bool = False


def _foveal(name: str, options: Options, *flags: str, num_frontends: int = 1) -> Spec:
    port = free_port()
    command = [
        sys.executable, "-m", "foveal_runtime.main.cli", "serve", str(options.model),
        "--name", "m", "--port", str(port), "--frontends", str(num_frontends),
        "--kv-cache", f"{KV_GIB}Gi", "--max-model-len", str(MAX_MODEL_LEN),
        "--dtype", options.dtype, "--device", options.device, *flags,
    ]  # fmt: skip
    if options.threads:
        command += ["--threads", str(options.threads)]
    urls = tuple(f"http://127.0.0.1:{port + i}" for i in range(num_frontends))
    return Spec(name, command, {}, Target(urls, "m", name), "/readyz", engine_ports=True)


def _vllm(name: str, options: Options, *flags: str) -> Spec:
    if options.threads:
        raise SystemExit(
            f"--threads {options.threads} does not reach {name}, which binds its threads to CPUs "
            "by itself: leave out the option, or the server"
        )
    port = free_port()
    command = [
        str(cache_folder() / "vllm" / "bin" / "vllm"), "serve", str(options.model),
        "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(MAX_MODEL_LEN), "--dtype", options.dtype, *flags,
    ]  # fmt: skip
    env = {"HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
        env["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
    return Spec(name, command, env, Target((f"http://127.0.0.1:{port}",), "m", name), "/health")


def _transformers(name: str, options: Options) -> Spec:
    port = free_port()
    home = cache_folder() / "hub"
    (home / "hub").mkdir(parents=True, exist_ok=True)  # its /v1/models fails without one
    command = [
        str(Path(sys.executable).parent / "transformers"), "serve", str(options.model),
        "--host", "127.0.0.1", "--port", str(port), "--device", options.device,
        "--dtype", options.dtype, "--continuous-batching",
    ]  # fmt: skip
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    if options.threads:
        env["OMP_NUM_THREADS"] = str(options.threads)
    target = Target((f"http://127.0.0.1:{port}",), str(options.model), name)
    return Spec(name, command, env, target, "/health")


_NO_CACHES = ("--ipc-cache", "0", "--processor-cache", "0", "--no-prefix-caching",
              "--encoder-cache-embeds", str(ITEM_EMBEDS))  # fmt: skip
Maker = Callable[[str, Options], Spec]
MAKERS: dict[str, Maker] = {
    "foveal": _foveal,
    "foveal-pretouch": lambda n, o: _foveal(n, o, "--pretouch-kv-cache"),
    "foveal-4x2": lambda n, o: _foveal(n, o, "--engines", "2", num_frontends=4),
    "foveal-whole-steps": lambda n, o: _foveal(n, o, "--max-num-mixed-tokens", "2048"),
    "foveal-mixed-256": lambda n, o: _foveal(n, o, "--max-num-mixed-tokens", "256"),
    **{
        f"foveal-itl-{ms}": lambda n, o: _foveal(n, o, "--target-itl-ms", n.rpartition("-")[2])
        for ms in (50, 75, 100, 150, 200, 400)
    },
    "foveal-spin": lambda n, o: _foveal(n, o)._replace(env={"GOMP_SPINCOUNT": "1000"}),
    "foveal-shm": lambda n, o: _foveal(n, o, "--ipc-type", "shm"),
    "foveal-no-ipc": lambda n, o: _foveal(n, o, "--ipc-cache", "0"),
    "foveal-no-processor": lambda n, o: _foveal(n, o, "--processor-cache", "0"),
    "foveal-no-encoder": lambda n, o: _foveal(n, o, "--encoder-cache-embeds", str(ITEM_EMBEDS)),
    "foveal-no-prefix": lambda n, o: _foveal(n, o, "--no-prefix-caching"),
    "foveal-no-caches": lambda n, o: _foveal(n, o, *_NO_CACHES),
    "vllm": _vllm,
    "vllm-no-caches": lambda n, o: _vllm(
        n, o, "--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"
    ),
    "vllm-eager": lambda n, o: _vllm(n, o, "--enforce-eager"),
    "vllm-2-api": lambda n, o: _vllm(n, o, "--api-server-count", "2"),
    "transformers": _transformers,
}


def end_servers_on_sigterm() -> None:
    """As Ctrl-C does; otherwise they would outlive this process. What ends this process may send
    a second signal (timeout does), which must not interrupt that."""

    def end(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def is_installed(name: str) -> bool:
    """Whether the server's program is here; `python -m e2e.bench.peers` installs peers."""
    if name.startswith("vllm"):
        return (cache_folder() / "vllm" / "bin" / "vllm").exists()
    if name == "transformers":
        return (Path(sys.executable).parent / "transformers").exists()
    return True


class Server:
    """A running server. Use as a context manager: leaving it ends all it started."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec = spec
        self.name = spec.name
        self.log = folder / f"{spec.name}.log"
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        begin = time.perf_counter()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "GOMP_"))}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.spec.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**env, **self.spec.env}, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_ready(begin + START_SECONDS)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - begin
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_ready(self, deadline: float) -> None:
        assert self._process is not None
        waiting = [url + self.spec.ready for url in self.spec.target.urls]
        while waiting:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended at start; see {self.log}\n{self.last_lines()}")
            if time.perf_counter() > deadline:
                raise SystemExit(f"{self.name} is not ready; see {self.log}\n{self.last_lines()}")
            waiting = [url for url in waiting if not _is_ok(url)]
            if waiting:
                time.sleep(0.1)

    def last_lines(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def stop(self) -> None:
        """SIGTERM to the process, then SIGKILL to whatever of its descendants is left."""
        if self._process is None:
            return
        processes = tree(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for process in processes:
            with contextlib.suppress(Exception):
                process.kill()  # psutil checks that the pid is still this process
        self._process.wait()
        self._process = None


def _is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False
