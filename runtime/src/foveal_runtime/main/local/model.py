"""The model of `foveal serve`: a name turned into a directory that holds everything.

A directory is checked where it is; a hub's model lands in the usual Hugging Face cache, an object
store's beside Foveal's other ones. What an engine would refuse is refused before it is downloaded.
Needs no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from foveal_runtime.main.bars import Bars
from foveal_runtime.main.fetch import IGNORED
from foveal_runtime.model.checkpoint.kinds import check_kind
from foveal_runtime.model.checkpoint.quantized import check_declared, check_quantization
from foveal_runtime.model.checkpoint.weights import check_complete, weight_files
from foveal_runtime.plan.config import Task
from foveal_runtime.plan.embedder import check_task
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.quantity import short_bytes

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)")
_SCHEMES = ("hf", "s3", "oci", "pvc")
_WRITE = "write hf://ORG/NAME, s3://BUCKET/PREFIX or oci://REGISTRY/NAME:TAG"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
               "tekken.json")  # fmt: skip
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")


class Found(NamedTuple):
    """`name`: what clients put into `model` when they were not told otherwise."""

    path: Path
    name: str


def find_model(given: str, revision: str = "", task: Task = "generate") -> Found:
    """The model's directory, after a download where there is none yet. Raises StartupError in one
    line with a remedy."""
    if page := _HUB_PAGE.match(given):
        raise StartupError(f"{given} is a web page: write {page[1]}")
    scheme, separator, rest = given.partition("://")
    if separator:
        return _from_uri(given, scheme, rest, revision, task)
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:
        user = given.partition("/")[0][1:] or "this one"
        raise StartupError(
            f"{given}: the home of user {user} is not known: write its whole path"
        ) from error
    if path.is_dir():
        if revision:
            what = f"{given} is a directory, which has none; leave it out"
            raise StartupError(f"--revision {revision}: {what}")
        check_files(path)
        return Found(path.resolve(), path.resolve().name)
    if path.is_file():
        raise StartupError(_of_file(path))
    name, _, tag = given.partition("@")
    if _HUB_NAME.fullmatch(name) and not given.startswith((".", "~")) and not near(path):
        return _from_hub(name, revision or tag, task)
    raise StartupError(_missing(path, given))


def _from_uri(given: str, scheme: str, rest: str, revision: str, task: Task) -> Found:
    name, _, tag = rest.partition("@")
    if scheme == "hf" and _HUB_NAME.fullmatch(name):
        return _from_hub(name, revision or tag, task)
    if scheme in ("s3", "oci") and rest:
        if revision:
            where = "into the prefix" if scheme == "s3" else "as tag or digest behind the name"
            raise StartupError(f"{given}: --revision is for models of the hub: put it {where}")
        return _from_store(scheme, rest)
    if scheme == "pvc":
        raise StartupError(
            f"{given}: only a cluster can mount pvc:// models; give a directory, ORG/NAME, "
            "s3://BUCKET/PREFIX or oci://REGISTRY/NAME:TAG"
        )
    close = difflib.get_close_matches(scheme, _SCHEMES, n=1, cutoff=0.3)
    hint = f"did you mean {close[0]}://{rest}?" if close and scheme not in _SCHEMES else ""
    raise StartupError(f"{given}: {hint or _WRITE}")


def _from_store(scheme: str, rest: str) -> Found:
    from foveal_runtime.main.fetch import fetch, in_cache

    name = rest.rstrip("/").rpartition("/")[2]
    if scheme == "oci":
        name = re.split("[:@]", name)[0]
    uri, target = in_cache(f"{scheme}://{rest}")
    fetch(uri, target, out=sys.stdout)
    check_files(target)
    return Found(target, name)


def _of_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return f"{path} is a GGUF file, which is not supported: give a directory with safetensors"
    return f"{path} is a file: give its directory, {path.parent}"


def near(path: Path) -> str:
    """A directory whose name is almost that of `path`, which is missing; "" when there is none."""
    try:
        siblings = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.75)
    return str(path.parent / found[0]) if found else ""


def _missing(path: Path, given: str) -> str:
    if close := near(path):
        hub = ""
        if _HUB_NAME.fullmatch(given.partition("@")[0]):
            hub = f"; a model of the Hugging Face hub is then written hf://{given}"
        return f"there is no directory {given} (did you mean {close}?){hub}"
    hint = "a model of the Hugging Face hub is written ORG/NAME"
    first = path
    while not first.parent.is_dir():
        first = first.parent
    if first != path and len(first.parts) > 1 and first.parent != Path():
        hint = f"{first} does not exist; {hint}"
    return f"there is no directory {given}: {hint}"


def check_files(path: Path) -> None:
    """Raises StartupError for a directory that no engine could load."""
    config = check_description(path, path)
    weights = [Path(one) for one in weight_files(str(path))] if _has_weights(path) else []
    if not weights:
        other = sorted(one.name for one in path.iterdir() if one.suffix in (".gguf", ".bin", ".pt"))
        what = f"only {other[0]}" if other else "no weights"
        raise StartupError(f"model {path} holds {what}: give one with *.safetensors")
    missing = [one.name for one in weights if not one.is_file()]
    if missing:
        raise StartupError(
            f"model {path} is incomplete: {len(missing)} of {len(weights)} weight files are "
            f"missing, {missing[0]} among them: finish the download"
        )
    check_complete(weights)
    check_quantization(str(path), SimpleNamespace(**config))


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file()


def check_description(path: Path, shown: Path | str) -> dict[str, Any]:
    """config.json, tokenizer, processor and quantisation: what can be judged before weights are
    there. `shown` names the model in messages. Raises StartupError."""
    file = path / "config.json"
    if not file.is_file():
        below = sorted(one.parent for one in path.glob("*/config.json"))
        hint = f" (did you mean {below[0]}?)" if below else ""
        raise StartupError(f"model {shown} holds no config.json{hint}")
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise StartupError(f"model {shown}: config.json cannot be read: {error}") from error
    if "model_type" not in config:
        raise StartupError(
            f"model {shown}: config.json names no model_type: it is not a checkpoint of "
            "transformers"
        )
    check_kind(str(shown), config)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise StartupError(f"model {shown} holds no tokenizer.json: copy the tokenizer's files")
    is_multimodal = any(part in config for part in _PARTS)
    if is_multimodal and not any((path / name).is_file() for name in _PROCESSORS):
        raise StartupError(
            f"model {shown} takes media and holds no preprocessor_config.json: copy the "
            "processor's files from where the model is from"
        )
    check_declared(str(path), SimpleNamespace(**config), str(shown))
    return config


def _from_hub(repository: str, revision: str, task: Task) -> Found:
    return Found(download(repository, revision, task), repository)


def is_hub_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


_SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
_CHUNK_BYTES = 1 << 20
_PARALLEL = 8  # as many as the hub's own library


def download(repository: str, revision: str, task: Task) -> Path:
    """The snapshot's directory. Asks the hub which files there are, and downloads those that the
    cache lacks. Raises StartupError in one line with a remedy."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # ours are shown instead
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    def fetch(commit: str, **more: Any) -> Any:
        return snapshot_download(repository, revision=commit or None, **more)

    try:
        if is_hub_offline():
            return _checked(Path(fetch(revision, local_files_only=True)))
        small = Path(fetch(revision, allow_patterns=_SMALL))
        check_description(small, repository)
        check_task(small, task, repository)
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
            files = f"{len(missing)} file{'s' if len(missing) != 1 else ''}"
            print(f"downloading {files} ({size}) of {repository} into {small}", flush=True)
            with _ended_at_once(lambda error: _told(repository, revision, error)):
                _download_all(repository, commit, missing)
        path = Path(fetch(commit, ignore_patterns=IGNORED))
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(_told(repository, revision, error)) from error
    for file in missing:
        _verify(repository, path / file.filename)
    return _checked(path)


