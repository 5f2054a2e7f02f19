"""Grammars of requests, compiled in a process that can be killed before any engine sees them.

One of these in each HTTP process; the worker starts with the first grammar and again after one that
took too much. Answers are kept by content, refusals too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import select
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from foveal_runtime.frontend.protocol.constraints import Wanted
from foveal_runtime.plan.errors import (
    EngineFailure,
    FovealError,
    InvalidRequest,
    RateLimited,
    Unsupported,
    from_wire,
)
from foveal_runtime.plan.sampling import grammar_version
from foveal_runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
_WORKER = "foveal_runtime.frontend.grammars.worker"
MAX_BYTES = 256 * 1024
MAX_CACHED = 1024
MAX_CACHED_BYTES = 4 << 20
MAX_QUEUED = 32
START_SECONDS = 60.0
JOB_SECONDS = 20.0
"""Beyond the CPU time that a job may take: for a machine that gives the worker none."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """`relaxed`: what of a schema that is not strict could not be enforced."""

    grammar: str
    relaxed: tuple[str, ...] = ()


class Compiler:
    """`compile` is called by handlers; `close` when the process ends."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: OrderedDict[bytes, tuple[dict[str, Any], int]] = OrderedDict()
        self._known_bytes = 0
        self._num_queued = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")

    @property
    def known_bytes(self) -> int:
        """Of the answers that are remembered, with what each takes besides its text."""
        return self._known_bytes + len(self._known) * 1024

    async def compile(self, wanted: Wanted | None) -> Compiled:
        """The grammar of a request, "" for none. Raises InvalidRequest naming field and path."""
        if wanted is None:
            return Compiled("")
        if not grammar_version():
            raise Unsupported(f"{wanted.param} needs llguidance, which is not installed here",
                              param=wanted.param)  # fmt: skip
        self._metrics.inc("foveal_constrained_requests", kind=wanted.kind)
        try:
            return await self._compile(wanted)
        except InvalidRequest as error:
            self._metrics.inc("foveal_grammars_refused", code=error.code)
            raise

    async def _compile(self, wanted: Wanted) -> Compiled:
        job = json.dumps([wanted.kind, wanted.source, wanted.strict]).encode()
        if len(job) > MAX_BYTES:
            raise _refusal(wanted, "schema_too_large", f"{len(job)} bytes; at most {MAX_BYTES}", "")
        key = hashlib.blake2b(job, digest_size=16).digest()
        answer, _ = self._known.get(key, (None, 0))
        if answer is None:
            if self._num_queued >= MAX_QUEUED:
                raise RateLimited(f"{self._num_queued} grammars wait to be compiled")
            self._num_queued += 1
            begin = time.perf_counter()
            loop = asyncio.get_running_loop()
            try:
                answer = await loop.run_in_executor(self._thread, functools.partial(self._ask, job))
            finally:
                self._num_queued -= 1
            self._metrics.observe("foveal_grammar_compile_seconds", time.perf_counter() - begin)
            self._keep(key, answer)
        else:
            self._known.move_to_end(key)
        if "grammar" not in answer:
            raise _refusal(wanted, answer["code"], answer["message"], answer["path"])
        return Compiled(answer["grammar"], tuple(answer["relaxed"]))

    def _keep(self, key: bytes, answer: dict[str, Any]) -> None:
        if key in self._known:
            return
        size = len(json.dumps(answer))
        self._known[key] = answer, size
        self._known_bytes += size
        while len(self._known) > MAX_CACHED or self._known_bytes > MAX_CACHED_BYTES:
            self._known_bytes -= self._known.popitem(last=False)[1][1]

    def _ask(self, job: bytes) -> dict[str, Any]:
        """In the one thread that speaks to the worker."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(job + b"\n")
            process.stdin.flush()
            line = _read_line(process, JOB_SECONDS)
        except OSError:
            line = b""
        if not line:
            self._end()
            return {
                "code": "schema_too_slow", "path": "",
                "message": "it takes too much time or memory to compile; simplify it",
            }  # fmt: skip
        found: dict[str, Any] = json.loads(line)
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if not _read_line(self._process, START_SECONDS):
                self._end()
                raise EngineFailure("the process that compiles grammars does not start")
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written yet has nobody to read it
                pipe.close()

    def close(self) -> None:
        """Ends the worker, whatever it does."""
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown()
        self._end()


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """A line of its output; b"" when it ended, or says nothing for that long."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


def _refusal(wanted: Wanted, code: str, message: str, path: str) -> FovealError:
    where = f"{wanted.param} at {path}" if path else wanted.param
    hint = "; leave it out" if code == "schema_unsupported" else ""
    if code == "schema_unsupported" and wanted.kind == "json" and wanted.strict:
        hint = "; leave it out, or send strict: false"
    error = from_wire(code, f"{where}: {message}{hint}")
    error.param = wanted.param
    return error
