"""JSON bodies: one encoder for all answers, and a parser that holds no other thread up for long.

The parser holds the interpreter's lock from a body's first byte to its last.
What makes requests large are a few long texts (media as base64, documents): they are found by
searches in slices, put together slice by slice, and only what is left is parsed in one piece.
"""

from __future__ import annotations

import contextlib
import operator
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from foveal_runtime.frontend.protocol.body_text import Body, BodyText
from foveal_runtime.plan.errors import InvalidRequest

WHOLE_BYTES = 1 << 20
"""Bodies up to this size are parsed as they are, within a millisecond or two, unless they have more
brackets or commas than may be parsed at once: then those in long texts do not count."""
LONG_BYTES = 4096
"""Texts of so many bytes are long."""
MAX_REST_BYTES = 16 << 20
MAX_COMMAS = 1_000_000
"""Each value beside the first needs one."""
MAX_BRACKETS = 200_000
"""Lists and objects cost far more than numbers: the collector looks at each."""
MAX_BOTH = 1_200_000
"""Commas, and four times the brackets."""
MAX_QUOTES = 300_000
MAX_WIDE_CHARS = 16_000_000
"""Of a long text that is not ASCII, which is put together in one piece."""

_MARK = b"\xef\xbb\xbf"
"""Of UTF-8, with which some clients begin; RFC 8259 lets parsers pass over it."""
_STEP_BYTES = 8192
_PIECE_BYTES = 2 << 20
_COUNTED_BYTES = 1 << 17
_DATA_URL = b'"data:'
_MAX_DATA_URLS = 64
_ADDRESSES = ("image_url", "video_url", "audio_url")
"""Fields of a part that hold a URL, or an object with `url`."""
_ESCAPE_BYTES = 12  # the longest: two surrogates
_CUT_OFF = "Input data was truncated"
_POSITION = re.compile(r"\(byte (\d+)\)$")
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]")
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])")
_TEXT = msgspec.json.Decoder(str)


class _Span(NamedTuple):
    """A long text in the body: its first byte, the quotation mark behind it, and what stands for it
    in the rest."""

    begin: int
    end: int
    name: str


def decode_json(body: bytes | bytearray) -> Any:
    """Raises InvalidRequest: for what is no JSON, and for a body of which too much would have to be
    parsed in one piece."""
    if body.startswith(_MARK):
        body = body[len(_MARK) :]
    if len(body) <= WHOLE_BYTES and (_is_mostly_media(body) or not _exceeded(body)):
        return _parse(body, [])
    spans = _long_texts(body)
    rest_bytes = len(body) - sum(span.end - span.begin for span in spans)
    if rest_bytes > MAX_REST_BYTES:
        raise InvalidRequest(
            f"the body has {rest_bytes} bytes besides texts of {LONG_BYTES} bytes and more; at "
            f"most {MAX_REST_BYTES} are taken"
        )
    rest, done = bytearray(), 0
    for span in spans:
        rest += body[done : span.begin] + span.name.encode()
        done = span.end
    rest += body[done:]
    if exceeded := _exceeded(rest):
        raise InvalidRequest(exceeded)
    value = [_parse(rest, spans)]
    texts = {span.name: _text(body, span) for span in spans}
    if _put_back(value, texts) < len(texts):
        raise InvalidRequest(
            f"the body has a text of {LONG_BYTES} bytes or more as the name of a field, or in a "
            "field that its object has twice"
        )
    return value[0]


def decode_body(body: Body) -> Any:
    """The same, of a body of at most WHOLE_BYTES; data URLs that stand where a chat's messages have
    media, and are most of the body, come as BodyText."""
    spans = _data_urls(body)
    whole = memoryview(body.buffer)[: body.size]
    rest_bytes = body.size - sum(span.end - span.begin for span in spans)
    if 2 * rest_bytes < body.size and rest_bytes <= _uncounted_bytes():
        rest, done = bytearray(), 0
        for span in spans:
            rest += whole[done : span.begin]
            rest += span.name.encode()
            done = span.end
        rest += whole[done:]
        texts = {span.name: BodyText(body, span.begin, span.end) for span in spans}
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = msgspec.json.decode(rest)
            if _put_media(value, texts) == len(spans):
                return value
    return decode_json(body.content())


