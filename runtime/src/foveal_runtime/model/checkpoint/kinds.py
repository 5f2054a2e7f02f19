"""Whether a checkpoint's `model_type` can be served, told from config.json alone.

`foveal serve` asks before it downloads weights, the loader before it makes a model. Needs no torch:
transformers' own list of types is a file of names, which is read without importing the package.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import runpy
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foveal_runtime.model.adapters import ADAPTERS, TEXT_ADAPTERS
from foveal_runtime.plan.embedder import ENCODERS
from foveal_runtime.plan.errors import StartupError

_GENERATIVE = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_PARTS = ("vision_config", "audio_config")


def check_kind(shown: str, config: Mapping[str, Any]) -> None:
    """Raises StartupError for a `config` (config.json) whose type nothing here serves; `shown`
    names the model. What passes may still be refused once transformers has read it."""
    kind = str(config["model_type"])
    if problem := odd_padding(kind, config.get("pad_token_id", 1), config.get("vocab_size")):
        raise StartupError(f"model {shown}: {problem}")
    if kind in ADAPTERS or kind in TEXT_ADAPTERS:
        return
    known = known_kinds()
    if known and kind not in known:
        raise StartupError(unknown_kind(shown, kind, known))
    if any(isinstance(config.get(part), dict) for part in _PARTS):
        raise StartupError(f"model {shown}: {unserved_kind(kind)}")
    if config.get("is_encoder_decoder"):
        raise StartupError(
            f"model {shown}: model_type {kind!r} is not supported: an encoder-decoder with "
            "cross-attention; give a model that is a decoder alone"
        )
    generative = _generative_classes()
    if generative and _classes().get(kind) not in generative:
        raise StartupError(f"model {shown}: {other_kind(kind)}")


def unknown_kind(shown: str, kind: str, known: Collection[str]) -> str:
    """What is said of a type that transformers does not know, with near misses."""
    near = difflib.get_close_matches(kind, sorted({*ADAPTERS, *TEXT_ADAPTERS, *known}), 3, 0.75)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return (
        f"model {shown}: the installed transformers does not know model_type {kind!r}{hint}; code "
        "from checkpoints is never run, so give one in transformers' own format"
    )


def unserved_kind(kind: str) -> str:
    """What is said of a multimodal type without an adapter, with its nearest relatives."""
    near = difflib.get_close_matches(kind, sorted(ADAPTERS), 3, 0.6)
    hint = f" (its nearest supported relatives: {', '.join(near)})" if near else ""
    return (
        f"model_type {kind!r} is multimodal and not supported{hint}: choose a family of the "
        "documentation's page of supported models (its page of what is refused says why), or a "
        "plain text model"
    )


def odd_padding(kind: str, pad_id: object, vocab_size: object) -> str:
    """What is said of a type whose positions begin after the padding's id, where that is no id of
    the vocabulary; "" when nothing is. transformers ends in a TypeError for null."""
    if kind not in TEXT_ADAPTERS or not TEXT_ADAPTERS[kind].starts_after_padding:
        return ""
    most = vocab_size if isinstance(vocab_size, int) else math.inf
    if type(pad_id) is int and 0 <= pad_id < most:
        return ""
    return (
        f"pad_token_id is {json.dumps(pad_id)} in config.json, and positions of {kind} begin "
        "after it: set it to the padding token's id (1 in published checkpoints)"
    )


def other_kind(kind: str) -> str:
    """What is said of a type that neither generates nor is an encoder that is served."""
    return (
        f"model_type {kind!r} is not a generative language model of transformers, nor one of the "
        f"encoders that are served: {', '.join(sorted(ENCODERS))}"
    )


@cache
def known_kinds() -> frozenset[str]:
    """Types of the installed transformers; empty where its file of them is not as we know it."""
    return frozenset(_classes())


@cache
def _classes() -> dict[str, str]:
    """Configuration classes by model_type; several types may share one."""
    try:
        return dict(runpy.run_path(str(_lists() / "auto_mappings.py"))["CONFIG_MAPPING_NAMES"])
    except (OSError, KeyError, ImportError):
        return {}


@cache
def _generative_classes() -> frozenset[str]:
    """Configuration classes of models that generate text, as the loader finds them; read from the
    source, for importing it takes torch. Empty where it is not as we know it."""
    wanted = {f"MODEL_FOR_{name}_MAPPING_NAMES" for name in _GENERATIVE}
    try:
        body = ast.parse((_lists() / "modeling_auto.py").read_text()).body
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    found = [one.value for one in body if isinstance(one, ast.Assign)
             and isinstance(one.targets[0], ast.Name) and one.targets[0].id in wanted]  # fmt: skip
    if len(found) != len(wanted):
        return frozenset()
    pairs = [pair for one in found for pair in ast.walk(one) if isinstance(pair, ast.Tuple)]
    kinds = [pair.elts[0].value for pair in pairs if isinstance(pair.elts[0], ast.Constant)]
    return frozenset(_classes()[str(kind)] for kind in kinds if kind in _classes())


def _lists() -> Path:
    package = find_spec("transformers")
    return Path(package.origin if package and package.origin else "").parent / "models" / "auto"
