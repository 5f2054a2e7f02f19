"""Embeddings as a checkpoint is made for: its model_type, and the files of sentence-transformers.

Read by frontends (which hidden states, at unit length or not), by the model layer (how long an
input may be), and before anything starts: an encoder generates nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from foveal_runtime.plan.config import Pooling, Task
from foveal_runtime.plan.errors import StartupError

ENCODERS = frozenset({"bert", "camembert", "distilbert", "nomic_bert", "roberta", "xlm-roberta"})
"""model_types of encoders: each token sees all others, so no token follows from those before."""

_MODULES = "modules.json"
_LENGTHS = "sentence_bert_config.json"
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "cls": "cls",
                              "cls_token": "cls", "lasttoken": "last"}  # fmt: skip


class Embedder(msgspec.Struct, frozen=True):
    """`pooling`: see SamplingParams. `normalizes`: to unit length unless a request says."""

    pooling: Pooling
    normalizes: bool = True


def check_task(model_path: str | Path, task: Task, shown: str = "") -> None:
    """Raises StartupError for a model that is to generate and cannot; `shown` names it, "": its
    path."""
    if task == "embed":
        return
    kind, why = model_type(model_path), ""
    if kind in ENCODERS:
        why = f"{kind} is an encoder"
    elif lacks_head(model_path):
        why = "its architecture in config.json is one without an output layer"
    if why:
        raise StartupError(
            f"model {shown or model_path}: {why}: it embeds texts and generates none; serve it "
            "with --task embed (model.task: Embed)",
            param="task",
        )


def lacks_head(model_path: str | Path) -> bool:
    """Whether a decoder was saved without what makes tokens of its hidden states, as models for
    embeddings are (MistralModel)."""
    config = _config(model_path)
    kinds = config.get("architectures")
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    is_core = kind.endswith("Model") and "Head" not in kind
    return is_core and config.get("tie_word_embeddings") is False


def read_embedder(model_path: str | Path, pooling: Pooling | Literal[""] = "") -> Embedder:
    """`pooling` is what the user asks for; "": as the checkpoint says. Where it says nothing: the
    mean of an encoder's tokens, the last token of another model.

    Raises StartupError for what is not served: another pooling, or layers behind it.
    """
    folder = Path(model_path)
    is_encoder = model_type(folder) in ENCODERS
    found: Pooling = "mean" if is_encoder else "last"
    kinds = []
    for module in _read(folder / _MODULES, list) if (folder / _MODULES).is_file() else ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _KNOWN_MODULES:
            raise StartupError(
                f"{folder}/{_MODULES} names a layer {kind or module} behind the model, which "
                "is not served"
            )
        if kind == "Pooling" and not pooling:
            found = _mode(folder / str(module.get("path", "")) / "config.json")
        kinds.append(kind)
    return Embedder(pooling or found, not kinds or "Normalize" in kinds)


def longest_input(model_path: str | Path, positions: int) -> int:
    """Tokens that an encoder with so many positions takes: no more than sentence-transformers would
    leave of a text. Raises StartupError."""
    path = Path(model_path) / _LENGTHS
    said = _read(path, dict).get("max_seq_length") if path.is_file() else None
    return min(positions, said) if isinstance(said, int) and said > 0 else positions


def model_type(model_path: str | Path) -> str:
    """Of config.json; "" where there is none that can be read: others say so."""
    return str(_config(model_path).get("model_type", ""))


def _config(model_path: str | Path) -> dict[str, Any]:
    try:
        found = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _mode(path: Path) -> Pooling:
    document = _read(path, dict)
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, value in document.items()
             if name.startswith(prefix) and value is True]  # fmt: skip
    if isinstance(document.get("pooling_mode"), str):
        modes = [document["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES or document.get("include_prompt") is False:
        raise StartupError(
            f"{path}: pooling {' + '.join(modes) or 'of no kind'} is not served; --pooling (mean, "
            "last or cls) sets another"
        )
    return _MODES[modes[0]]


def _read(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(found, kind):
        raise StartupError(f"{path} is no {kind.__name__} of JSON")
    return found
