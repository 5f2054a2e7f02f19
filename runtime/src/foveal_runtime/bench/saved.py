"""Saved traces: requests as JSON lines, so that what was sent once can be sent again elsewhere.

A line is `{"messages": [...]}` as the chat API takes them, with these if wanted: `conversation`, a
name (lines of the same name follow each other, each after the reply to the one before and with the
whole history, so `messages` holds only what is new); `at`, seconds after the start; `max_tokens`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from foveal_runtime.bench.traces import Question, Trace
from foveal_runtime.plan.errors import StartupError

MAX_LINES = 1_000_000


class SavedRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    conversation: str = ""
    at: float | None = None
    max_tokens: int = 0


def load(path: Path, max_tokens: int) -> Trace:
    """The trace of a file. `max_tokens`: of lines that do not say it. Raises StartupError that
    names the line."""
    conversations: dict[str, list[Question]] = {}
    starts: dict[str, float] = {}
    try:
        with path.open("rb") as file:
            for number, data in enumerate(itertools.islice(file, MAX_LINES), 1):
                if not data.strip():
                    continue
                line = _line(path, number, data)
                name = line.conversation or f"line {number}"
                if line.at is not None:
                    starts.setdefault(name, line.at)
                conversations.setdefault(name, []).append(
                    Question((), "", messages=tuple(line.messages), max_tokens=line.max_tokens)
                )
    except OSError as error:
        raise StartupError(f"--replay {path}: {error.strerror}") from error
    if not conversations:
        raise StartupError(
            f'--replay {path}: no requests: write {{"messages": [...]}} on each line'
        )
    if starts and len(starts) < len(conversations):
        missing = next(name for name in conversations if name not in starts)
        raise StartupError(
            f"--replay {path}: {missing} has no `at` and others have: give it to all or none"
        )
    return Trace(
        path.stem,
        tuple(map(tuple, conversations.values())),
        max_tokens,
        tuple(starts[name] for name in conversations) if starts else (),
    )


def _line(path: Path, number: int, data: bytes) -> SavedRequest:
    try:
        line = msgspec.json.decode(data, type=SavedRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StartupError(f"--replay {path}, line {number}: {error}") from error
    if not line.messages:
        raise StartupError(f"--replay {path}, line {number}: `messages` is empty")
    if line.max_tokens < 0 or (line.at is not None and not 0 <= line.at < float("inf")):
        raise StartupError(f"--replay {path}, line {number}: `at` and `max_tokens` are at least 0")
    return line


def dumps(trace: Trace, urls_of: Mapping[int, str]) -> bytes:
    """The lines of a trace. `urls_of`: data URL by image number."""
    lines = []
    for index, questions in enumerate(trace.conversations):
        name = f"{trace.name} {index}" if len(questions) > 1 else ""
        for question in questions:
            lines.append(
                SavedRequest(
                    messages=messages_of(question, urls_of),
                    conversation=name,
                    at=trace.starts[index] if trace.starts else None,
                    max_tokens=question.max_tokens or trace.max_tokens,
                )
            )
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def messages_of(question: Question, urls_of: Mapping[int, str]) -> list[dict[str, Any]]:
    """What the question adds to its conversation, as the API takes it."""
    if question.messages:
        return list(question.messages)
    parts: list[dict[str, Any]] = []
    if question.before:
        parts.append({"type": "text", "text": question.before})
    parts += [{"type": "image_url", "image_url": {"url": urls_of[i]}} for i in question.images]
    parts.append({"type": "text", "text": question.text})
    return [{"role": "user", "content": parts}]
