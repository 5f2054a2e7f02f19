"""Values in a tmpfs that the pods of one node share: the format, and the engine's side.

One immutable file per value, `mm/<frontend boot>/<seq>-<hash>`, made by `shm_writer`. Engines map
files read-only and check name, header and digest before they use one; a name is never used again,
so what was checked once stays true. A file that is gone is simply absent (the protocol asks for the
value). Nobody counts readers: the kernel frees pages with the last link and mapping.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import stat
import struct
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


class SharedReader:
    """The engine's side: maps values of any frontend of this node.

    `open` fits `wire.codec.open_values(..., open_shared=reader.open)`.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / FOLDER
        self.num_opened = 0
        self.num_absent = 0
        self.num_damaged = 0

    def open(self, ref: SharedValue, mm_hash: MMHash) -> Buffer | None:
        """A read-only view of the value; None when the file is gone, or is not what the reference
        says: then the value is asked for, and comes inline. (Ending the session would not help: the
        frontend would send the same name again.) Raises BadValue for a name that is not ours."""
        match = _NAME.fullmatch(ref.name)
        if match is None or match[3] != mm_hash.hex():
            raise BadValue("the name of a shared value is malformed")
        descriptor = self._open_file(match[1], match[2])
        if descriptor is None:
            self.num_absent += 1
            return None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != HEADER_BYTES + ref.length:
                self._note_damaged(ref, "has another size")
                return None
            mapping = mmap.mmap(descriptor, facts.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        view = memoryview(mapping)
        wrong = self._wrong(view, ref, mm_hash)
        if wrong:
            self._note_damaged(ref, wrong)
            return None
        self.num_opened += 1
        return view[HEADER_BYTES:]

    def _note_damaged(self, ref: SharedValue, why: str) -> None:
        self.num_damaged += 1
        _LOG.error("shared value %s %s: it is asked for again", ref.name, why)

    def _open_file(self, folder: str, name: str) -> int | None:
        """Step by step without following links: a name never leads out of the root."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            root = os.open(self.root, os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            parent = os.open(folder, flags | os.O_DIRECTORY, dir_fd=root)
            try:
                return os.open(name, flags | os.O_NONBLOCK, dir_fd=parent)
            finally:
                os.close(parent)
        except OSError:
            return None
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
