"""The layers of an image as files of a directory, as a registry's image is put together.

Archives are hostile until shown otherwise: nothing is written outside the directory, through a
link, or over what a download keeps there itself.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

from foveal_runtime.main.revision import SOURCE_FILE
from foveal_runtime.plan.quantity import short_bytes

_MAX_FILES = 100_000
_MAX_HEADER_BYTES = 1 << 20
_OURS = (".cache", SOURCE_FILE)  # names at the top that an image neither writes nor removes


def check_room(needed_bytes: int, directory: Path) -> None:
    """Raises ValueError where the disk is too full."""
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ValueError(
            f"needs {short_bytes(needed_bytes)} on the disk of {directory}, which has "
            f"{short_bytes(free)} free: free some"
        )


class _Bounded:
    """What tarfile reads from. It would take headers as long as the archive says into memory; with
    `left` it gets so many bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.left = stream, _MAX_HEADER_BYTES
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError(f"an entry's header has over {_MAX_HEADER_BYTES} bytes")
        data: bytes = self._stream.read(size)
        return data


def unpack(packed: Path, directory: Path) -> None:
    """Applies a layer: files, directories, symbolic links that stay inside, and what it deletes.

    Raises tarfile.TarError, OSError or ValueError for any other entry."""
    with packed.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with gzip.open(packed) if is_gzip else packed.open("rb") as stream:
        bounded: Any = _Bounded(stream)
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            for _ in range(_MAX_FILES):
                bounded.left = _MAX_HEADER_BYTES
                member = tar.next()
                if member is None:
                    return
                bounded.left = member.size + _MAX_HEADER_BYTES  # padding is read, too
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                _place(tar, member, directory)
    raise ValueError(f"a layer has more than {_MAX_FILES} entries: no model has")


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> None:
    parts = [one for one in member.name.split("/") if one not in ("", ".")]
    if not parts or parts[0] in _OURS:  # the root is there
        return
    path = directory.joinpath(*parts)
    above = [directory.joinpath(*parts[:depth]) for depth in range(1, len(parts))]
    # Whatever the filter of this Python overlooks: nothing is written through a link.
    if ".." in parts or any(one.is_symlink() for one in above):
        raise ValueError(f"a layer's entry {member.name!r} would leave its folder")
    if path.name.startswith(".wh."):
        hidden = path.name.removeprefix(".wh.")
        if hidden in ("", ".", "..") or hidden.startswith(".wh."):
            raise ValueError(f"a layer has {member.name!r}: build the image in one layer")
        if len(parts) > 1 or hidden not in _OURS:
            _remove(path.with_name(hidden))
        return
    if not (member.isreg() or member.isdir() or member.issym()):
        raise ValueError(f"a layer's entry {member.name!r} is no file: copy what it stands for")
    check_room(member.size, directory)
    if path.is_symlink() or not (member.isdir() and path.is_dir()):
        _remove(path)
    tar.extract(member, directory, filter="data")


def check_links(directory: Path) -> None:
    """Raises ValueError for links that lead outside since a directory has replaced another link."""
    root = os.path.realpath(directory)
    for path in directory.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise ValueError(f"a layer's link {path.name!r} would leave its folder")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
