"""`foveal-runtime fetch URI --to DIRECTORY`: puts a model's files where pods look for them.

Run by the operator's fetch Job and by users. Downloads beside the target and renames at the end,
so a directory that exists is complete; a broken download resumes. Tells how far it is (progress.py)
and notes which commit it fetched (revision.py). Needs no torch.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from foveal_runtime.main.progress import Progress, told
from foveal_runtime.main.revision import Source, write_source
from foveal_runtime.plan.errors import StartupError

log = logging.getLogger(__name__)
Download = Callable[[str, str, Path, Progress], str]
"""(what follows the scheme, revision, directory to fill, whom to tell the size) -> the revision
that was fetched, "" when the source has none; raises StartupError."""

# Weights in other formats are never read.
IGNORED = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]


def run(arguments: argparse.Namespace) -> int:
    fetch(
        arguments.uri, Path(arguments.to), arguments.revision, metrics_port=arguments.metrics_port
    )
    return 0


def fetch(
    uri: str,
    target: Path,
    revision: str = "",
    downloads: dict[str, Download] | None = None,
    *,
    metrics_port: int = 0,
) -> bool:
    """Fills `target`; returns False when it is already there.

    With a `metrics_port` its progress is served there meanwhile. Raises StartupError for an
    unknown scheme and for a download that fails.
    """
    scheme, _, rest = uri.partition("://")
    download = (downloads or _DOWNLOADS).get(scheme)
    if download is None or not rest:
        raise StartupError(f"cannot fetch {uri!r}: write hf://ORG/NAME or s3://BUCKET/PREFIX")
    if target.is_dir():
        log.info("already there", extra={"path": str(target)})
        return False
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    progress = Progress(partial)
    with told(progress, metrics_port):
        resolved = download(rest, revision, partial, progress)
    if not any(partial.glob("*.safetensors")) or not (partial / "config.json").is_file():
        raise StartupError(
            f"{uri} holds no config.json with *.safetensors: not a model we can load"
        )
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    write_source(partial, Source(uri=uri, revision=revision, resolved=resolved))
    try:
        partial.rename(target)
    except OSError as error:
        if target.is_dir():  # another Job was first
            return False
        raise StartupError(f"cannot move {partial} to {target}: {error.strerror}") from error
    return True


def _from_hub(repository: str, revision: str, directory: Path, progress: Progress) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

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
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise StartupError(f"hf://{repository}: {first[0]}") from error
    return info.sha or ""


def _from_s3(path: str, revision: str, directory: Path, progress: Progress) -> str:
    """Has no revisions; what it held is told by a digest over names, sizes and ETags."""
    try:
        import boto3  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise StartupError("s3:// needs the boto3 package in the image") from error
    if revision:
        raise StartupError("s3:// models have no revision: put it into the prefix")
    bucket, _, prefix = path.partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    client = boto3.client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        items = [entry for page in pages for entry in page.get("Contents", ())]
        progress.total_bytes = sum(int(item["Size"]) for item in items)
        for item in items:
            name = item["Key"][len(prefix) :]
            file = directory / name
            if not name or name.endswith("/") or not file.resolve().is_relative_to(directory):
                continue
            if file.is_file() and file.stat().st_size == item["Size"]:
                continue  # from an earlier attempt
            file.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, item["Key"], str(file))
    except Exception as error:
        # boto3 makes its exception classes at run time, so none can be named here.
        raise StartupError(f"s3://{path}: {error}") from error
    listed = sorted((i["Key"][len(prefix) :], i["Size"], i.get("ETag", "")) for i in items)
    return "sha256:" + hashlib.sha256(repr(listed).encode()).hexdigest()


_DOWNLOADS: dict[str, Download] = {"hf": _from_hub, "s3": _from_s3}
