"""One model over several devices of a machine: the ModelRunner of an engine with ranks.

Made by main/ when `tensor_parallel` > 1. Rank 0 is the engine process itself; the others are its
children (`rank_worker`). Every rank runs the same TorchRunner on its shard and gets every plan, so
all take the same steps and sample the same tokens; vision and audio encoders are replicated.
A rank that dies ends the engine: there is no continuing with part of a model.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from foveal_runtime.engine.types.step import (
    DoneStep,
    RunnerLost,
    StepPlan,
    StepResult,
)
from foveal_runtime.model.attention import LayerGeometry
from foveal_runtime.model.checkpoint.loader import adapter_for, read_config
from foveal_runtime.model.checkpoint.placement import quantization_of
from foveal_runtime.model.checkpoint.probe import meta_layers
from foveal_runtime.model.cpu.threads import cpu_limit, num_threads, thread_environment
from foveal_runtime.model.device import present
from foveal_runtime.model.parallel.rank_worker import READY
from foveal_runtime.model.parallel.ranks import (
    ENVIRONMENT,
    Allocate,
    Channel,
    Close,
    RankConfig,
    Step,
    Warm,
    checksum,
    join,
    load_shard,
    rank_environment,
)
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.config import KVDtype
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash

_log = logging.getLogger(__name__)
GRACE_SECONDS = 10.0


CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class RankLost(RunnerLost):
    """A rank ended; the engine cannot go on. `code`: its exit code, or minus the signal."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.is_own = -code in CRASHES


def check_splits(config: Any, ranks: int) -> None:
    """Raises StartupError for models whose layers are not split: those with recurrent state,
    encoders, and those whose weights are quantised."""
    adapter = adapter_for(config)
    what = "models with recurrent state" if adapter.has_state else ""
    if adapter.is_encoder:
        what = "encoders"
    if scheme := quantization_of(config):
        what = f"quantised weights ({scheme})"
    if what and ranks > 1:
        raise StartupError(
            f"tensor_parallel {ranks}: {what} run on one device; set it to 1",
            param="tensor_parallel",
        )


def check_divisible(layers: Sequence[LayerGeometry], ranks: int) -> None:
    """Raises StartupError unless every layer's heads divide evenly among the ranks."""
    for layer in layers:
        for kind, count in (("key/value", layer.num_kv_heads), ("query", layer.num_heads)):
            if count % ranks:
                possible = [n for n in range(1, count + 1) if all(
                    g.num_kv_heads % n == 0 and g.num_heads % n == 0 for g in layers)]  # fmt: skip
                raise StartupError(
                    f"tensor_parallel {ranks}: layer {layer.index} has {count} {kind} heads, which "
                    f"{ranks} ranks cannot share evenly; possible are "
                    f"{', '.join(map(str, possible))}",
                    param="tensor_parallel",
                )


