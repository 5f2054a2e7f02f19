"""Values in a tmpfs that the pods of one node share: the format, the reader and the writer.

One immutable file per value, `mm/<frontend boot>/<seq>-<hash>`. Engines map files read-only and
check name, header and digest before they use one; a name is never used again, so what was checked
once stays true. A file that is gone is simply absent (the protocol asks for the value). Nobody
counts readers: the kernel frees pages with the last link and mapping.

Frontends write each value once and free by an LRU and a budget of their own. A file counts against
the budget until it is unlinked *and* every engine that was sent it has released it, because until
then its pages are charged to this pod. What does not fit goes inline. The folder is locked while
its writer lives; whoever starts next removes the folders of dead ones.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import resource
import shutil
import stat
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from foveal_runtime.mirror.messages import SharedValue
from foveal_runtime.mirror.store import Buffer
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.codec import BadValue, digest

_LOG = logging.getLogger(__name__)
FOLDER = "mm"
MAGIC = b"FSV1"
HEADER = struct.Struct("<4s4xQ32s8s8x")
HEADER_BYTES = HEADER.size
CGROUP_LIMIT_FILE = "/sys/fs/cgroup/memory.max"
MAP_COUNT_FILE = "/proc/sys/vm/max_map_count"
DEFAULT_MAP_COUNT = 65530
_NAME = re.compile(r"([0-9a-f]{16})/([0-9]{1,20}-([0-9a-f]{64}))")

assert HEADER_BYTES == 64, "values start at a multiple of 64"


def pack_header(mm_hash: MMHash, length: int, value_digest: bytes) -> bytes:
    return HEADER.pack(MAGIC, length, mm_hash, value_digest)


def check_capacity(
    directory: Path, budget_bytes: int, cgroup_limit_file: str = CGROUP_LIMIT_FILE
) -> None:
    """Raises StartupError when `directory` cannot hold `budget_bytes`, or the memory limit of
    this container cannot."""
    try:
        facts = os.statvfs(directory)
    except OSError as error:
        raise StartupError(f"shm_directory {directory}: {error.strerror}") from error
    size_bytes = facts.f_blocks * facts.f_frsize
    if size_bytes < budget_bytes:
        raise StartupError(
            f"shm_bytes is {budget_bytes}, but {directory} holds only {size_bytes} bytes: "
            "lower shm_bytes or mount a larger tmpfs (docker: --shm-size; Kubernetes: sizeLimit "
            "of the memory volume)"
        )
    try:
        limit = Path(cgroup_limit_file).read_text().strip()
    except OSError:
        return
    if limit.isdigit() and int(limit) < budget_bytes:
        raise StartupError(
            f"shm_bytes is {budget_bytes}, above this container's memory limit of {limit} bytes: "
            "shared values count against it"
        )


def max_mappings(map_count_file: str = MAP_COUNT_FILE) -> int:
    """How many values this process may map: each keeps a descriptor and an entry of the kernel's
    map, and sockets, files and the allocator need the other half of both."""
    limit = DEFAULT_MAP_COUNT
    with suppress(OSError, ValueError):
        limit = int(Path(map_count_file).read_text())
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (limit if descriptors == resource.RLIM_INFINITY else min(limit, descriptors)) // 2


class SharedReader:
    """The engine's side: maps values of any frontend of this node.

    `open` fits `wire.codec.open_values(..., open_shared=reader.open)`. `max_mapped` values at a
    time are mapped; None: see `max_mappings`.
    """

    def __init__(self, directory: Path, max_mapped: int | None = None) -> None:
        self.root = directory / FOLDER
        self.max_mapped = max_mappings() if max_mapped is None else max_mapped
        self.num_opened = 0
        self.num_absent = 0
        self.num_damaged = 0
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._is_told = False

    def open(self, ref: SharedValue, mm_hash: MMHash) -> Buffer | None:
        """A read-only view of the value; None when the file is gone, cannot be mapped, or is not
        what the reference says: then the value is asked for, and comes inline. (Ending the session
        would not help: the frontend would send the same name again.) Raises BadValue for a name
        that is not ours."""
        match = _NAME.fullmatch(ref.name)
        if match is None or match[3] != mm_hash.hex():
            raise BadValue("the name of a shared value is malformed")
        if len(self._mapped) >= self.max_mapped:
            self._note_absent(
                f"{self.max_mapped} are mapped, half of what the limit of open files (ulimit -n) "
                "and vm.max_map_count allow: raise the lower one"
            )
            return None
        try:
            mapping = self._map(match[1], match[2], HEADER_BYTES + ref.length)
        except FileNotFoundError:
            self._note_absent()
            return None
        except (OSError, ValueError) as error:
            self._note_absent(f"{ref.name}: {error}")
            return None
        if mapping is None:
            self._note_damaged(ref, "has another size")
            return None
        view = memoryview(mapping)
        wrong = self._wrong(view, ref, mm_hash)
        if wrong:
            self._note_damaged(ref, wrong)
            return None
        self.num_opened += 1
        self._mapped.add(mapping)
        return view[HEADER_BYTES:]

    def _note_absent(self, why: str = "") -> None:
        """Told once: a limit that is reached stays so for every value that follows."""
        self.num_absent += 1
        if why and not self._is_told:
            self._is_told = True
            _LOG.warning("shared values cannot be mapped and are sent inline instead: %s", why)

    def _note_damaged(self, ref: SharedValue, why: str) -> None:
        self.num_damaged += 1
        _LOG.error("shared value %s %s: it is asked for again", ref.name, why)

    def _map(self, folder: str, name: str, size_bytes: int) -> mmap.mmap | None:
        """The file; None when it has another size. Raises OSError or ValueError."""
        descriptor = self._open_file(folder, name)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != size_bytes:
                return None
            return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def _open_file(self, folder: str, name: str) -> int:
        """Step by step without following links: a name never leads out of the root."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        root = os.open(self.root, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            parent = os.open(folder, flags | os.O_DIRECTORY, dir_fd=root)
            try:
                return os.open(name, flags | os.O_NONBLOCK, dir_fd=parent)
            finally:
                os.close(parent)
        finally:
            os.close(root)

    def _wrong(self, view: memoryview, ref: SharedValue, mm_hash: MMHash) -> str:
        """The header says what is inside, the digest that it is whole; "" when it is."""
        magic, length, inside, value_digest = HEADER.unpack_from(view)
        if magic != MAGIC or length != ref.length or inside != mm_hash:
            return "has the header of another value"
        if value_digest != ref.digest or digest(view[HEADER_BYTES:]) != ref.digest:
            return "is damaged"
        return ""


