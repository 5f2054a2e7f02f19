"""The model traits that the scheduler works by.

Used by the runner and by the profiler, which has no runner. Never looks at weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import transformers

from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.layers.layer_parts import deepstack_levels
from foveal_runtime.plan.embedder import longest_input
from foveal_runtime.plan.sampling import grammar_version
from foveal_runtime.telemetry.startup import runtime_version

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    """Of tokenizer.json; all else is skipped."""

    added_tokens: list[_Added] = []


def read_traits(loaded: LoadedModel, state_bytes: int = 0) -> ModelTraits:
    """What the scheduler must know, from the model's configuration and its adapter."""
    text, adapter = loaded.text_config, loaded.adapter
    levels = 1 + deepstack_levels(loaded)
    multimodal = bool(adapter.encoders)
    longest = int(text.max_position_embeddings)
    if adapter.is_encoder:
        longest = longest_input(loaded.path, longest - adapter.position_offset)
    has_grammars = not adapter.is_encoder and (Path(loaded.path) / "tokenizer.json").is_file()
    return ModelTraits(
        vocab_size=int(text.vocab_size),
        max_position=longest,
        eos_token_ids=end_ids(loaded),
        is_multimodal=multimodal,
        bidirectional=adapter.bidirectional,
        embed_width=int(text.hidden_size) if multimodal else 0,
        embed_levels=levels,
        embed_bytes=int(text.hidden_size) * levels * loaded.dtype.itemsize if multimodal else 0,
        embed_kind=f"{loaded.dtype} transformers {transformers.__version__} "
        f"foveal {runtime_version()}",
        value_bytes=loaded.dtype.itemsize,
        grammars=grammar_version() if has_grammars else "",
        state_bytes=state_bytes,
        generates=not adapter.is_encoder,
    )


def end_ids(loaded: LoadedModel) -> tuple[int, ...]:
    """The tokens that end an answer: those of generation_config.json, else of config.json, and the
    tokenizer's own. Fine-tuning often changes the last one alone, to the end of a turn: without it
    an answer would go on with turns of its own."""
    of_model = (loaded.generation_config, loaded.config, loaded.text_config)
    found = (getattr(one, "eos_token_id", None) for one in of_model)
    eos: Any = next((one for one in found if one is not None), ())
    ids = [eos] if isinstance(eos, int) else list(eos)
    own = next(_end_tokens(Path(loaded.path)), None)
    for token in _added_tokens(Path(loaded.path)) if own is not None else ():
        if token.content == own and token.id < int(loaded.text_config.vocab_size):
            ids.append(token.id)
    return tuple(dict.fromkeys(ids))


def _end_tokens(folder: Path) -> Iterator[str]:
    """As files of the tokenizer spell it, the one that counts first. Files that cannot be read
    name none here: frontends refuse them, with the reason."""
    for name in _TOKENIZER_FILES:
        try:
            token = json.loads((folder / name).read_bytes())["eos_token"]
            yield str(token["content"] if isinstance(token, dict) else token or "")
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue


def _added_tokens(folder: Path) -> list[_Added]:
    try:
        content = (folder / "tokenizer.json").read_bytes()
        return msgspec.json.decode(content, type=_Tokenizer).added_tokens
    except (OSError, msgspec.MsgspecError, RecursionError):
        return []