def _data_urls(body: Body) -> list[_Span]:
    """Those that are long and stand in the body as they are read; see `_is_mostly_media`."""
    spans: list[_Span] = []
    at = 0
    for _ in range(_MAX_DATA_URLS):
        at = body.buffer.find(_DATA_URL, at, body.size)
        end = body.buffer.find(b'"', at + 1, body.size) if at >= 0 else -1
        if end < 0:
            break
        if end - at > LONG_BYTES and body.buffer.find(b"\\", at, end) < 0:
            chars = np.frombuffer(body.buffer, np.uint8, end - at - 1, at + 1)
            if chars.min() >= 0x20 and chars.max() < 0x7F:
                spans.append(_Span(at + 1, end, f"{secrets.token_hex(16)}.{len(spans)}"))
        at = end
    return spans


def _put_media(value: Any, texts: Mapping[str, BodyText]) -> int:
    """How many of the texts were found where messages have media."""
    num_found = 0
    messages = value.get("messages") if isinstance(value, dict) else None
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            for name in _ADDRESSES if isinstance(part, dict) else ():
                given = part.get(name)
                url = given.get("url") if isinstance(given, dict) else given
                if isinstance(url, str) and url in texts:
                    part[name] = {**(given if isinstance(given, dict) else {}), "url": texts[url]}
                    num_found += 1
    return num_found


