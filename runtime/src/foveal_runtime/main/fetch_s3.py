"""`s3://BUCKET/PREFIX`: every object below a prefix, several at a time, resumed where it broke.

Called by fetch.py. Credentials come from the environment (AWS_*), the endpoint of another store
than Amazon's from S3_ENDPOINT_URL. Never writes an object in place: what has its own name is whole.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from foveal_runtime.main.progress import Progress
from foveal_runtime.plan.errors import StartupError

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 6
"""In a row and without a byte more; an attempt that brought some begins the count again."""
_BACKOFF_SECONDS = 0.5
_PARALLEL = 4
_CHUNK_BYTES = 1 << 20
_PART = ".part"


class _Object(NamedTuple):
    key: str
    name: str
    size: int
    etag: str


def download(
    path: str, revision: str, directory: Path, progress: Progress, ignored: Sequence[str] = ()
) -> str:
    """Fills `directory`; returns a digest over names, sizes and ETags, for a bucket has no
    revisions. Raises StartupError."""
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
            if not any(fnmatch.fnmatch(one.name, pattern) for pattern in ignored)
        ]
        progress.total_bytes = sum(one.size for one in found)
        for one in found:
            if not (directory / one.name).resolve().is_relative_to(directory.resolve()):
                raise StartupError(f"s3://{path}: object {one.key!r} would leave its folder")
        with ThreadPoolExecutor(_PARALLEL) as pool:
            jobs = [pool.submit(_fetch, client, bucket, one, directory) for one in found]
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


def _fetch(client: Any, bucket: str, one: _Object, directory: Path) -> None:
    """One object, from where an earlier attempt left it, as long as it is the same object."""
    from botocore.exceptions import BotoCoreError

    file = directory / one.name
    note = directory / ".cache/s3" / hashlib.sha256(one.name.encode()).hexdigest()
    if file.is_file() and note.is_file() and note.read_text() == one.etag:
        return  # from an earlier attempt, and the same object still
    file.parent.mkdir(parents=True, exist_ok=True)
    note.parent.mkdir(parents=True, exist_ok=True)
    mark = hashlib.sha256(one.etag.encode()).hexdigest()[:12]
    part = file.with_name(f"{file.name}.{mark}{_PART}")
    part.touch()
    attempts = 0
    while (start := part.stat().st_size) < one.size:
        try:
            _append(client, bucket, one, part, start)
        except (BotoCoreError, OSError) as error:  # the line; what the store says passes through
            grown = part.stat().st_size > start
            attempts = 1 if grown else attempts + 1
            if attempts >= MAX_ATTEMPTS:
                raise
            log.warning("%s broke off at %d of %d bytes (%s)", one.name, part.stat().st_size,
                        one.size, type(error).__name__)  # fmt: skip
            time.sleep(0.0 if grown else _BACKOFF_SECONDS * 2**attempts)
    if part.stat().st_size != one.size:
        part.unlink()
        raise ValueError(f"{one.key} has more bytes than its listing says: it changes meanwhile")
    part.rename(file)
    note.write_text(one.etag)


def _append(client: Any, bucket: str, one: _Object, part: Path, start: int) -> None:
    span = {"Range": f"bytes={start}-"} if start else {}
    same = {"IfMatch": one.etag} if one.etag else {}
    answer = client.get_object(Bucket=bucket, Key=one.key, **span, **same)
    if start and not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
        raise ValueError(f"the store does not answer ranges of {one.key}: delete {part.name}")
    with part.open("ab") as out:
        for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
            out.write(chunk)
