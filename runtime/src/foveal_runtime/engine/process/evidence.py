"""The record of what an engine is computing right now, kept where it outlives the process.

Written by `core` before each step, in a small file that the next process of the same address reads:
it tells the frontends which requests the last one may have died of. The file's second half is
where a fatal signal leaves its traceback, so a crash is told from being killed. Keys are opaque;
never raises once it is open.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from foveal_runtime.engine.types.request import Request
from foveal_runtime.mirror.messages import Bye, Death, Hello
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.wire import codec
from foveal_runtime.wire.transport import EngineTransport, LinkDown

_LOG = logging.getLogger(__name__)
NUM_PROOFS = 2
"""Outputs after which a request is new to an engine no longer: it has been through its encoders,
its prompt and a step of decoding there."""
TELL_SECONDS = 10.0
_MAX_KEYS = 1024
_HEAD = struct.Struct("<QdI")
_BYTES = _HEAD.size + _MAX_KEYS * codec.KEY_BYTES
_MAX_TEXT = 1 << 16


def is_new(request: Request) -> bool:
    """Whether it has not proven yet that this engine can run it."""
    return request.num_output_tokens - request.num_emitted < NUM_PROOFS


def suspects_of(requests: Iterable[Request]) -> tuple[bytes, ...]:
    """Keys of those that a step which computes for `requests` may die of: the one on trial, else
    those that are new here, else all. () when one of them has no key."""
    every = list(requests)
    new = [request for request in every if is_new(request)]
    on_trial = [request for request in new if request.on_trial]
    keys = dict.fromkeys(request.key for request in on_trial or new or every)
    return () if b"" in keys else tuple(keys)


class StepRecord:
    """The work under way. Without `path` it is kept in memory alone.

    Attributes:
        last: how the process before this one ended, if it did in the middle of its work.
        crash: the traceback that it left.
    """

    def __init__(self, boot: int, path: Path | None = None) -> None:
        self.last: Death | None = None
        self.crash = ""
        self._boot = boot
        self._under_way: list[tuple[bytes, ...]] = []
        self._written: tuple[bytes, ...] = ()
        self._path = path
        self._file = -1
        self._map: mmap.mmap | None = None
        if path is not None:
            try:
                self._open(path)
            except (OSError, ValueError) as error:
                _LOG.warning("what kills this engine will not be known: %s: %s", path, error)
                if self._file >= 0:
                    os.close(self._file)
                    self._file = -1

    def _open(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise OSError("it belongs to another user")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another engine of this name is running") from None
        text = os.pread(self._file, _MAX_TEXT, _BYTES)
        self._read(os.pread(self._file, _BYTES, 0), text, found.st_mtime)
        os.ftruncate(self._file, 0)
        # Bytes, not a hole: writing to a hole of a full disk through the map would be a SIGBUS.
        if os.write(self._file, bytes(_BYTES)) < _BYTES:
            raise OSError("there is no room for it")
        self._map = mmap.mmap(self._file, _BYTES)

    def _read(self, data: bytes, text: bytes, modified: float) -> None:
        """`modified`: a crash wrote its traceback then, long after the suspects' time perhaps."""
        if len(data) < _BYTES:
            return
        boot, at, count = _HEAD.unpack_from(data)
        size = codec.KEY_BYTES
        keys = [data[_HEAD.size + i * size :][:size] for i in range(min(count, _MAX_KEYS))]
        self.crash = text.decode("utf-8", "replace").strip()
        if keys:
            at = max(at, modified) if self.crash else at
            self.last = Death(boot, at, tuple(keys), bool(self.crash))

    def watch_crashes(self) -> None:
        """From now on a fatal signal leaves its traceback in the file."""
        if self._map is not None:
            faulthandler.enable(self._file)

    # ---- the core thread ------------------------------------------------------------------------
    def begin(self, suspects: tuple[bytes, ...]) -> None:
        """Before work that the process may die of. Several may be under way."""
        self._under_way.append(suspects)
        self._write()

    def end(self, *, newest: bool = False) -> None:
        """The oldest (or newest) work under way is over."""
        self._under_way.pop(-1 if newest else 0)
        self._write()

    @contextlib.contextmanager
    def during(self, key: bytes) -> Iterator[None]:
        """Work for one request that ends here, well or with a refusal."""
        self.begin((key,) if key else ())
        try:
            yield
        except (FovealError, codec.DecodeError):
            self.end(newest=True)
            raise
        self.end(newest=True)

    def _suspects(self) -> tuple[bytes, ...]:
        """() also when some of the work is nobody's in particular."""
        if not all(self._under_way):
            return ()
        return tuple(dict.fromkeys(key for keys in self._under_way for key in keys))

    def _write(self) -> None:
        keys = self._suspects()
        if self._map is None or keys == self._written:
            return
        self._written = keys
        count = len(keys) if len(keys) <= _MAX_KEYS else 0
        _HEAD.pack_into(self._map, 0, self._boot, 0.0, 0)  # not half of one and half of another
        if count:
            data = b"".join(keys)
            self._map[_HEAD.size : _HEAD.size + len(data)] = data
            _HEAD.pack_into(self._map, 0, self._boot, time.time(), count)

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def death(self, *, is_own: bool) -> Death | None:
        """Of this process, which ends now because of what is under way."""
        keys = self._suspects()
        if is_own and self._map is not None:
            with contextlib.suppress(OSError):
                os.write(self._file, b"the step loop failed\n")
        return Death(self._boot, time.time(), keys, is_own) if keys else None

    def close(self) -> None:
        """The process ends in peace: there is nothing to tell."""
        if self._map is not None and self._path is not None:
            faulthandler.disable()
            self._map.close()
            self._map = None
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Obituary:
    """While the next process loads: tells every frontend that asks how the last one died, since
    loading may take minutes and the suspects wait. A context manager around loading."""

    def __init__(self, make_transport: Callable[[], EngineTransport], death: Death | None) -> None:
        self._make_transport = make_transport
        self._death = death
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="obituary", daemon=True)

    def __enter__(self) -> None:
        if self._death is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            transport = self._make_transport()
        except Exception as error:  # the engine's own attempt says what is wrong
            _LOG.warning("cannot tell how the last process died: %s", error)
            return
        end = time.monotonic() + TELL_SECONDS
        try:
            while not self._is_over.is_set() and time.monotonic() < end:
                for fid, frames in transport.poll(0.1):
                    with contextlib.suppress(codec.DecodeError, LinkDown):
                        message = codec.decode_up(frames)
                        if isinstance(message, Hello):
                            bye = Bye(message.sid, "loading", self._death)
                            transport.send(fid, codec.encode_down(bye))
        finally:
            transport.close()
