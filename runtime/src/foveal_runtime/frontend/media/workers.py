"""The pool of media worker processes: decoding and HF processors, away from the HTTP process.

Owned by input_processor. Jobs wait in one bounded queue; each worker takes one at a time. A worker
that dies is replaced and its job given to another one, once; one that hangs is killed. Never
imports torch, Pillow or transformers, never pickles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from foveal_runtime.frontend.media import protocol
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import MediaInvalid, Overloaded, StartupError, from_wire
from foveal_runtime.plan.machine import Machine, look
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.telemetry.logs import request_id_of_task

log = logging.getLogger(__name__)

_SOCKET_BYTES = 4 << 20
_MAX_WORKERS = 8
_MIN_ITEM_BYTES, _MAX_ITEM_BYTES = 512 << 20, 4 << 30
_DOCUMENT = -1
"""The modality of a job that asks for the digests of a document's pages."""
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.5, 30.0


Data = bytes | memoryview


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `num_workers` 0 = from the CPU quota; `max_queue` jobs may wait, half of
    them of one client; a job that takes longer than `job_timeout_seconds` is given up, and one
    that draws all pages of a document after `document_timeout_seconds`; `max_memory_bytes` is what
    one job may map."""

    model_path: str
    namespace: bytes
    limits: ModalitiesConfig
    num_workers: int = 0
    max_queue: int = 512
    job_timeout_seconds: float = 120.0
    document_timeout_seconds: float = 60.0
    start_timeout_seconds: float = 300.0
    max_memory_bytes: int = _MAX_ITEM_BYTES
    module: str = "foveal_runtime.frontend.media.worker_main"


class Processed(NamedTuple):
    """A serialised item, or the digests of pages (32 bytes each), and what it took."""

    value: Data
    decode_seconds: float
    process_seconds: float


class Workers(Protocol):
    """What input_processor asks of a pool; `fake_worker.InlineWorkers` is the one for tests."""

    restarts: int
    num_busy: int

    @property
    def num_ready(self) -> int: ...

    @property
    def queue_length(self) -> int: ...

    async def process(
        self, modality: int, options: bytes, data: Data, client: str = "", page: int = -1
    ) -> Processed: ...

    async def page_digests(self, data: Data, client: str = "") -> Processed: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    modality: int
    options: bytes
    data: Data
    client: str
    page: int = -1
    attempts: int = 0
    origin: dict[str, str] = field(default_factory=lambda: {"request_id": request_id_of_task.get()})
    future: asyncio.Future[Processed] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def kind(self) -> str:
        return "document" if self.modality < 0 or self.page >= 0 else MODALITIES[self.modality]

    def message(self, number: int) -> protocol.ToWorker:
        if self.modality == _DOCUMENT:
            return protocol.Pages(number)
        return protocol.Process(number, self.modality, self.options, self.page)


class _Turns:
    """Waiting jobs: first come, first served within a client, and the clients take turns."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[_Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def num_of(self, client: str) -> int:
        return len(self._queues.get(client, ()))

    def append(self, job: _Job, *, is_first: bool = False) -> None:
        queue = self._queues.setdefault(job.client, deque())
        (queue.appendleft if is_first else queue.append)(job)

    def pop(self) -> _Job:
        client, queue = next(iter(self._queues.items()))
        del self._queues[client]
        job = queue.popleft()
        if queue:
            self._queues[client] = queue  # behind all others
        return job


