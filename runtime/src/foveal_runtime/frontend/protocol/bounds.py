"""Bounds on the shape of JSON that a request may bring, checked before its content.

Used by `requests`. Types bound what they name; these bound what they leave open: how many fields an
object has, and how deep a free-form value is. Validation stops at the first error, because a list
of a million bad entries would otherwise be a list of a million messages.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from foveal_runtime.plan.errors import InvalidRequest

MAX_FIELDS = 256
MAX_DEPTH = 16
MAX_NODES = 10_000
MAX_PROMPT_LOGPROBS = 1 << 18
"""Entries of one request: they come in one message, which is read in one piece."""


def check_num_fields(value: Any, limit: int = MAX_FIELDS) -> Any:
    """Raises ValueError for an object with too many fields; anything else is for the type."""
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"the object has {len(value)} fields; at most {limit} are taken")
    return value


def check_plain(value: Any, max_depth: int = MAX_DEPTH, max_nodes: int = MAX_NODES) -> Any:
    """Raises ValueError for free-form JSON that is too deep or too large."""
    level, depth, num_nodes = [value], 0, 0
    while level:
        depth += 1
        num_nodes += len(level)
        if depth > max_depth:
            raise ValueError(f"the value is nested more than {max_depth} levels deep")
        if num_nodes > max_nodes:
            raise ValueError(f"the value has more than {max_nodes} parts")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below.extend(node.values())
            elif isinstance(node, list):
                below.extend(node)
        level = below
    return value


class Bounded(BaseModel):
    """A model whose objects have few fields, whatever it does with those it does not know."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return check_num_fields(value)


class Lenient(Bounded):
    """Unknown keys are dropped."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )


class Open(Bounded):
    """Unknown keys are kept, for rules.py to judge."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True
    )


def check_prompt_logprobs(num_tokens: int, num_top: int) -> None:
    """Raises InvalidRequest when the scores of a prompt would be too large an answer. `num_top` is
    -1 when none are asked for; `num_tokens` are those of all sequences."""
    num_entries = num_tokens * (num_top + 1)
    if num_entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs would give {num_entries} entries ({num_tokens} tokens with "
            f"{num_top + 1} each); at most {MAX_PROMPT_LOGPROBS} are given: ask for fewer "
            "alternatives or choices, or score the prompt in parts",
            param="prompt_logprobs",
        )
