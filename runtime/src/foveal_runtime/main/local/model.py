"""The model of `foveal serve`: a name turned into a directory that holds everything.

A directory is checked where it is; a hub's model lands in the usual Hugging Face cache, an object
store's beside Foveal's other ones. What an engine would refuse is refused before it is downloaded.
Needs no torch.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from foveal_runtime.model.checkpoint.quantized import check_quantization
from foveal_runtime.model.checkpoint.weights import check_complete, weight_files
from foveal_runtime.plan.errors import StartupError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)")
_SCHEMES = ("hf", "s3", "oci", "pvc")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
               "tekken.json")  # fmt: skip
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")


class Found(NamedTuple):
    """`name`: what clients put into `model` when they were not told otherwise."""

    path: Path
    name: str


def find_model(given: str, revision: str = "") -> Found:
    """The model's directory, after a download where there is none yet. Raises StartupError in one
    line with a remedy."""
    if page := _HUB_PAGE.match(given):
        raise StartupError(f"{given} is a web page: write {page[1]}")
    scheme, separator, rest = given.partition("://")
    if separator:
        return _from_uri(given, scheme, rest, revision)
    path = Path(given).expanduser()
    if path.is_dir():
        check_files(path)
        return Found(path.resolve(), path.resolve().name)
    if path.is_file():
        raise StartupError(_of_file(path))
    name, _, tag = given.partition("@")
    if _HUB_NAME.fullmatch(name) and not given.startswith((".", "~")) and not near(path):
        return _from_hub(name, revision or tag)
    raise StartupError(_missing(path, given))


def _from_uri(given: str, scheme: str, rest: str, revision: str) -> Found:
    name, _, tag = rest.partition("@")
    if scheme == "hf" and _HUB_NAME.fullmatch(name):
        return _from_hub(name, revision or tag)
    if scheme == "s3" and rest:
        from foveal_runtime.main.fetch import fetch

        folder = Path("~/.cache/foveal/models").expanduser()
        target = folder / re.sub(r"[^A-Za-z0-9._-]+", "--", given)
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch(given, target)
        check_files(target)
        return Found(target, rest.rstrip("/").rpartition("/")[2])
    if scheme in ("oci", "pvc"):
        raise StartupError(
            f"{given}: only a cluster can mount {scheme}:// models; give a directory, ORG/NAME or "
            "s3://BUCKET/PREFIX"
        )
    close = difflib.get_close_matches(scheme, _SCHEMES, n=1, cutoff=0.3)
    hint = f"did you mean {close[0]}://{rest}?" if close and scheme not in _SCHEMES else ""
    raise StartupError(f"{given}: {hint or 'write hf://ORG/NAME or s3://BUCKET/PREFIX'}")


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
        return f"there is no directory {given} (did you mean {close}?)"
    hint = "a model of the Hugging Face hub is written ORG/NAME"
    while not path.parent.is_dir():
        path = path.parent
    if len(path.parts) > 1 and path.parent != Path():
        hint = f"{path} does not exist; {hint}"
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
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"model {shown}: config.json cannot be read: {error}") from error
    if "model_type" not in config:
        raise StartupError(
            f"model {shown}: config.json names no model_type: it is not a checkpoint of "
            "transformers"
        )
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise StartupError(f"model {shown} holds no tokenizer.json: copy the tokenizer's files")
    is_multimodal = any(part in config for part in _PARTS)
    if is_multimodal and not any((path / name).is_file() for name in _PROCESSORS):
        raise StartupError(
            f"model {shown} takes media and holds no preprocessor_config.json: copy the "
            "processor's files from where the model is from"
        )
    if not any(path.glob("*.safetensors")):  # with weights, once all of them are there
        check_quantization(str(path), SimpleNamespace(**config))
    return config


def _from_hub(repository: str, revision: str) -> Found:
    from foveal_runtime.main.local.hub import download

    return Found(download(repository, revision), repository)


def is_hub_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
