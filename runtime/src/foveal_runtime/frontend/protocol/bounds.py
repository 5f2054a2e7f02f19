"""Bounds on the shape of JSON that a request may bring, checked before its content.

Used by `requests`. Types bound what they name; these bound what they leave open: how many fields an
object has, and how deep a free-form value is. Validation stops at the first error, because a list
of a million bad entries would otherwise be a list of a million messages.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, model_validator

from foveal_runtime.plan.errors import InvalidRequest

MAX_FIELDS = 256
MAX_DEPTH = 16
MAX_NODES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS_DEPTH = 104
MAX_TOOLS_NODES = 100_000
MAX_TOOLS_CHARS = 2_000_000
MAX_PROMPT_LOGPROBS = 1 << 18
"""Entries of one request: they come in one message, which is read in one piece."""


def check_num_fields(value: Any, limit: int = MAX_FIELDS) -> Any:
    """Raises ValueError for an object with too many fields; anything else is for the type."""
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"the object has {len(value)} fields; at most {limit} are taken")
    return value


def check_num_parts(value: Any) -> Any:
    """Raises ValueError for messages with too many parts in all, calls of tools among them; each is
    2 us of validation, which nothing interrupts."""
    if isinstance(value, list):
        parts = _parts_of(value, "content", "output", "summary", "tool_calls")
        num = len(parts) + len(_parts_of(parts, "content"))  # those of a tool's result
        if num > MAX_PARTS:
            raise ValueError(f"the messages have {num} parts; at most {MAX_PARTS} are taken")
    return value


def _parts_of(objects: list[Any], *names: str) -> list[Any]:
    found = (one.get(name) for one in objects if isinstance(one, dict) for name in names)
    return [part for parts in found if isinstance(parts, list) for part in parts]


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


def check_tools(value: Any) -> Any:
    """Raises ValueError for tools that are too large together: they are written out in one piece,
    for the chat template."""
    check_plain(value, MAX_TOOLS_DEPTH, MAX_TOOLS_NODES)
    if isinstance(value, list):
        num_chars = sum(num_chars_in(tool) for tool in value)
        if num_chars > MAX_TOOLS_CHARS:
            raise ValueError(
                f"the tools have {num_chars} characters; at most {MAX_TOOLS_CHARS} are taken"
            )
    return value


def num_chars_in(value: Any, each: int = 0) -> int:
    """Of all texts and names in free-form JSON, and `each` for every value."""
    total, left = 0, [value]
    while left:
        node = left.pop()
        total += each
        if isinstance(node, str):
            total += len(node)
        elif isinstance(node, dict):
            total += sum(map(len, node))
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
    return total


def check_ids(value: Any, check_each: ValidatorFunctionWrapHandler) -> Any:
    """Token ids at four times the speed of a validator for each, which words the errors."""
    if isinstance(value, list) and value:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(value, _IDS)
    return check_each(value)


_IDS = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


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


def check_prompt_logprobs(num_tokens: int, num_top: int) -> int:
    """The scores of a prompt; 0 when none are asked for, which `num_top` -1 says. `num_tokens` are
    those of all sequences. Raises InvalidRequest when they would be too large an answer."""
    num_entries = num_tokens * (num_top + 1)
    if num_entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs would give {num_entries} entries ({num_tokens} tokens with "
            f"{num_top + 1} each); at most {MAX_PROMPT_LOGPROBS} are given: ask for fewer "
            "alternatives or choices, or score the prompt in parts",
            param="prompt_logprobs",
        )
    return num_entries


def tokens_with_scores(
    max_tokens: int, num_top: int, num_sequences: int, limit: int, *, is_given: bool
) -> int:
    """`max_tokens` of each sequence of an answer that is not streamed, and so held until its end:
    cut to what `limit` scores in all allow, unless the client gave it.

    Raises InvalidRequest when what was given would exceed the limit.
    """
    most = limit // (num_sequences * (num_top + 1)) if num_top >= 0 else max_tokens
    if max_tokens <= most:
        return max_tokens
    if is_given or not most:
        raise InvalidRequest(
            f"logprobs would give {max_tokens * num_sequences * (num_top + 1)} entries "
            f"({num_sequences} sequences of {max_tokens} tokens with {num_top + 1} each); an "
            f"answer that is not streamed holds at most {limit}: stream it, or ask for fewer "
            "tokens, choices or alternatives",
            param="logprobs",
        )
    return most