def _parse(rest: bytes | bytearray, spans: Sequence[_Span]) -> Any:
    """What is left between `spans`."""
    try:
        return msgspec.json.decode(rest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(error, partial(_place, spans), rest) from error
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None


def _uncounted_bytes() -> int:
    """So many, whatever they are, exceed nothing."""
    return min(MAX_COMMAS, MAX_BRACKETS, MAX_QUOTES, MAX_BOTH // 4)


def _is_mostly_media(body: bytes | bytearray) -> bool:
    """Whether so little of it is besides its first data URLs that nothing need be counted. From
    `"data:` to the next quotation mark there is text, or the parser stops at the `d`."""
    left, at = len(body), 0
    for _ in range(_MAX_DATA_URLS):
        at = body.find(_DATA_URL, at) if left > _uncounted_bytes() else -1
        end = body.find(b'"', at + 1) if at >= 0 else -1
        if end < 0:
            break
        left -= end - at
        at = end
    return left <= _uncounted_bytes()


def _exceeded(rest: bytes | bytearray) -> str:
    """What there is too much of; "" when the parser may have it."""
    if len(rest) <= _uncounted_bytes():
        return ""
    commas, brackets, quotes = _count(rest, b","), _count(rest, b"[{"), _count(rest, b'"')
    for name, found, most in (
        ("commas", commas, MAX_COMMAS),
        ("brackets", brackets, MAX_BRACKETS),
        ("quotation marks", quotes, MAX_QUOTES),
        ("commas and, four for each, brackets", commas + 4 * brackets, MAX_BOTH),
    ):
        if found > most:
            return f"the body has {found} {name}; at most {most} are taken, in text or not"
    return ""


def _count(rest: bytes | bytearray, chars: bytes) -> int:
    view = np.frombuffer(rest, np.uint8)  # `bytes.count` takes five times as long
    return sum(
        int(np.count_nonzero(view[start : start + _COUNTED_BYTES] == char))
        for start in range(0, len(view), _COUNTED_BYTES)  # others have their turn between
        for char in chars
    )


def _invalid(
    error: Exception, place: Callable[[int], int], read: bytes | bytearray
) -> InvalidRequest:
    """`place` finds the byte of the body that the parser means. It takes what was `read` for cut
    off, where half of a surrogate pair is the end of a text: JavaScript cuts texts so."""
    text = str(error)
    if text == _CUT_OFF and (half := _HALF_PAIR.search(read)):
        text = f"half of a surrogate pair (byte {half.start()})"
    text = _POSITION.sub(lambda found: f"(byte {place(int(found[1]))})", text)
    return InvalidRequest(f"the body is not valid JSON: {text}")


def _place(spans: Sequence[_Span], at: int) -> int:
    for span in spans:
        if at < span.begin:
            break
        at += span.end - span.begin - len(span.name)
    return at


def _long_texts(body: bytes | bytearray) -> list[_Span]:
    """In order. One that lies within a step of the search is left where it is, and so is one that
    does not end, for the parser to refuse. Raises InvalidRequest for one too large for that."""
    spans: list[_Span] = []
    nonce = secrets.token_hex(8)
    begin, start, size = -1, 0, len(body)  # `begin`: of the text that the search is in
    while start < size:
        step = bytes(body[start : start + _STEP_BYTES])
        if start + len(step) < size and (len(step) - len(step.rstrip(b"\\"))) % 2:
            step = step[:-1]  # no escape is cut in two
        masked = step.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        num_quotes = masked.count(b'"')
        if begin >= 0 and num_quotes:
            end = start + masked.find(b'"')
            if end - begin >= LONG_BYTES:
                spans.append(_Span(begin, end, f"{nonce}.{len(spans)}"))
            num_quotes -= 1
            begin = -1
        if begin < 0 and num_quotes % 2:
            begin = start + masked.rfind(b'"') + 1
        start += len(step)
    if begin >= 0 and size - begin > MAX_REST_BYTES:
        raise InvalidRequest(f"the body is not valid JSON: {_CUT_OFF}")
    return spans


def _text(body: bytes | bytearray, span: _Span) -> str:
    """Grows in place as long as it is ASCII, as media are: joining the pieces of 128 MiB would take
    50 ms. CPython does so once it has seen the loop run; before, and elsewhere, it copies."""
    text = ""
    wide: list[str] = []
    num_chars = 0
    for start, end in _pieces(body, span):
        quoted = b"".join((b'"', body[start:end], b'"'))
        try:
            piece = _TEXT.decode(quoted)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _invalid(error, partial(operator.add, start - 1), quoted) from error
        num_chars += len(piece)
        if not wide and piece.isascii():
            text += piece
            continue
        wide.append(piece)
        if num_chars > MAX_WIDE_CHARS:
            raise InvalidRequest(
                f"the body has a text of more than {MAX_WIDE_CHARS} characters, not all ASCII"
            )
    return "".join((text, *wide)) if wide else text


def _pieces(body: bytes | bytearray, span: _Span) -> Iterator[tuple[int, int]]:
    """None of them begins in the middle of a character or of an escape."""
    start = span.begin
    while start < span.end:
        cut = start + _PIECE_BYTES
        if cut >= span.end:
            cut = span.end
        else:
            for _ in range(3):
                cut -= body[cut] & 0xC0 == 0x80
            masked = body[start:cut].replace(b"\\\\", b"__")
            at = masked.find(b"\\", len(masked) - _ESCAPE_BYTES + 1)
            if at >= 0:
                cut = start + at - (6 if _LOW_SURROGATE.match(masked, at) else 0)
        yield start, cut
        start = cut


def _put_back(root: list[Any], texts: dict[str, str]) -> int:
    """How many of the texts were found where they stood."""
    num_found = 0
    left: list[Any] = [root]
    while left and num_found < len(texts):
        node = left.pop()
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(child, str):
                if child in texts:
                    node[name] = texts[child]
                    num_found += 1
            elif isinstance(child, dict | list):
                left.append(child)
    return num_found


_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """Compact JSON. Numbers that JSON lacks (inf, nan) come out as null."""
    return _encoder.encode(value)


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
