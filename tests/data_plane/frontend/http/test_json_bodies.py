"""Large bodies are read in pieces, as the parser would have read them in one."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from foveal_runtime.frontend.http.asgi import json_bodies
from foveal_runtime.frontend.http.asgi.json_bodies import decode_json
from foveal_runtime.plan.errors import InvalidRequest

PIECES = (
    "a", "data:image/png;base64,", "iVBORw0KGgo=", "é", "漢字", "😀", '"', "\\", "\\\\", "/", "\n",
    "\x7f", "[{", "}]", ",", ":", " ", "\t",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short documents have long texts, and those many pieces."""
    for name, size in (
        ("WHOLE_BYTES", 0), ("LONG_BYTES", 12), ("_STEP_BYTES", 7), ("_PIECE_BYTES", 32),
        ("_COUNTED_BYTES", 5),
    ):  # fmt: skip
        monkeypatch.setattr(json_bodies, name, size)


def some_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.choice((0, 1, 3, 30, 120))))


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(4 if depth > 3 else 6)
    if kind == 4:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        names = (rng.choice(("a", "é", "b\\", 'c"')) + str(i) for i in range(rng.randrange(4)))
        return {name: some_value(rng, depth + 1) for name in names}
    return (some_text(rng), 1, None, -2.5e3)[kind]


def written(rng: random.Random, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
    if rng.random() < 0.3:
        text = text.replace("/", "\\/")  # as PHP writes it
    return text.encode()


def what_it_says(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except InvalidRequest as error:
        return error.message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"the body is not valid JSON: {error}"


def test_a_body_in_pieces_is_what_the_parser_says() -> None:
    rng = random.Random(16)
    for _ in range(3000):
        body = bytearray(written(rng, value := some_value(rng)))
        assert decode_json(body) == value, body


def test_a_damaged_body_is_refused_where_the_parser_refuses_it() -> None:
    """Except in the words: two errors may be found in another order."""
    rng = random.Random(61)
    num_refused = num_same = 0
    for _ in range(6000):
        body = bytearray(written(rng, some_value(rng)))
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(body) + 1)
            body[at : at + rng.randrange(3)] = rng.choice(
                (b"", b'"', b"\\", b"\x00", b"\xff", b"\\ud83d", b"\\udc00", b"}", b",", b"\\u12")
            )
        expected, found = what_it_says(msgspec.json.decode, body), what_it_says(decode_json, body)
        if not (isinstance(expected, str) and expected.startswith("the body is not valid JSON")):
            assert found == expected or "the name of a field, or" in found, body
            continue
        num_refused += 1
        num_same += found == expected
        assert isinstance(found, str), body
        assert found.startswith("the body is not valid JSON"), (body, found)
    assert num_refused > 1000
    assert num_same > 0.9 * num_refused, (num_same, num_refused)


@pytest.mark.parametrize("before", ["", "x" * 40])
def test_half_a_surrogate_pair_at_the_end_of_a_text_is_named(before: str) -> None:
    """The body was "truncated": JavaScript cuts texts in a character and writes what is left."""
    body = json.dumps({"a": [before + "\ud83d"]}).encode()
    at = body.index(b"\\ud83d")
    with pytest.raises(InvalidRequest, match=rf"half of a surrogate pair \(byte {at}\)"):
        decode_json(body)


def test_texts_in_places_that_get_lost_are_refused() -> None:
    long = b'"' + b"x" * 40 + b'"'
    for body in (b"{" + long + b":1}", b'{"a":' + long + b',"a":2}'):
        with pytest.raises(InvalidRequest, match="name of a field, or in a field that its object"):
            decode_json(body)


@pytest.mark.parametrize(
    ("limit", "body", "message"),
    [
        ("MAX_REST_BYTES", b" " * 50, "has 50 bytes besides texts of 12 bytes and more; at most 9"),
        ("MAX_COMMAS", b"[" + b"1," * 20 + b"1]", "has 20 commas; at most 9"),
        ("MAX_BRACKETS", b"[" * 5 + b"{" * 5, "has 10 brackets; at most 9"),
        ("MAX_BOTH", b"[1,[1,[1]]]", "14 commas and, four for each, brackets"),
        ("MAX_QUOTES", b'["",' * 5 + b"1", "has 10 quotation marks; at most 9"),
        ("MAX_WIDE_CHARS", '"{}"'.format("é" * 40).encode(), "more than 9 characters, not all"),
    ],
)
def test_what_would_be_parsed_in_one_piece_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, body: bytes, message: str
) -> None:
    monkeypatch.setattr(json_bodies, limit, 9)
    with pytest.raises(InvalidRequest, match=message):
        decode_json(body)


def test_characters_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "_COUNTED_BYTES", 7)
    for size in (1, 6, 7, 8, 50):
        body = (b'[{",}]a' * 9)[:size]
        found = [json_bodies._count(kind(body), b"[{") for kind in (bytes, bytearray)]
        assert found == [body.count(b"[") + body.count(b"{")] * 2


def test_what_stands_in_long_texts_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_REST_BYTES", "MAX_COMMAS", "MAX_BRACKETS", "MAX_QUOTES"):
        monkeypatch.setattr(json_bodies, limit, 60)
    text = ',[{\\"' * 200
    assert decode_json(f'{{"a":"{text}"}}'.encode()) == {"a": ',[{"' * 200}


def test_nothing_is_counted_where_data_urls_leave_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(json_bodies, "MAX_BRACKETS", 60)
    counted = []
    monkeypatch.setattr(json_bodies, "_exceeded", lambda body: counted.append(len(body)) or "")
    media = "data:image/png;base64," + "a" * 200
    assert decode_json(f'["{media}","{media}"]'.encode()) == [media, media]
    assert counted == []
    for body in (b'["data:' + b"[" * 200, b'["data:","' + b"[" * 200):  # no end; another text
        with pytest.raises(InvalidRequest):
            decode_json(body)
    assert counted == [207, 210]


def test_brackets_behind_data_urls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(json_bodies, "MAX_BRACKETS", 60)
    for head in (b'["data:a",', b'["data:a\\"",', b'["data:a"' * 80 + b","):
        with pytest.raises(InvalidRequest, match="brackets"):
            decode_json(head + b"[" * 200)


def test_what_stands_in_long_texts_is_not_counted_in_small_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A larger body with the same text was taken."""
    monkeypatch.setattr(json_bodies, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(json_bodies, "MAX_BRACKETS", 60)
    text = "[" * 200
    assert decode_json(f'{{"a":"{text}"}}'.encode()) == {"a": text}
    with pytest.raises(InvalidRequest, match="has 61 brackets"):
        decode_json(b"[" * 61)
