"""Output tokens to text as they come: exact, UTF-8 safe, linear, and watching for stop strings.

One Detokenizer per sequence, driven by sequence.py. Text that could still become part of a stop
string, or of an unfinished character, is held back; everything else leaves at once.
Never looks at more than a few tokens or characters of the past.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from foveal_runtime.frontend.grammars.reader import CallPiece, Reader, TurnFormat
from foveal_runtime.frontend.text.tokenizer import TextTokenizer

_MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes, so a tail that is still broken after 8 tokens stays broken."""
_MAX_WINDOW_TOKENS = 64


class TextDecoder(Protocol):
    def push(self, token_id: int) -> str:
        """Text that is certain after this token."""
        ...

    def flush(self) -> str:
        """The sequence is over: what was held back (U+FFFD for an unfinished character)."""
        ...


class ByteLevelDecoder:
    """For byte-level vocabularies: tokens are bytes, so this is plain incremental UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other vocabulary: decodes a short window twice and takes the difference.

    The window starts one emission back, because such decoders treat the first token specially
    (a leading space goes). `context` are tokens that stand before the output and are not emitted.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._done_tokens = len(self._ids)
        self._done_text = decode(self._ids) if self._ids else ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.startswith(self._done_text):
            # A later byte made an emitted run of byte tokens invalid; what is out stays out.
            self._restart(self._done_tokens)
            text = self._decode(self._ids)
        fresh = text[len(self._done_text) :]
        num_pending = len(self._ids) - self._done_tokens
        if fresh.endswith("\ufffd") and num_pending < _MAX_PENDING_TOKENS:
            return ""
        if fresh:
            self._ids = self._ids[self._done_tokens :]
            self._mark_done()
        elif len(self._ids) > _MAX_WINDOW_TOKENS:
            self._ids = self._ids[-_MAX_PENDING_TOKENS:]
            self._mark_done()
        return fresh

    def flush(self) -> str:
        text = self._decode(self._ids)
        if not text.startswith(self._done_text):
            self._restart(self._done_tokens)
            text = self._decode(self._ids)
        fresh = text[len(self._done_text) :]
        self._mark_done()
        return fresh

    def _restart(self, at: int) -> None:
        self._ids, self._done_tokens, self._done_text = self._ids[at:], 0, ""

    def _mark_done(self) -> None:
        self._done_tokens = len(self._ids)
        self._done_text = self._decode(self._ids)


class StopMatcher:
    """Finds the stop string that completes first, whatever pieces the text arrives in.

    Of several that complete at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "empty stop strings are refused at the edge"
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_held_chars = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""

    def push(self, text: str, *, passes: bool = False) -> tuple[str, str | None]:
        """Returns (text that may leave, the stop string that was found). Found: the text ends just
        before it. `passes`: none ends in this text; one may begin."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        found = None if passes else self._lookup(buffer, len(self._held))
        if found is not None:
            self._held = ""
            return buffer[: found[0]], found[1]
        num_held = self._num_held(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held], None

    def completes(self, text: str) -> bool:
        """Whether `push` of this text would find a stop string."""
        held = self._held
        return bool(self._stops) and self._lookup(held + text, len(held)) is not None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _lookup(self, buffer: str, num_held: int) -> tuple[int, str] | None:
        """What ends within the held characters was passed over."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, buffer: str) -> int:
        """Length of the longest tail of `buffer` that begins some stop string."""
        for size in range(min(self._max_held_chars, len(buffer)), 0, -1):
            if buffer[-size] in self._first_chars:
                tail = buffer[-size:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return size
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens added. `num_tokens` of them were used: fewer than given when `stop` (the
    stop string found) is set."""

    text: str
    num_tokens: int
    stop: str | None = None


class Detokenizer:
    """Tokens of one sequence to text.

    Args:
        stops: stop strings, non-empty. None ends within the first `min_tokens` tokens.
        include_stop: the stop string stays in the text.
        context: prompt tokens before the output, where the text continues them.
        turn: how reasoning and tool calls are written; stop strings are watched for beside them.
        request_id: ids of calls are made from it.

    Attributes:
        text_tokens: those of all tokens so far that the text so far stands in.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        turn: TurnFormat | None = None,
        request_id: str = "",
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._reader = Reader(turn, request_id) if turn is not None else None
        self._marks = turn.texts if turn is not None else {}
        self._decoder: TextDecoder
        if tokenizer.is_byte_level:
            self._decoder = ByteLevelDecoder(tokenizer.token_bytes)
        else:
            self._decoder = WindowDecoder(tokenizer.decode, context[-_MAX_PENDING_TOKENS:])
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.text_tokens = range(0)

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes the next tokens; stops reading at the one that completes a stop string."""
        texts: list[str] = []
        for used, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if token_id in self._marks:
                fresh = self._decoder.flush() + self._marks[token_id]
            elif token_id in self._skipped:
                continue
            else:
                fresh = self._decoder.push(token_id)
            if self._reader is not None:
                fresh = self._reader.push(fresh)
            is_early = self._num_tokens <= self._min_tokens
            text, stop = self._matcher.push(fresh, passes=is_early)
            blanks = self._reader.blanks if self._reader is not None and not is_early else ""
            if stop is None and blanks and self._matcher.completes(blanks):
                more, stop = self._matcher.push(blanks)
                text += more
            if stop is None and self.num_calls:
                text += self._matcher.flush()  # all text stands before the calls
            self._note(text)
            texts.append(text)
            if stop is not None:
                if self._include_stop:
                    texts.append(stop)
                return Piece("".join(texts), used, stop)
        return Piece("".join(texts), len(token_ids))

    def finish(self) -> Piece:
        """The sequence ended for another reason: everything held back comes out."""
        rest = self._decoder.flush()
        if self._reader is not None:
            rest = self._reader.push(rest, 0) + self._reader.finish()
        text, stop = self._matcher.push(rest, passes=self._num_tokens <= self._min_tokens)
        if stop is not None:
            text += stop if self._include_stop else ""
        else:
            text += self._matcher.flush()
        self._note(text)
        return Piece(text, 0, stop)

    def _note(self, text: str) -> None:
        """The last token brought this text."""
        if text:
            self.text_tokens = range(self.text_tokens.start, self._num_tokens)
        elif not self.text_tokens and self._reader is not None and self._reader.is_before_text:
            self.text_tokens = range(self._num_tokens, self._num_tokens)

    @property
    def num_calls(self) -> int:
        return 0 if self._reader is None else self._reader.num_calls

    @property
    def is_calling(self) -> bool:
        """Whether the last call has not ended."""
        return self._reader is not None and self._reader.is_calling

    def take(self) -> tuple[str, tuple[CallPiece, ...], int]:
        """Reasoning, calls and the number of reasoning tokens since the last time."""
        return ("", (), 0) if self._reader is None else self._reader.take()
