"""The parser of a turn: reasoning, text and tool calls out of an output's text, as it comes.

One Reader per sequence, driven by the detokenizer. Made from the rows of `formats`, as the grammar
is: a call that the grammar allows is read, whatever pieces its text arrives in. Markers that are
tokens of their own arrive as one character each that no text holds, so a marker spelt in ordinary
tokens is text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foveal_runtime.frontend.grammars.formats import (
    BLANKS,
    GEMMA_QUOTE,
    INDEX,
    Format,
    is_raw,
    properties_of,
    split_marks,
    takes_null,
)

_FIRST_MARK = 0xDC00
"""Lone surrogates: no decoded text has them."""
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of a tool call. The first of a call has id and name; arguments are JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class TurnFormat:
    """What a request's outputs are read by.

    Attributes:
        row: the format of tool calls; None where no tools are offered.
        schemas: of the functions' parameters, by name.
        think: markers around reasoning. is_thinking: the prompt ends inside of it.
        marks: token id of each marker that is a token of its own.
        only_calls: the output has no text.
    """

    row: Format | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    think: tuple[str, str] | None = None
    is_thinking: bool = False
    marks: Mapping[str, int] = field(default_factory=dict)
    only_calls: bool = False

    @cached_property
    def texts(self) -> dict[int, str]:
        """The character that each marker's token arrives as."""
        return {token: chr(_FIRST_MARK + i) for i, token in enumerate(self.marks.values())}

    @cached_property
    def openings(self) -> tuple[dict[str, str], dict[str, str]]:
        """Names of functions by the text that opens their call: the first call, later ones."""
        assert self.row is not None
        first, later = (
            {self.encoded(before + self.row.opening(name)): name for name in self.schemas}
            for before in (self.row.begin, self.row.separator)
        )
        return first, later

    def encoded(self, text: str) -> str:
        """Fixed text as it arrives."""
        chars = self.texts
        return "".join(
            chars[self.marks[part]] if part in self.marks else part
            for part in split_marks(text, self.marks)
        )