LOCK = "lock"


@dataclass(slots=True, eq=False)
class SharedFile:
    """One value's file. `holders`: engines that were sent its name and have not released it."""

    name: str
    size_bytes: int
    digest: bytes
    holders: set[str] = field(default_factory=set)


class SharedWriter:
    """One writer per frontend process; `frontend_boot` is a u64 that changes with every start.

    Raises StartupError when the folder cannot be made. `close` removes everything.
    """

    def __init__(self, directory: Path, frontend_boot: int, budget_bytes: int) -> None:
        self.root = directory / FOLDER
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.files: OrderedDict[MMHash, SharedFile] = OrderedDict()
        self.num_written = self.num_reused = self.num_swept = 0
        self.num_no_room = self.num_failed = 0
        self._sequence = 0
        self._boot = f"{frontend_boot:016x}"
        self.folder = self.root / self._boot
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o770)
            self._lock = self._make_folder()
        except OSError as error:
            raise StartupError(f"shm_directory {directory}: {error.strerror}") from error
        self.num_swept = sweep(self.root)

    def _make_folder(self) -> int:
        """Locked before it has its name. A sweep that comes between making and locking it takes
        it away once: then it is made again."""
        hidden = self.root / f".{self._boot}"
        for last in (False, False, True):
            hidden.mkdir(mode=0o750)
            try:
                lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
                fcntl.flock(lock, fcntl.LOCK_EX)
                hidden.rename(self.folder)
                return lock
            except FileNotFoundError:
                if last:
                    raise
        raise AssertionError("unreachable")

    # ---- questions -----------------------------------------------------------------------------
    def lookup(self, mm_hash: MMHash) -> str | None:
        """The name to send for a value that is written already."""
        file = self.files.get(mm_hash)
        return None if file is None else file.name

    # ---- changes -------------------------------------------------------------------------------
    def put(self, mm_hash: MMHash, data: Buffer, value_digest: bytes) -> str | None:
        """Writes a value once. Returns its name, for `SendValue.shared_name`; None: no room or no
        luck, send it inline. So goes a value that differs from the one in the file while an engine
        holds that; else it gets a file of its own."""
        known = self.files.get(mm_hash)
        if known is not None and known.digest != value_digest:
            if known.holders:
                self.num_no_room += 1
                return None
            self._unlink(mm_hash)
            known = None
        if known is not None:
            self.files.move_to_end(mm_hash)
            self.num_reused += 1
            return known.name
        size_bytes = HEADER_BYTES + len(data)
        if not self._make_room(size_bytes):
            self.num_no_room += 1
            return None
        self._sequence += 1
        leaf = f"{self._sequence}-{mm_hash.hex()}"
        try:
            self._write(leaf, pack_header(mm_hash, len(data), value_digest), data)
        except OSError:
            self.num_failed += 1
            return None
        self.files[mm_hash] = SharedFile(f"{self._boot}/{leaf}", size_bytes, value_digest)
        self.used_bytes += size_bytes
        self.num_written += 1
        return f"{self._boot}/{leaf}"

    def sent(self, mm_hash: MMHash, engine_id: str) -> None:
        """The name went to `engine_id`: its mapping keeps the pages until it lets go."""
        file = self.files.get(mm_hash)
        if file is not None:
            file.holders.add(engine_id)

    def reconcile(self, engine_id: str, is_held: Callable[[MMHash], bool]) -> None:
        """After a note or WELCOME of `engine_id`: forgets what it no longer holds, that is what
        its link neither believes in nor has an unfinished request for."""
        for mm_hash, file in self.files.items():
            if engine_id in file.holders and not is_held(mm_hash):
                file.holders.discard(engine_id)

    def forget_engine(self, engine_id: str) -> None:
        """The engine's process is gone and its mappings with it."""
        self.reconcile(engine_id, lambda _: False)

    def close(self) -> None:
        if self._lock < 0:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        self.files.clear()
        self.used_bytes = 0

    # ---- internals -----------------------------------------------------------------------------
    def _make_room(self, size_bytes: int) -> bool:
        """Unlinks least recently used files that nobody holds; unlinking others frees nothing."""
        missing = self.used_bytes + size_bytes - self.budget_bytes
        chosen = []
        for mm_hash, file in self.files.items():
            if missing <= 0:
                break
            if not file.holders:
                chosen.append(mm_hash)
                missing -= file.size_bytes
        if missing > 0:
            return False
        for mm_hash in chosen:
            self._unlink(mm_hash)
        return True

    def _unlink(self, mm_hash: MMHash) -> None:
        file = self.files.pop(mm_hash)
        self.used_bytes -= file.size_bytes
        with suppress(OSError):
            os.unlink(self.root / file.name)

    def _write(self, leaf: str, header: bytes, data: Buffer) -> None:
        """Under another name until whole. Space is taken first: a full tmpfs is an error here,
        not a signal later."""
        hidden, final = self.folder / f".{leaf}", self.folder / leaf
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(descriptor, 0, len(header) + len(data))
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(header)
                file.write(data)
            os.rename(hidden, final)
        except OSError:
            with suppress(OSError):
                os.unlink(hidden)
            raise
        finally:
            os.close(descriptor)

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(file.size_bytes for file in self.files.values())
        assert self.used_bytes <= self.budget_bytes
        on_disk = {entry.name for entry in self.folder.iterdir() if entry.name != LOCK}
        assert on_disk == {Path(file.name).name for file in self.files.values()}


def sweep(root: Path) -> int:
    """Removes the folders of writers that are dead. Returns their number; never fails."""
    swept = 0
    with suppress(OSError):
        for folder in list(root.iterdir()):
            if _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
                swept += 1
    return swept


def _is_dead(folder: Path) -> bool:
    """Nobody holds its lock. The kernel lets go of it with its process, however that ends."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
