"""`foveal-runtime fetch URI --to DIRECTORY`: puts a model's files where pods look for them.

Run by the operator's fetch Job and by users. Downloads beside the target and renames at the end,
so a directory that exists is complete; a broken download resumes. Notes which commit it fetched
(revision.py). Needs no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from foveal_runtime.main.bars import Bars
from foveal_runtime.main.download import Progress, fill, told
from foveal_runtime.main.registry import download, pinned
from foveal_runtime.main.revision import Source, write_source
from foveal_runtime.plan.errors import StartupError

log = logging.getLogger(__name__)

Download = Callable[[str, str, Path, Progress], str]
"""(what follows the scheme, revision, directory to fill, whom to tell the size) -> the revision
that was fetched, "" when the source has none; raises StartupError."""

# Weights in other formats are never read.
IGNORED = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]


def run(arguments: argparse.Namespace) -> int:
    uri, to, revision = arguments.uri, arguments.to, arguments.revision
    if to == "":
        raise StartupError("--to is empty: give a directory")
    if to is not None:
        fetch(uri, Path(to), revision, metrics_port=arguments.metrics_port)
        return 0
    _check_uri(uri, _DOWNLOADS)
    uri, target = in_cache(uri, revision)
    print(f"fetching {arguments.uri} into {target}", file=sys.stderr, flush=True)
    fetch(uri, target, revision, metrics_port=arguments.metrics_port)
    print(target)
    return 0


def cache_folder(part: str) -> Path:
    """Where Foveal keeps what it can fetch or compute again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "foveal" / part


def in_cache(uri: str, revision: str = "") -> tuple[str, Path]:
    """What a model is fetched from, and its directory in Foveal's cache. An image is named by its
    digest: a tag that has moved is another model. Raises StartupError."""
    folder = cache_folder("models")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make {folder}: {error.strerror}") from error
    scheme, _, rest = uri.partition("://")
    if scheme == "oci":
        uri = f"oci://{pinned(rest, folder)}"
    name = f"{uri}--{revision or 'main'}" if scheme == "hf" else uri
    return uri, folder / re.sub(r"[^A-Za-z0-9._-]+", "--", name)


def _check_uri(uri: str, downloads: Mapping[str, Download]) -> None:
    scheme, _, rest = uri.partition("://")
    if scheme not in downloads or not rest:
        raise StartupError(
            f"cannot fetch {uri!r}: write hf://ORG/NAME, s3://BUCKET/PREFIX or "
            "oci://REGISTRY/NAME:TAG"
        )


def fetch(
    uri: str,
    target: Path,
    revision: str = "",
    downloads: Mapping[str, Download] | None = None,
    *,
    metrics_port: int = 0,
    out: TextIO | None = None,
) -> bool:
    """Fills `target`; returns False when it is already there, or another process fills it first.

    With a `metrics_port` its progress is served there meanwhile, with `out` that of s3:// and oci://
    is shown there (Bars). Raises StartupError for an unknown scheme, for a target that holds
    something else, and for a download that fails.
    """
    downloads = downloads or _DOWNLOADS
    _check_uri(uri, downloads)
    scheme, _, rest = uri.partition("://")
    if target.is_dir() and any(target.iterdir()):
        if not (target / "config.json").is_file():
            raise StartupError(f"{target} is there and is no model: give a directory to be made")
        log.info("already there", extra={"path": str(target)})
        return False
    partial = target.with_name(target.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make {partial}: {error.strerror}") from error
    progress = Progress(partial, out)
    with told(progress, metrics_port), _alone(partial):
        if (target / "config.json").is_file():  # another Job was first
            return False
        resolved = downloads[scheme](rest, revision, partial, progress)
        if not any(partial.glob("*.safetensors")) or not (partial / "config.json").is_file():
            raise StartupError(
                f"{uri} holds no config.json with *.safetensors: not a model we can load"
            )
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        try:
            write_source(partial, Source(uri=uri, revision=revision, resolved=resolved))
            (partial / _LOCK).unlink(missing_ok=True)
            partial.rename(target)
        except OSError as error:
            if (target / "config.json").is_file():  # the file system has no locks
                return False
            text = f"cannot move {partial} to {target}: {error.strerror}"
            raise StartupError(text) from error
    return True


_LOCK = ".lock"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps others out of a folder that is being filled: Jobs of two resources that share a claim,
    or a pod's successor while its node does not answer. Both would append to the same files. A file
    system that has no locks lets them."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context((folder / _LOCK).open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process fetches this model: waiting", extra={"path": str(folder)})
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_hub(repository: str, revision: str, directory: Path, progress: Progress) -> str:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # One commit for all files, also of a download that an edit of the branch cuts in two.
        info = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
        progress.total_bytes = sum(
            file.size or 0
            for file in info.siblings or ()
            if not any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in IGNORED)
        )
        snapshot_download(
            repository,
            revision=info.sha or revision or None,
            local_dir=directory,
            ignore_patterns=IGNORED,
        )
    except Exception as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        is_told = isinstance(error, (HfHubHTTPError, OSError, ValueError))
        if is_told and not isinstance(error, LocalEntryNotFoundError):
            raise StartupError(f"hf://{repository}: {first[0]}") from error
        # Of the HTTP client that the hub's library uses, whichever it is.
        cause = "" if is_told else f" ({first[0]})"
        raise StartupError(
            f"hf://{repository}: the hub at {constants.ENDPOINT} does not answer{cause}: check the "
            "network, HF_ENDPOINT and proxies; the next attempt goes on where this one ended"
        ) from error
    return info.sha or ""