class _Worker:
    """One live process and its end of the socket pair."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self.process = process
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._next_job = 1

    @property
    def is_dead(self) -> bool:
        try:
            return self.process.returncode is not None or not self._sock.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return not isinstance(error, BlockingIOError)  # nothing is said without a job

    async def load(self, message: protocol.Load) -> ProcessorInfo:
        await self._loop.sock_sendall(self._sock, protocol.encode(message))
        answer, _ = await self._receive()
        if isinstance(answer, protocol.Failed):
            raise from_wire(answer.code, answer.message)
        if not isinstance(answer, protocol.Ready):
            raise StartupError(f"media worker answered {type(answer).__name__}")
        return answer.info

    async def ask(self, job: _Job) -> Processed:
        number, self._next_job = self._next_job, self._next_job + 1
        head = protocol.encode(job.message(number), len(job.data))
        await self._loop.sock_sendall(self._sock, head)
        await self._loop.sock_sendall(self._sock, job.data)
        answer, body = await self._receive()
        if isinstance(answer, protocol.Failed) and answer.job == number:
            error = from_wire(answer.code, answer.message)
            error.param = answer.param or None
            raise error
        if not isinstance(answer, protocol.Done) or answer.job != number:
            raise ConnectionError("media worker answered another job")
        return Processed(body, answer.decode_seconds, answer.process_seconds)

    async def _receive(self) -> tuple[protocol.FromWorker, memoryview]:
        prefix = await self._exactly(protocol.PREFIX_BYTES)
        header_bytes, body_bytes = protocol.decode_prefix(bytes(prefix))
        header = await self._exactly(header_bytes)
        return protocol.FROM_WORKER.decode(header), await self._exactly(body_bytes)

    async def _exactly(self, count: int) -> memoryview:
        """Straight to where it stays: a stream would copy a value three times."""
        buffer = memoryview(bytearray(count))
        done = 0
        while done < count:
            done += (read := await self._loop.sock_recv_into(self._sock, buffer[done:]))
            if read == 0:
                raise ConnectionError("media worker closed its end")
        return buffer.toreadonly()

    async def close(self) -> None:
        """Returns when the process has ended, also where the caller is cancelled meanwhile."""
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        end = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.shield(end)
        finally:
            await end


_LINK_LOST = (OSError, ValueError, msgspec.MsgspecError)


class MediaWorkers:
    """Attributes: `restarts` and `retries` are plain counters, `num_busy` workers have a job."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.num_workers = settings.num_workers or default_num_workers(look(with_devices=False))
        self.restarts = 0
        self.retries = 0
        self._jobs = _Turns()
        self._wake = asyncio.Condition()
        self._slots: list[asyncio.Task[None]] = []
        self._live: dict[int, _Worker] = {}
        self.num_busy = 0
        self._info: asyncio.Future[ProcessorInfo] | None = None

    async def start(self) -> ProcessorInfo:
        """Starts the workers; returns when the first has loaded the processor and run an item.
        Raises StartupError when it cannot."""
        assert self._info is None, "started twice"
        self._info = asyncio.get_running_loop().create_future()
        self._slots = [
            asyncio.create_task(self._run_slot(index), name=f"media-worker-{index}")
            for index in range(self.num_workers)
        ]
        try:
            return await asyncio.shield(self._info)
        except BaseException:
            await self.close()
            raise

    @property
    def num_ready(self) -> int:
        return len(self._live)

    @property
    def queue_length(self) -> int:
        return len(self._jobs)

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._live.values()]

    async def process(
        self, modality: int, options: bytes, data: Data, client: str = "", page: int = -1
    ) -> Processed:
        """Decodes and processes one item, or one page of a document; clients take turns.

        Raises MediaInvalid, MediaTooLarge, InvalidRequest, or Overloaded when too many wait
        already. A cancelled caller's job is dropped if still queued.
        """
        return await self._run(_Job(modality, options, data, client, page))

    async def page_digests(self, data: Data, client: str = "") -> Processed:
        """Draws every page of a document; 32 bytes for each. Raises as `process` does."""
        return await self._run(_Job(_DOCUMENT, b"", data, client))

    async def _run(self, job: _Job) -> Processed:
        waiting, mine = len(self._jobs), self._jobs.num_of(job.client)
        if waiting >= self.settings.max_queue or mine >= max(1, self.settings.max_queue // 2):
            raise Overloaded(
                f"{waiting} media items wait for a worker already, {mine} of this client"
            )
        self._jobs.append(job)
        await self._notify()
        return await job.future

    async def close(self) -> None:
        """Ends all workers; waiting jobs fail with Overloaded."""
        for task in self._slots:
            task.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots = []
        while self._jobs:
            _fail(self._jobs.pop(), Overloaded("this server is shutting down"))

    async def _notify(self) -> None:
        async with self._wake:
            self._wake.notify()

    async def _next(self, worker: _Worker) -> _Job | None:
        """The next job for a worker; None once it is dead, and the job is another one's."""
        async with self._wake:
            while True:
                if worker.is_dead:
                    self._wake.notify()  # what woke this one may have been meant for a live one
                    return None
                while self._jobs:
                    job = self._jobs.pop()
                    if not job.future.done():
                        return job
                await self._wake.wait()

    async def _watch(self, worker: _Worker) -> None:
        """Wakes the slot of a worker that dies without a job, so that it is replaced at once."""
        await worker.process.wait()
        async with self._wake:
            self._wake.notify_all()

    async def _run_slot(self, index: int) -> None:
        """Keeps one worker alive and busy."""
        backoff_seconds = _MIN_BACKOFF_SECONDS
        while True:
            try:
                worker = await self._spawn()
            except Exception as error:  # load failed or timed out: said below, tried again
                assert self._info is not None
                if not self._info.done():
                    self._info.set_exception(
                        error if isinstance(error, StartupError) else StartupError(str(error))
                    )
                    return
                log.warning("media worker %d did not start: %s", index, error)
                await asyncio.sleep(backoff_seconds)
                backoff_seconds = min(backoff_seconds * 2, _MAX_BACKOFF_SECONDS)
                continue
            self._live[index] = worker
            watch = asyncio.create_task(self._watch(worker))
            try:
                num_done = await self._serve(worker)
            finally:
                watch.cancel()
                del self._live[index]
                await worker.close()
            self.restarts += 1
            if num_done:
                backoff_seconds = _MIN_BACKOFF_SECONDS
                continue
            # It may be what ends them as soon as they are up.
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(backoff_seconds * 2, _MAX_BACKOFF_SECONDS)

    async def _serve(self, worker: _Worker) -> int:
        """Feeds one worker until it dies; returns how many items it has answered."""
        num_done = 0
        while True:
            job = await self._next(worker)
            if job is None:
                log.warning("media worker %d ended without a job", worker.process.pid)
                return num_done
            job.attempts += 1
            self.num_busy += 1
            settings, is_item = self.settings, job.modality >= 0
            seconds = settings.job_timeout_seconds if is_item else settings.document_timeout_seconds
            try:
                result = await asyncio.wait_for(worker.ask(job), seconds)
            except asyncio.CancelledError:
                _fail(job, Overloaded("this server is shutting down"))
                raise
            except TimeoutError:
                _fail(job, MediaInvalid(f"{job.kind} took longer than {seconds:g} s to process"))
                log.warning(
                    "media worker %d hung and was killed", worker.process.pid, extra=job.origin
                )
                return num_done
            except _LINK_LOST as error:
                log.warning("media worker %d died: %r", worker.process.pid, error, extra=job.origin)
                await self._retry(job)
                return num_done
            except Exception as error:  # the item's own error, named by the worker
                _fail(job, error)
                num_done += 1
            else:
                num_done += 1
                if not job.future.done():
                    job.future.set_result(result)
            finally:
                self.num_busy -= 1

    async def _retry(self, job: _Job) -> None:
        if job.attempts >= 2:
            _fail(job, MediaInvalid(f"{job.kind} cannot be processed: it ended two media workers"))
            return
        self.retries += 1
        self._jobs.append(job, is_first=True)
        await self._notify()

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.settings.module, str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **_worker_environment()},
            )  # fmt: skip
        ours.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        worker = _Worker(process, ours)
        settings = self.settings
        try:
            info = await asyncio.wait_for(
                worker.load(protocol.Load(
                    settings.model_path, settings.namespace, settings.limits,
                    max_memory_bytes=settings.max_memory_bytes,
                )),
                settings.start_timeout_seconds,
            )  # fmt: skip
        except _LINK_LOST as error:
            await worker.close()
            raise StartupError("media worker ended while loading the processor") from error
        except BaseException:
            await worker.close()
            raise
        assert self._info is not None
        if not self._info.done():
            self._info.set_result(info)
        elif not self._info.exception() and self._info.result().identity != info.identity:
            await worker.close()
            raise StartupError("the processor's files changed under a running server")
        return worker


def _fail(job: _Job, error: BaseException) -> None:
    if not job.future.done():
        job.future.set_exception(error)


def _worker_environment() -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "MALLOC_ARENA_MAX": "2",  # one for each thread of FFmpeg would use up what a worker may map
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def default_num_workers(here: Machine) -> int:
    """One CPU stays with the HTTP process; more than eight workers outrun the network."""
    return max(1, min(_MAX_WORKERS, int(here.cpus) - 1))


def item_memory_bytes(limit_bytes: int, cache_bytes: int, num_workers: int) -> int:
    """What one item may map: a worker's part of the memory that the plan gave this pod, its caches
    left out, since everything beside them was planned for the workers' largest items.

    Args:
        limit_bytes: memory limit of the pod, or the machine's memory; 0 = not known.
        cache_bytes, num_workers: of all processes of the pod.
    """
    share = (limit_bytes - cache_bytes) // max(1, num_workers) if limit_bytes else _MAX_ITEM_BYTES
    return max(_MIN_ITEM_BYTES, min(_MAX_ITEM_BYTES, share))