class _Told:
    """What the hub's library takes for its bar of a file: draws nothing, tells `came`."""

    came: Callable[[int], None]

    def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
        self.came(initial)

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, n: float | None = 1) -> None:
        self.came(int(n or 0))

    def nothing(self, *_: object, **__: object) -> None:
        """Of the network: `update` is told what has reached the disk."""

    update_transfer = set_postfix_str = set_transfer_postfix_str = close = refresh = nothing


def _download_all(repository: str, commit: str, files: list[Any]) -> None:
    """Several files at a time, each with a bar. Raises what the hub's library raises."""
    from huggingface_hub import hf_hub_download

    def download(file: Any) -> None:
        came = staticmethod(bars.begin(file.filename, file.file_size))
        told: Any = type("Told", (_Told,), {"came": came})
        hf_hub_download(repository, file.filename, revision=commit, tqdm_class=told)

    with Bars(sum(file.file_size for file in files), sys.stdout) as bars:
        pool = ThreadPoolExecutor(_PARALLEL)
        try:
            for job in as_completed([pool.submit(download, file) for file in files]):
                job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _ended_at_once(told: Callable[[Exception], str]) -> Iterator[None]:
    """Ctrl-C and an error, `told` in a line, end this process: the hub's library would first finish
    the files that it began."""

    def leave(line: str, code: int) -> None:
        for one in Path("/proc/self/fd").glob("*"):
            with contextlib.suppress(OSError):
                if one.readlink().suffix == ".incomplete":  # of no use to the next start
                    one.readlink().unlink()
        print(f"foveal-runtime: {line}", file=sys.stderr, flush=True)
        os._exit(code)

    def end(number: int, frame: FrameType | None) -> None:
        if sys.stdout.isatty():  # bars hide the cursor; their locks are not for a handler
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
        leave("interrupted; the next start continues", 130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    except Exception as error:
        leave(told(error), 2)
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


def _told(repository: str, revision: str, error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return _not_in_cache(repository)
    if isinstance(error, HfHubHTTPError):
        return _refusal(repository, revision, error)
    if isinstance(error, (OSError, ValueError)):
        return f"{repository}: {_first_line(error)}"
    return (  # of the HTTP client that the hub's library uses, whichever it is
        f"{repository}: the connection to the hub broke off ({_first_line(error)}): start again, "
        "which goes on with the files that are missing"
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
