"""A media worker: decodes and processes one item at a time for an HTTP process.

Started by `workers.MediaWorkers` as `python -m foveal_runtime.frontend.media.worker_main FD`, with
one end of a socket pair. Loads the processor once, proves its splice, then answers until the other
end closes. Never opens another socket, a URL or a file beside the model directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from foveal_runtime.frontend.media import protocol
from foveal_runtime.plan.errors import EngineFailure, FovealError
from foveal_runtime.telemetry.deferred import defer
from foveal_runtime.telemetry.memory import release_free_memory, without_collections

BUFFER_BYTES = 4 << 20


class Link:
    """Blocking frames over the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)

    def receive(self) -> tuple[protocol.ToWorker, memoryview] | None:
        """The next message and its body; None when the HTTP process is gone."""
        prefix = self._exactly(protocol.PREFIX_BYTES)
        if prefix is None:
            return None
        header_bytes, body_bytes = protocol.decode_prefix(bytes(prefix))
        header, body = self._exactly(header_bytes), self._exactly(body_bytes)
        if header is None or body is None:
            return None
        return protocol.TO_WORKER.decode(header), body

    def send(self, message: protocol.FromWorker, body: bytes = b"") -> None:
        self._sock.sendall(protocol.encode(message, len(body)))
        if body:
            self._sock.sendall(body)

    def _exactly(self, count: int) -> memoryview | None:
        buffer = memoryview(bytearray(count))
        done = 0
        while done < count:
            read = self._sock.recv_into(buffer[done:])
            if read == 0:
                return None
            done += read
        return buffer


def _limit_process(load: protocol.Load) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(load.num_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def _limit_memory(max_memory_bytes: int) -> None:
    """A decompression bomb that slips through ends in MemoryError, one request's 4xx.

    Counted from what is mapped once the processor is loaded: torch maps far more than it uses.
    """
    if max_memory_bytes <= 0:
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = mapped + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _options(raw: bytes) -> dict[str, Any]:
    options = json.loads(raw or b"{}")
    return options if isinstance(options, dict) else {}


class Processor(Protocol):
    """What a worker runs: `processors.ItemProcessor`, or `fake_worker`'s."""

    def examine(self, namespace: bytes) -> protocol.ProcessorInfo: ...

    def decode(
        self, modality: int, data: memoryview, options: Mapping[str, Any], page: int = -1
    ) -> Any: ...

    def page_digests(self, data: memoryview) -> list[bytes]: ...

    def process(self, modality: int, media: Any, options: Mapping[str, Any]) -> bytes: ...


def load_processor(load: protocol.Load) -> Processor:
    """The model's own. Imports torch and transformers. Raises StartupError."""
    defer(needs_shapes=False)  # media have values
    from foveal_runtime.frontend.media.processors import ItemProcessor

    return ItemProcessor(load.model_path, load.limits)


def serve(link: Link, make: Callable[[protocol.Load], Processor] = load_processor) -> int:
    """Answers until the link closes. Exit code 2 when the model cannot be loaded."""
    first = link.receive()
    if first is None or not isinstance(first[0], protocol.Load):
        return 2
    load = first[0]
    _limit_process(load)
    try:
        with without_collections():
            processor = make(load)
        info = processor.examine(load.namespace)
    except FovealError as error:
        link.send(protocol.Failed(0, error.code, error.message))
        return 2
    except Exception as error:  # any other reason the processor cannot start: one line, not a trace
        link.send(protocol.Failed(0, "startup_error", f"{type(error).__name__}: {error}"[:500]))
        return 2
    release_free_memory()
    _limit_memory(load.max_memory_bytes)
    link.send(protocol.Ready(info))
    while (received := link.receive()) is not None:
        message, body = received
        if not isinstance(message, protocol.Load):
            _answer(link, processor, message, body)
    return 0


def _answer(
    link: Link, processor: Processor, message: protocol.Process | protocol.Pages, body: memoryview
) -> None:
    begin = middle = time.perf_counter()
    try:
        if isinstance(message, protocol.Pages):
            value = b"".join(processor.page_digests(body))
            middle = time.perf_counter()
        else:
            options = _options(message.options)
            media = processor.decode(message.modality, body, options, message.page)
            middle = time.perf_counter()
            value = processor.process(message.modality, media, options)
    except FovealError as error:
        link.send(protocol.Failed(message.job, error.code, error.message, error.param or ""))
    except MemoryError:
        link.send(protocol.Failed(
            message.job, "media_too_large", "media needs more memory than a media worker has"
        ))  # fmt: skip
    except Exception as error:  # a bug of ours: that one request fails, with a name to search for
        link.send(protocol.Failed(
            message.job, EngineFailure.code, f"media worker: {type(error).__name__}: {error}"[:300]
        ))  # fmt: skip
    else:
        end = time.perf_counter()
        link.send(protocol.Done(message.job, middle - begin, end - middle), value)


def main(arguments: list[str], make: Callable[[protocol.Load], Processor] = load_processor) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the HTTP process, which closes us
    sock = socket.socket(fileno=int(arguments[0]))
    # Libraries print; nothing they say may reach anything but the log.
    sys.stdout = sys.stderr
    try:
        return serve(Link(sock), make)
    except (BrokenPipeError, ConnectionResetError):
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
