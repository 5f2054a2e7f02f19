"""The size of a checkpoint's weights from the headers of its files, and the progress of loading.

Headers come from a file that a user supplied: lengths are checked, and no tensor is read. Progress
goes to the log: transformers' own bar, which is made for terminals, does not reach it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.quantity import short_bytes

_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of floating-point numbers → bytes of one; only these are cast as they are loaded."""
_INDEX = "model.safetensors.index.json"
_SPEECH = ("talker.", "token2wav.", "code2wav.")
"""Parts of Omni checkpoints that say an answer aloud, and are never loaded."""
_MAX_NAME_BYTES = 255  # of Linux; a longer one is an OSError where others are only not there


class StoredTensor(msgspec.Struct):
    """One tensor as a file's header describes it; `dtype` by safetensors' names."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_directory(path: str) -> None:
    """Raises StartupError for a directory that is none, or holds no checkpoint."""
    if not (Path(path) / "config.json").is_file():
        raise StartupError(
            f"model {path}: no config.json there; give a directory with a Hugging Face checkpoint"
        )


def check_weights(path: str) -> None:
    """Raises StartupError unless the weights are safetensors."""
    if any(Path(path).glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in Path(path).glob("*.bin")) + sorted(
        p.name for p in Path(path).glob("*.pt*")
    )
    if pickles:
        raise StartupError(
            f"model {path}: weights are only there as pickles ({pickles[0]}), which can run code "
            "when read; convert them to safetensors"
        )
    raise StartupError(f"model {path}: no *.safetensors there")


def check_report(path: str, report: dict[str, Any], unread: Collection[str] = ()) -> None:
    """transformers fills missing weights with random numbers and only logs it. Raises StartupError,
    unless they are among the `unread`."""
    if mismatched := sorted(report.get("mismatched_keys") or ()):
        name, stored, wanted = mismatched[0]
        raise StartupError(
            f"model {path}: {len(mismatched)} weights have another shape than config.json says: "
            f"{name} is {list(stored)} in the checkpoint, not {list(wanted)}; take config.json "
            "and weights from the same model"
        )
    missing = sorted(set(report.get("missing_keys") or ()).difference(unread))
    if missing:
        raise StartupError(
            f"model {path}: {len(missing)} weights are not in the checkpoint, {missing[0]} among "
            "them: files are incomplete or belong to another architecture"
        )


def weight_files(path: str) -> list[Path]:
    """The files transformers would load; other safetensors beside them (consolidated copies,
    adapters) do not count. Raises StartupError when there are none."""
    root = Path(path)
    if (root / _INDEX).is_file():
        try:
            index = msgspec.json.decode((root / _INDEX).read_bytes(), type=_Index)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise StartupError(f"model {path}: {_INDEX}: {error}") from error
        names = {Path(name).name for name in index.weight_map.values()}
        for name in names:
            if not name or "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
                raise StartupError(
                    f"model {path}: {_INDEX}: weight_map has {name[:40]!r}, which no file can be "
                    "called: copy the index again from where the model is from"
                )
        return sorted(root / name for name in names)
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"]
    found = sorted(root.glob("*.safetensors"))
    if not found:
        raise StartupError(f"model {path}: no *.safetensors there")
    return found


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint that is loaded by name, of its files' headers alone.

    Raises StartupError for a file that is missing or no safetensors file.
    """
    return {
        name: one
        for file in weight_files(path)
        for name, one in file_header(file).items()
        if not name.startswith(_SPEECH)
    }


def stored_bytes(path: str, loaded_itemsize: int) -> int:
    """Bytes of all weights once loaded: floating-point ones in the loaded type, others as stored.
    Raises StartupError as `stored_tensors`."""
    total = 0
    for tensor in stored_tensors(path).values():
        if tensor.dtype in _FLOATS:
            total += math.prod(tensor.shape) * loaded_itemsize
        else:
            total += tensor.data_offsets[1] - tensor.data_offsets[0]
    return total


def copied_bytes(path: str, loaded_dtype: str, made: Container[str] = ()) -> int:
    """Bytes, once loaded, of the floating-point weights that are stored in another type than the
    loaded one, by safetensors' names, and of those that others are `made` of: these are copied, the
    rest stays mapped from the files. Raises StartupError as `stored_tensors`."""
    return _FLOATS[loaded_dtype] * sum(
        math.prod(tensor.shape)
        for name, tensor in stored_tensors(path).items()
        if tensor.dtype in _FLOATS and (tensor.dtype != loaded_dtype or name in made)
    )


def stored_dtypes(path: str) -> set[str]:
    """The types of all tensors. Raises StartupError as `stored_tensors`."""
    return {tensor.dtype for tensor in stored_tensors(path).values()}


def check_complete(files: Iterable[Path]) -> None:
    """Raises StartupError for a file that ends before its last tensor does."""
    for file in files:
        try:
            with file.open("rb") as stream:
                begin = stream.read(64)
        except OSError as error:
            raise StartupError(f"cannot read {file}: {error.strerror}") from error
        if begin.startswith(b"version https://git-lfs"):
            raise StartupError(f"{file} is a Git LFS pointer: run git lfs pull in its directory")
        length = 8 + int.from_bytes(begin[:8], "little")
        end = max((tensor.data_offsets[1] for tensor in file_header(file).values()), default=0)
        if (size := file.stat().st_size) < length + end:
            raise StartupError(
                f"{file} has {size} of {length + end} bytes: finish its download, or copy it again"
            )


def file_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises StartupError."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, file.stat().st_size):
                raise StartupError(f"{file}: not a safetensors file (header of {length} bytes)")
            raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(one, type=StoredTensor) for name, one in raw.items()}
    except OSError as error:
        raise StartupError(f"cannot read {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StartupError(f"{file}: not a safetensors file ({error})") from error


_log = logging.getLogger(__name__)
PAUSE_SECONDS = 2.0
NEXT = "KV memory and warm-up come next"
_TITLE = "Loading weights"  # of the bar that counts tensors


def what_loads(path: str) -> str:
    """ "4 weight files, 15.4 GiB"."""
    files = [file for file in map(Path, weight_files(path)) if file.is_file()]
    size = short_bytes(sum(file.stat().st_size for file in files))
    return f"{len(files)} weight file{'s' if len(files) != 1 else ''}, {size}"


@contextlib.contextmanager
def told_loading(
    path: str, say: Callable[[str], None] = _log.info, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Says what is loaded, then every PAUSE_SECONDS how far that is, while the body loads."""
    from transformers.utils import logging as theirs

    what = what_loads(path)
    say(f"loading {what}; {NEXT}")

    def counted(tensors: Any) -> Iterator[Any]:
        said, total = clock(), len(tensors)
        for number, tensor in enumerate(tensors):
            if clock() - said >= PAUSE_SECONDS:
                said = clock()
                say(f"loading {what}: {number / total:.0%}, {number} of {total} tensors; {NEXT}")
            yield tensor

    def hook(make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments and options.get("desc") == _TITLE:
            return counted(arguments[0])
        return make(*arguments, **options)

    before = theirs.set_tqdm_hook(hook)
    try:
        yield
    finally:
        theirs.set_tqdm_hook(before)