class Reader:
    """`push` returns what of the text is content; reasoning and calls wait in `take`.

    Attributes:
        blanks: the end of the content so far, which is none of it if a call follows.
    """

    def __init__(self, turn: TurnFormat, request_id: str) -> None:
        self._turn = turn
        self._request_id = request_id
        self._buffer = ""
        self._reasoning = ""
        self._pieces: list[CallPiece] = []
        self.blanks = ""
        self._strips = False
        self._spelt = {ord(turn.texts[token]): mark for mark, token in turn.marks.items()}
        self.num_calls = 0
        self._num_reasoning_tokens = 0
        self._start, self._end = (
            (turn.encoded(turn.think[0]), turn.encoded(turn.think[1])) if turn.think else ("", "")
        )
        self._arguments: _Json | _Params | _Literals | None = None
        self._state: Callable[[], str] = (
            self._read_thought if turn.is_thinking else self._read_start
        )
        row = turn.row
        if row is not None:
            self._marker = turn.encoded(row.marker)
            self._first, self._next = turn.openings
            self._index_end = turn.encoded(row.middle.partition(INDEX)[2])
            self._after, self._last = turn.encoded(row.after), turn.encoded(row.end)

    @property
    def is_reasoning(self) -> bool:
        return self._state == self._read_thought

    @property
    def is_calling(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._arguments is not None

    @property
    def is_before_text(self) -> bool:
        """Whether what was pushed is none of the text: reasoning, and blanks behind it."""
        return self.is_reasoning or self._strips

    def push(self, text: str, num_tokens: int = 1) -> str:
        """Content that is certain now. `num_tokens`: of the output that brought the text."""
        if self.is_reasoning:
            self._num_reasoning_tokens += num_tokens
        self._buffer += text
        content = []
        while True:
            state = self._state
            content.append(state())
            if self._state == state:
                return self._shown("".join(content))

    def finish(self) -> str:
        """The output is over: what was held back. A call that was cut off stays as it is; one that
        has no name yet is not shown, because its marker is no text. Without a marker, its beginning
        is text unless only calls were allowed."""
        rest, self._buffer = self._buffer, ""
        if self.is_reasoning:
            self._reason(rest)
        elif not self.num_calls:
            opens = self._state == self._read_opening and self._marker
            return "" if opens or self._turn.only_calls else self._shown(rest, is_last=True)
        elif self._arguments is not None:
            self._emit(self._arguments.finish())
        return ""

    def take(self) -> tuple[str, tuple[CallPiece, ...], int]:
        """Reasoning, calls and the number of reasoning tokens since the last time."""
        found = self._reasoning, tuple(self._pieces), self._num_reasoning_tokens
        self._reasoning, self._pieces, self._num_reasoning_tokens = "", [], 0
        return found

    # ---- text -----------------------------------------------------------------------------------
    def _shown(self, text: str, is_last: bool = False) -> str:
        """Content without blanks around reasoning and before calls."""
        text = (self.blanks + text).translate(self._spelt)
        self.blanks = ""
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if self.num_calls or (is_last and not text.strip() and self._strips):
            return text.rstrip() if self.num_calls else ""
        if self._turn.row is not None and not is_last:
            shown = text.rstrip()
            self.blanks = text[len(shown) :]
            return shown
        return text

    def _reason(self, text: str) -> None:
        self._reasoning += text.translate(self._spelt)

    def _read_start(self) -> str:
        """Reasoning that the model begins itself, or a call that is the whole answer."""
        text = self._buffer.lstrip(BLANKS)
        if self._start and text.startswith(self._start.rstrip()):
            self._buffer = text[len(self._start.rstrip()) :]
            self._state = self._read_thought
        elif self._start and self._start.startswith(text):
            pass
        elif self._turn.row is not None and not self._marker:
            self._state = self._read_opening
        else:
            self._state = self._read_text
        return ""

    def _read_thought(self) -> str:
        before, found, after = self._buffer.partition(self._end)
        if found:
            self._reason(before)
            self._buffer, self._strips = after, True
            whole = self._turn.row is not None and not self._marker
            self._state = self._read_opening if whole else self._read_text
        else:
            self._reason(self._certain(self._end))
        return ""

    def _read_text(self) -> str:
        if self._turn.row is None or not self._marker:
            text, self._buffer = self._buffer, ""
            return text
        at = self._buffer.find(self._marker)
        if at < 0:
            return self._certain(self._marker)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        self._state = self._read_opening
        return text

    def _certain(self, literal: str) -> str:
        """Takes from the buffer what cannot become part of the literal."""
        size = min(len(self._buffer), len(literal) - 1)
        while size and not literal.startswith(self._buffer[-size:]):
            size -= 1
        cut = len(self._buffer) - size
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text

    # ---- calls ----------------------------------------------------------------------------------
    def _read_opening(self) -> str:
        text = self._buffer if self._marker or self.num_calls else self._buffer.lstrip(BLANKS)
        known = self._next if self.num_calls else self._first
        for opening, name in known.items():
            if text.startswith(opening):
                self._buffer = text[len(opening) :]
                self._begin_call(name)
                return ""
        may_follow = any(opening.startswith(text) for opening in known)
        if not may_follow and not self.num_calls:
            self._marker, self._state = "", self._read_text  # no call after all
        elif not may_follow:
            self._buffer = ""  # the end of all calls
        return ""

    def _begin_call(self, name: str) -> None:
        row = self._turn.row
        assert row is not None
        index = self.num_calls
        self.num_calls += 1
        digest = hashlib.blake2b(f"{self._request_id}/{index}".encode(), digest_size=12).hexdigest()
        names = {
            "call": f"call_{digest}",
            "short": digest[:9],
            "indexed": f"functions.{name}:{index}",
        }
        self._pieces.append(CallPiece(index, names[row.ids], name))
        schema = self._turn.schemas[name]
        if row.arguments == "json":
            self._arguments = _Json()
        elif row.arguments == "params":
            self._arguments = _Params([self._turn.encoded(p) for p in row.param_parts], schema)
        elif row.arguments == "python":
            self._arguments = _Literals("=", "")
        else:
            self._arguments = _Literals(":", self._turn.encoded(GEMMA_QUOTE))
        self._state = self._read_index if INDEX in row.middle else self._read_arguments

    def _read_index(self) -> str:
        _, found, after = self._buffer.partition(self._index_end)
        if found:
            self._buffer, self._state = after, self._read_arguments
        return ""

    def _read_arguments(self) -> str:
        assert self._arguments is not None
        text, self._buffer, is_done = self._arguments.read(self._buffer)
        self._emit(text)
        if is_done:
            self._arguments, self._state = None, self._read_after
        return ""

    def _read_after(self) -> str:
        if self._buffer.startswith(self._after):
            self._buffer = self._buffer[len(self._after) :]
            self._state = self._read_opening
        return ""

    def _emit(self, text: str) -> None:
        if text:
            arguments = text.translate(self._spelt)
            self._pieces.append(CallPiece(self.num_calls - 1, arguments=arguments))


class _Json:
    """An object, as it is, up to its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> tuple[str, str, bool]:
        """(JSON text, what was not read, whether the arguments ended)."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return text[: at + 1], text[at + 1 :], True
        return text, "", False

    def finish(self) -> str:
        return ""


def _spelt(text: str) -> str:
    """Text inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Params:
    """Arguments one by one between literals, as a JSON object."""

    def __init__(self, parts: Sequence[str], schema: Any) -> None:
        self._before, self._between, self._after = parts
        self._raw = {key: is_raw(one) for key, one, _ in properties_of(schema)}
        self._nullable = {key for key, one, _ in properties_of(schema) if takes_null(one)}
        self._may_be_null = False
        self._num = 0
        self._is_text: bool | None = None
        self._ended = False

    def read(self, text: str) -> tuple[str, str, bool]:
        out = ""
        while True:
            if self._is_text is None:
                if text.startswith(self._before) and self._between in text:
                    key, _, text = text[len(self._before) :].partition(self._between)
                    self._is_text = self._raw.get(key, False)
                    self._may_be_null = self._is_text and key in self._nullable
                    out += ("{" if not self._num else ", ") + json.dumps(key) + ": "
                    out += '"' if self._is_text and not self._may_be_null else ""
                    self._num += 1
                elif self._before.startswith(text) or text.startswith(self._before):
                    return out, text, False
                else:
                    return out + ("}" if self._num else "{}"), text, True
            value, found, rest = text.partition(self._after)
            if not found:
                size = min(len(text), len(self._after) - 1)
                while size and not self._after.startswith(text[-size:]):
                    size -= 1
                value, rest = text[: len(text) - size], text[len(text) - size :]
            if self._may_be_null:
                if not found and "null".startswith(value):
                    return out, text, False
                self._may_be_null, self._is_text = False, value != "null" or not found
                out += '"' if self._is_text else ""
            out += _spelt(value) if self._is_text else value
            text = rest
            if not found:
                return out, text, False
            out += '"' if self._is_text else ""
            self._is_text = None

    def finish(self) -> str:
        return ""


class _Literals:
    """Keyword arguments of Python's or Gemma's notation, as a JSON object."""

    def __init__(self, key_end: str, quote: str) -> None:
        self._key_end, self._quote = key_end, quote
        self._opened = self._escaped = False
        self._string = ""
        self._word = ""
        self._depth = 0

    def read(self, text: str) -> tuple[str, str, bool]:
        out = [] if self._opened else ["{"]
        self._opened = True
        at = 0
        while at < len(text):
            if self._quote and text.startswith(self._quote, at):
                out.append(self._flush() + '"')
                self._string = "" if self._string else self._quote
                at += len(self._quote)
                continue
            if self._quote and self._quote.startswith(text[at:]):
                break
            char = text[at]
            if not self._string and not self._depth and char in ")}":
                return "".join([*out, self._flush(), "}"]), text[at:], True
            out.append(self._step(char))
            at += 1
        return "".join(out), text[at:], False

    def _step(self, char: str) -> str:
        if self._string:
            if self._string != '"':
                return _spelt(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._string = ""
            return char
        if char.isalnum() or char in "_.-":
            self._word += char
            return ""
        if char == self._key_end and self._word:
            word, self._word = self._word, ""
            return f'"{word}": '
        if char == '"':
            self._string = char
        self._depth += (char in "{[(") - (char in "}])")
        return self._flush() + char

    def _flush(self) -> str:
        word, self._word = self._word, ""
        return _WORDS.get(word, word)

    def finish(self) -> str:
        return self._flush()
