"""Calls of tools and their results in a conversation, as a chat template takes them.

Applied by chat_template.py to messages in the template's own form. Conversations come from many
servers: ids of any kind or none, several calls in one message. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)
Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a template takes of calls.

    Attributes:
        any_id: ids of every form; else nine letters and digits.
        several: several calls in one message.
        user_after: a message of the user after a result; else the model's must be next.
    """

    any_id: bool = True
    several: bool = True
    user_after: bool = True


def fit_calls(messages: Sequence[Plain], rules: CallRules) -> list[Plain]:
    """Results name the calls that they answer, those without an id the first that has no result
    yet. Where a template takes one call at a time, each stands before its result; where it takes no
    user after one, a text of the user's is the end of the last result."""
    out: list[Plain] = []
    calls = _OpenCalls(rules)
    for one in messages:
        text = None if rules.user_after else _text_after(out, one)
        if one["role"] == "tool":
            out += calls.answered(one)
        elif text is not None:
            out[-1] = _with_text(out[-1], text)
        else:
            out += [*calls.left(), *calls.begin(one)]
    out += calls.left()
    return out if rules.any_id else [_with_short_ids(one) for one in out]


def _text_after(before: Sequence[Plain], message: Plain) -> str | None:
    """What the user says after a result; None where it is more than text."""
    content = message["content"]
    if message["role"] != "user" or not before or before[-1]["role"] != "tool":
        return None
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part["type"] == "text"]
    return "\n".join(texts) if len(texts) == len(content) else None


def _with_text(result: Plain, text: str) -> Plain:
    content = result["content"]
    if isinstance(content, str):
        return {**result, "content": f"{content}\n\n{text}"}
    return {**result, "content": [*content, {"type": "text", "text": text}]}


class _OpenCalls:
    """The calls of one message that have no result yet."""

    def __init__(self, rules: CallRules) -> None:
        self._is_whole = rules.several
        self._calls: list[Plain] = []
        self._head: Plain = {}

    def begin(self, message: Plain) -> list[Plain]:
        """The message, unless it stands with its calls before their results."""
        self._calls = list(message.get("tool_calls") or ())
        self._head = message
        return [message] if self._is_whole or not self._calls else []

    def answered(self, result: Plain) -> list[Plain]:
        wanted = result.get("tool_call_id")
        found = next((c for c in self._calls if not wanted or c["id"] == wanted), None)
        if found is None:
            return [result]
        self._calls.remove(found)
        result = {**result, "tool_call_id": found["id"]}
        return [result] if self._is_whole else [self._with(found), result]

    def left(self) -> list[Plain]:
        """Those that get no result."""
        calls, self._calls = self._calls, []
        return [] if self._is_whole else [self._with(call) for call in calls]

    def _with(self, call: Plain) -> Plain:
        """A message with the call; the first has what stands beside the calls."""
        message = {**self._head, "tool_calls": [call]}
        is_text = isinstance(message["content"], str)
        nothing = "" if is_text else [{"type": "text", "text": ""}]
        self._head = {"role": "assistant", "content": nothing}
        return message


def _with_short_ids(message: Plain) -> Plain:
    out = dict(message)
    if "tool_calls" in out:
        out["tool_calls"] = [{**call, "id": _short(call["id"])} for call in out["tool_calls"]]
    if "tool_call_id" in out:
        out["tool_call_id"] = _short(out["tool_call_id"])
    return out


def _short(name: str) -> str:
    """The same in every request of a conversation."""
    if _SHORT_ID.fullmatch(name):
        return name
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]