class _Workers:
    """The processes of ranks 1 ..., and what became of them."""

    def __init__(self, on_lost: Callable[[str], None], grace_seconds: float) -> None:
        self._on_lost = on_lost
        self._grace_seconds = grace_seconds
        self.processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self.died = threading.Event()
        self.lost = ""
        self.code = 0

    def start(self, config: RankConfig, config_path: Path) -> None:
        threads = num_threads(cpu_limit(), config.num_ranks)
        for rank in range(1, config.num_ranks):
            environment = {
                **os.environ,
                **thread_environment(threads),
                **rank_environment(rank, config.num_ranks),
            }
            command = [sys.executable, "-m", "foveal_runtime.model.parallel.rank_worker"]
            self.processes.append(
                subprocess.Popen(
                    [*command, str(config_path), str(rank)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        deadline = time.monotonic() + config.rendezvous_seconds
        for rank, process in enumerate(self.processes, 1):
            self._await_ready(rank, process, deadline)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _await_ready(self, rank: int, process: subprocess.Popen[bytes], deadline: float) -> None:
        assert process.stdout is not None
        left = max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([process.stdout], [], [], left)
        if not readable:
            raise StartupError(f"tensor parallel: rank {rank} did not start in time")
        if os.read(process.stdout.fileno(), len(READY)) != READY:
            code = process.wait(timeout=GRACE_SECONDS)
            raise StartupError(f"tensor parallel: rank {rank} ended at once with exit code {code}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing.is_set():
            return
        if not self.died.is_set():  # the others end because the first one did
            self.lost = f"tensor parallel: rank {rank} ended with exit code {code}"
            self.code = code
        self.died.set()
        _log.critical("%s; the engine ends", self.lost)
        # The step loop may be inside a collective that never returns.
        if not self._closing.wait(self._grace_seconds):
            self._on_lost(self.lost)

    def expect_end(self) -> None:
        """From now on a rank that ends is not lost."""
        self._closing.set()

    def stop(self) -> None:
        """Ends the processes that have not ended by themselves, and collects all."""
        self._closing.set()
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()  # a rank that still waits for us ends now
        for process in self.processes:
            try:
                process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=GRACE_SECONDS)
            if process.stdout is not None:
                process.stdout.close()


def _exit(reason: str) -> None:
    """The last resort of a process whose main thread cannot be reached."""
    _log.critical("%s, and its engine did not end by itself", reason)
    logging.shutdown()
    os._exit(70)


class TensorParallelRunner:
    """A ModelRunner over `ranks` processes. Make it with `load`. It has no room for adapters: they
    are not split among ranks."""

    def __init__(self, runner: TorchRunner, channel: Channel, workers: _Workers, folder: Path,
                 environment: dict[str, str | None]) -> None:  # fmt: skip
        self._runner = runner
        self._channel = channel
        self._workers = workers
        self._folder = folder
        self._environment = environment
        self._previous = 0
        self._closed = False
        # Rank 0's, which are every rank's; bytes are those of one rank.
        self.traits, self.loras, self.grammars = runner.traits, runner.loras, runner.grammars
        self.layers, self.block_size = runner.layers, runner.block_size
        self.kv_block_bytes, self.window_block_bytes = (
            runner.kv_block_bytes, runner.window_block_bytes,
        )  # fmt: skip
        self.window = runner.window

    @classmethod
    def load(
        cls,
        path: str,
        ranks: int,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        attention: str = "auto",
        block_size: int = 16,
        kv_dtype: KVDtype = "auto",
        max_model_len: int = 0,
        num_blocks: int = 0,
        kv_bytes: int = 0,
        rendezvous_seconds: float = 120.0,
        step_seconds: float = 300.0,
        on_lost: Callable[[str], None] = _exit,
        grace_seconds: float = GRACE_SECONDS,
    ) -> TensorParallelRunner:
        """Starts the ranks and loads every shard.

        `kv_bytes` is the KV memory of each rank. `on_lost` is called from another thread when a
        rank has died and `close` was not called within `grace_seconds`. Raises StartupError.
        """
        check_splits(read_config(path), ranks)
        check_divisible(meta_layers(path, dtype), ranks)
        present(f"cuda:{ranks - 1}" if device.startswith("cuda") else device)
        folder = Path(tempfile.mkdtemp(prefix="foveal-ranks-"))
        config = RankConfig(
            model_path=path,
            dtype=dtype,
            device=device,
            attention=attention,
            block_size=block_size,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            num_ranks=ranks,
            store=str(folder / "store"),
            rendezvous_seconds=rendezvous_seconds,
            step_seconds=step_seconds,
        )
        (folder / "ranks.json").write_bytes(msgspec.json.encode(config))
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        workers = _Workers(on_lost, grace_seconds)
        try:
            workers.start(config, folder / "ranks.json")
            os.environ.update(rank_environment(0, ranks))
            channel = join(config, 0)
            runner = load_shard(config, 0)
        except BaseException:
            _leave(workers, folder, before)
            raise
        made = cls(runner, channel, workers, folder, before)
        if num_blocks or kv_bytes:
            made.allocate_kv(num_blocks or kv_bytes // made.kv_block_bytes)
        return made

    @property
    def kv_pool_bytes(self) -> int:
        """Of one rank."""
        return self._runner.kv_pool_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on one rank."""
        return self._runner.weight_bytes

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def num_window_blocks(self) -> int:
        return self._runner.num_window_blocks

    @property
    def worker_processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """Ranks 1 ..., for supervision: their memory and CPU time are this engine's."""
        return tuple(self._workers.processes)

    def allocate_kv(
        self, num_blocks: int, *, num_window_blocks: int = 0, is_touched: bool = True
    ) -> None:
        """As TorchRunner's, on every rank; the others' pools are touched in any case."""
        if num_blocks >= 2:  # else only rank 0 refuses, and nobody waits for the others
            self._channel.send(Allocate(num_blocks, num_window_blocks))
        self._runner.allocate_kv(
            num_blocks, num_window_blocks=num_window_blocks, is_touched=is_touched
        )

    def execute(self, plan: StepPlan) -> StepResult:
        if self._workers.died.is_set():
            raise RankLost(self._workers.lost, self._workers.code)
        try:
            self._channel.send(Step(plan, self._previous))
            result = self._runner.execute(plan)
        except RuntimeError as error:
            # A broken connection shows before the watcher has seen the process end.
            if self._workers.died.wait(2.0):
                raise RankLost(self._workers.lost, self._workers.code) from error
            raise
        self._previous = checksum(result)
        return result

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> DoneStep:
        """The ranks compare their tokens after each step, so no step runs ahead, and none is
        interrupted: `between` is not called."""
        return DoneStep(self.execute(plan))

    def save_encoder(self, path: str, mm_hashes: Sequence[MMHash]) -> list[MMHash]:
        """See `ModelRunner`; encoders are replicated, so one rank's outputs are everybody's."""
        return self._runner.save_encoder(path, mm_hashes)

    def load_encoder(
        self, path: str, device: Mapping[MMHash, int], host: Mapping[MMHash, int]
    ) -> list[MMHash]:
        """See `ModelRunner`. Rank 0 reads first: the others are only told of what is good."""
        taken = self._runner.load_encoder(path, device, host)
        if taken:
            there = set(taken)
            self._channel.send(Warm(
                path,
                {key: count for key, count in device.items() if key in there},
                {key: count for key, count in host.items() if key in there},
            ))  # fmt: skip
        return taken

    def check_integrity(self) -> None:
        self._runner.check_integrity()

    def close(self) -> None:
        """Ends the ranks. May be called more than once, and after a rank was lost."""
        if self._closed:
            return
        self._closed = True
        self._workers.expect_end()
        if not self._workers.died.is_set():
            try:
                self._channel.send(Close())
            except RuntimeError as error:
                _log.warning("tensor parallel: the ranks could not be told to end: %s", error)
        self._runner.close()
        _leave(self._workers, self._folder, self._environment)


def _leave(workers: _Workers, folder: Path, environment: dict[str, str | None]) -> None:
    workers.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    shutil.rmtree(folder, ignore_errors=True)
