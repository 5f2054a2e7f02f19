"""Models of the Hugging Face hub in its usual cache: downloaded, resumed and verified.

HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are the hub library's own and obeyed by it. Small
files come first: a model that cannot be served is refused before its weights are downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from foveal_runtime.main.fetch import IGNORED
from foveal_runtime.main.local.model import check_description, check_files, is_hub_offline
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.quantity import short_bytes

_SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
_CHUNK_BYTES = 1 << 20


def download(repository: str, revision: str = "") -> Path:
    """The snapshot's directory. Asks the hub which files there are, and downloads those that the
    cache lacks. Raises StartupError in one line with a remedy."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError

    def fetch(commit: str, **more: Any) -> Any:
        return snapshot_download(repository, revision=commit or None, **more)

    try:
        if is_hub_offline():
            return _checked(Path(fetch(revision, local_files_only=True)))
        small = Path(fetch(revision, allow_patterns=_SMALL))
        check_description(small, repository)
        # One commit for all files, also of a download that an edit of the branch cuts in two.
        commit = small.name
        try:
            wanted = fetch(commit, ignore_patterns=IGNORED, dry_run=True)
        except DryRunError:  # no network: the cache may have everything
            return _checked(Path(fetch(revision, local_files_only=True)))
        missing = [file for file in wanted if file.will_download]
        _check_room(repository, small, sum(file.file_size for file in missing))
        if missing:
            size = short_bytes(sum(file.file_size for file in missing))
            print(f"downloading {len(missing)} files ({size}) of {repository} into {small}",
                  flush=True)  # fmt: skip
        with _ended_at_once():
            path = Path(fetch(commit, ignore_patterns=IGNORED))
    except LocalEntryNotFoundError as error:
        raise StartupError(_not_in_cache(repository)) from error
    except HfHubHTTPError as error:
        raise StartupError(_refusal(repository, revision, error)) from error
    except (OSError, ValueError) as error:
        raise StartupError(f"{repository}: {_first_line(error)}") from error
    for file in missing:
        _verify(repository, path / file.filename)
    return _checked(path)


@contextlib.contextmanager
def _ended_at_once() -> Iterator[None]:
    """Ctrl-C ends this process: the hub's library would first finish the files that it began."""

    def end(number: int, frame: FrameType | None) -> None:
        for one in Path("/proc/self/fd").glob("*"):
            with contextlib.suppress(OSError):
                if one.readlink().suffix == ".incomplete":  # of no use to the next start
                    one.readlink().unlink()
        print("foveal-runtime: interrupted; the next start continues", file=sys.stderr, flush=True)
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _checked(path: Path) -> Path:
    check_files(path)
    return path


def _check_room(repository: str, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(
            f"{repository} needs {short_bytes(needed)} on the disk of {folder}, which has "
            f"{short_bytes(free)} free: free some, or set HF_HOME to a directory on another disk"
        )


def _verify(repository: str, file: Path) -> None:
    """Content against the digest that the hub names it by. A file that differs is removed, so that
    the next start downloads it again."""
    blob = file.resolve()
    found: Any
    if len(blob.name) == 64:
        found = hashlib.sha256()
    elif len(blob.name) == 40:  # as git names it
        found = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        return
    with blob.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
    if found.hexdigest() != blob.name:
        blob.unlink()
        raise StartupError(
            f"{repository}: {file.name} was damaged on its way and is removed: start again, which "
            "downloads it again"
        )


def _not_in_cache(repository: str) -> str:
    if is_hub_offline():
        return (
            f"{repository} is not in the cache below HF_HOME, and HF_HUB_OFFLINE forbids to "
            "download it: unset it, or give a directory"
        )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return (
        f"{repository} is not in the cache, and the hub at {endpoint} cannot be reached: check the "
        "network, HF_ENDPOINT and proxies, or give a directory"
    )


def _refusal(repository: str, revision: str, error: Any) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = getattr(getattr(error, "response", None), "status_code", 0)
    token = "HF_TOKEN" if os.environ.get("HF_TOKEN") else ""
    if isinstance(error, GatedRepoError):
        what = "accept its licence on its page" + ("" if token else ", and set HF_TOKEN")
        return f"{repository} is gated: {what}"
    if status == 401 and token:
        return f"{repository}: the hub does not accept the token in HF_TOKEN: make a new one"
    if isinstance(error, RevisionNotFoundError):
        return f"{repository} has no revision {revision}: give a branch, tag or commit of it"
    if isinstance(error, RepositoryNotFoundError):
        hint = "check the name" + ("" if token else "; if it is private, set HF_TOKEN")
        return f"the hub has no model {repository}, and there is no such directory here: {hint}"
    return f"{repository}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
