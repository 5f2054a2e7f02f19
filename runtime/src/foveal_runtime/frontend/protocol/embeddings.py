"""The embeddings API: its requests and answers, and what the checkpoint says about pooling.

Parsed by FastAPI, read by http/apis/embeddings.py. Beside OpenAI's fields it takes `messages`, as
chat does, because that is how an image comes in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from foveal_runtime.frontend.protocol.bounds import Open
from foveal_runtime.frontend.protocol.messages import Text
from foveal_runtime.frontend.protocol.requests import FreeForm, Integer, Messages, TokenIds
from foveal_runtime.plan.config import Pooling
from foveal_runtime.plan.errors import StartupError

MAX_INPUTS = 2048


def _few(value: Any) -> Any:
    """Before the types are looked at, of which the first would be blamed."""
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} inputs; at most {MAX_INPUTS} are taken")
    return value


Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    BeforeValidator(_few),
]


class EmbeddingRequest(Open):
    """`input`, or `messages` as in chat."""

    model: str | None = Field(None, max_length=1024, description="the served model's name")
    input: Inputs | None = Field(None, description="text, token ids, or a list of either")
    messages: Messages | None = Field(
        None, description="one conversation to embed, with images, video and audio"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="default float; base64: of little-endian 32-bit floats"
    )
    dimensions: Integer | None = Field(
        None, ge=1, lt=2**31, description="only the first so many, for models trained for it"
    )
    normalize: bool | None = Field(None, description="default true: unit length")
    truncate_prompt_tokens: Integer | None = Field(
        None, ge=-1, lt=2**31,
        description="keep only the first tokens of inputs without media; -1: what fits",
    )  # fmt: skip
    add_special_tokens: bool | None = Field(None, description="messages: false, input: true")
    add_generation_prompt: bool | None = Field(None, description="default false")
    continue_final_message: bool | None = None
    chat_template_kwargs: FreeForm | None = None
    mm_processor_kwargs: FreeForm | None = None
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="smaller first, under the priority policy"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="separates caches; no '@', '/', '\\' or NUL"
    )


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int = Field(description="media count as their tokens")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "cls": "cls",
                              "cls_token": "cls", "lasttoken": "last"}  # fmt: skip


def checkpoint_pooling(model_path: str | Path) -> Pooling | None:
    """What the checkpoint's sentence-transformers files say; None without such files.

    Raises StartupError for what is not served: another pooling, or layers behind it.
    """
    folder = Path(model_path)
    if not (folder / "modules.json").is_file():
        return None
    found: Pooling | None = None
    for module in _read(folder / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _KNOWN_MODULES:
            raise StartupError(
                f"{folder}/modules.json names a layer {kind or module} behind the model, which "
                "is not served"
            )
        if kind == "Pooling":
            found = _mode(folder / str(module.get("path", "")) / "config.json")
    return found


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
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(found, kind):
        raise StartupError(f"{path} is no {kind.__name__} of JSON")
    return found
