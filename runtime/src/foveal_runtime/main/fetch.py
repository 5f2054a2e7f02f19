"""`foveal-runtime fetch URI --to DIRECTORY`: puts a model's files where pods look for them.

Run by the operator's fetch Job and by users. Downloads beside the target and renames at the end,
so a directory that exists is complete; a broken download resumes. Tells how far it is (progress.py)
and notes which commit it fetched (revision.py). Needs no torch.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
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
    from foveal_runtime.main.fetch_s3 import download

    return download(path, revision, directory, progress, IGNORED)


_DOWNLOADS: dict[str, Download] = {"hf": _from_hub, "s3": _from_s3}