_PARALLEL = 4
_CHUNK_BYTES = 1 << 20
_PART = ".part"


class _Object(NamedTuple):
    key: str
    name: str
    size: int
    etag: str


def _from_s3(path: str, revision: str, directory: Path, progress: Progress) -> str:
    """Every object below a prefix into `directory`, several at a time, resumed where it broke.

    Credentials come from AWS_*, another store's endpoint from S3_ENDPOINT_URL. Returns a digest
    over names, sizes and ETags, for a bucket has no revisions. Raises StartupError."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise StartupError("s3:// needs the boto3 package in the image") from error
    if revision:
        raise StartupError("s3:// models have no revision: put it into the prefix")
    bucket, _, prefix = path.partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
    try:
        client = boto3.client(
            "s3",
            endpoint_url=os.environ.get("S3_ENDPOINT_URL") or None,
            config=Config(
                retries={"max_attempts": 4, "mode": "standard"},
                connect_timeout=10,
                read_timeout=60,
                max_pool_connections=_PARALLEL,
            ),
        )
        found = [
            one
            for one in _listed(client, bucket, prefix)
            if not any(fnmatch.fnmatch(one.name, pattern) for pattern in IGNORED)
        ]
        progress.total_bytes = sum(one.size for one in found)
        for one in found:
            if not (directory / one.name).resolve().is_relative_to(directory.resolve()):
                raise StartupError(f"s3://{path}: object {one.key!r} would leave its folder")
        with (
            Bars(progress.total_bytes, progress.out) as bars,
            ThreadPoolExecutor(_PARALLEL) as pool,
        ):
            jobs = [pool.submit(_fetch, client, bucket, one, directory, bars) for one in found]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise StartupError(f"s3://{path}: {first[0]}") from error
    for rest in directory.rglob(f"*{_PART}"):  # of objects that have changed since
        rest.unlink()
    listed = sorted((one.name, one.size, one.etag) for one in found)
    return "sha256:" + hashlib.sha256(repr(listed).encode()).hexdigest()


def _listed(client: Any, bucket: str, prefix: str) -> list[_Object]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [
        _Object(entry["Key"], name, int(entry["Size"]), str(entry.get("ETag", "")))
        for page in pages
        for entry in page.get("Contents", ())
        if (name := entry["Key"][len(prefix) :]) and not name.endswith("/")
    ]


def _fetch(client: Any, bucket: str, one: _Object, directory: Path, bars: Bars) -> None:
    """One object, from where an earlier attempt left it, as long as it is the same object."""
    from botocore.exceptions import BotoCoreError

    file = directory / one.name
    note = directory / ".cache/s3" / hashlib.sha256(one.name.encode()).hexdigest()
    came = bars.begin(one.name, one.size)
    if file.is_file() and note.is_file() and note.read_text() == one.etag:
        came(one.size)
        return  # from an earlier attempt, and the same object still
    file.parent.mkdir(parents=True, exist_ok=True)
    note.parent.mkdir(parents=True, exist_ok=True)
    mark = hashlib.sha256(one.etag.encode()).hexdigest()[:12]
    part = file.with_name(f"{file.name}.{mark}{_PART}")
    part.touch()
    came(part.stat().st_size)
    append = functools.partial(_append, client, bucket, one, part, came)
    fill(part, one.size, append, (BotoCoreError, OSError))  # what the store says passes through
    if part.stat().st_size != one.size:
        part.unlink()
        raise ValueError(f"{one.key} has more bytes than its listing says: it changes meanwhile")
    part.rename(file)
    note.write_text(one.etag)


def _append(
    client: Any, bucket: str, one: _Object, part: Path, came: Callable[[int], None], start: int
) -> None:
    span = {"Range": f"bytes={start}-"} if start else {}
    same = {"IfMatch": one.etag} if one.etag else {}
    answer = client.get_object(Bucket=bucket, Key=one.key, **span, **same)
    if start and not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
        raise ValueError(f"the store does not answer ranges of {one.key}: delete {part.name}")
    with part.open("ab") as out:
        for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
            out.write(chunk)
            came(len(chunk))


_DOWNLOADS: dict[str, Download] = {"hf": _from_hub, "s3": _from_s3, "oci": download}
