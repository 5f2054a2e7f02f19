"""Incremental text equals the full decode; stop strings do not depend on how text arrives."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from foveal_runtime.frontend.grammars.formats import FORMATS
from foveal_runtime.frontend.grammars.reader import TurnFormat
from foveal_runtime.frontend.http.answers import chat_logprobs, num_chars
from foveal_runtime.frontend.testing.fake_tokenizer import byte_tokenizer
from foveal_runtime.frontend.text.detokenizer import Detokenizer, StopMatcher
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.wire.messages import TokenLogprobs

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@functools.cache
def byte_level() -> TextTokenizer:
    return TextTokenizer(byte_tokenizer())


@functools.cache
def sentencepiece_like() -> TextTokenizer:
    """Words with a leading mark, byte fallback, and a first space that is stripped (Llama 2)."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "▁cat", "s", "e", "a", "é", "世", "▁世"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def stream(tokenizer: TextTokenizer, token_ids: list[int], size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    out = [
        detokenizer.push(token_ids[start : start + size]).text
        for start in range(0, len(token_ids), size)
    ]
    return [*out, detokenizer.finish().text]


@given(st.lists(st.integers(0, 262), max_size=60), st.integers(1, 5))
@settings(deadline=None)
def test_any_bytes_equal_the_full_decode(token_ids: list[int], size: int) -> None:
    """Broken UTF-8 included: the replacement characters are the same and at the same places."""
    tokenizer = byte_level()
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, token_ids, size)) == whole


@given(TEXTS)
@settings(deadline=None)
def test_characters_are_never_split(text: str) -> None:
    pieces = stream(byte_level(), list(text.encode()))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.sampled_from([" the", " cat", "s", "é", "世", " 世", "🙂", "ß", " ", "e"])))
@settings(deadline=None)
def test_sentencepiece_text_equals_the_full_decode(words: list[str]) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1, *tokenizer.encode("".join(words), add_special_tokens=False)]
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(2, 257), max_size=200))
@settings(deadline=None)
def test_sentencepiece_garbage_ends_and_stays_in_bounds(token_ids: list[int]) -> None:
    """A run of byte tokens that is no UTF-8 is not held back for ever."""
    text = "".join(stream(sentencepiece_like(), token_ids))
    assert len(text) <= 2 * len(token_ids)
    held = Detokenizer(sentencepiece_like())
    assert held.push([2 + 0x80] * 40).text


def test_context_keeps_the_space_of_a_continuation() -> None:
    tokenizer = sentencepiece_like()
    the, cat = (tokenizer.token_id(word) for word in ("▁the", "▁cat"))
    assert the is not None
    assert cat is not None
    assert Detokenizer(tokenizer).push([cat]).text == "cat"
    assert Detokenizer(tokenizer, context=[the]).push([cat]).text == " cat"


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification: the first character at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 6), max_size=30),
)
@settings(deadline=None)
def test_stop_strings_do_not_depend_on_pieces(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    out, found, at = "", None, 0
    for size in [*sizes, len(text)]:
        piece, found = matcher.push(text[at : at + size])
        out += piece
        at += size
        assert cut(text, stops)[0].startswith(out)
        if found is not None:
            break
    if found is None:
        out += matcher.flush()
    assert (out, found) == cut(text, stops)


def test_text_leaves_unless_it_may_become_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("all of this") == ("all of this", None)
    assert matcher.push(" E") == (" ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)


def test_min_tokens_delays_stop_strings() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stops=["ab"], min_tokens=4)
    piece = detokenizer.push(list(b"ababab"))
    assert (piece.text, piece.stop, piece.num_tokens) == ("abab"[:3] + "b", "ab", 6)


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [("b", "abcdef", True), ("d", "abcdefb", False), ("cde", "ab", True), ("cd", "abcdefb", False)],
)
def test_no_stop_string_ends_within_min_tokens(
    stop: str, text: str, found: bool, size: int
) -> None:
    """The last of them counts, too, as with stop tokens; one that begins there is not missed."""
    detokenizer, said, stops = Detokenizer(byte_level(), stops=[stop], min_tokens=4), "", []
    for at in range(0, 7, size):
        piece = detokenizer.push(list(b"abcdefb"[at : at + size]))
        said, stops = said + piece.text, [*stops, piece.stop]
        if piece.stop is not None:
            break
    assert (said, stops[-1]) == (text, stop if found else None)


@pytest.mark.parametrize(
    ("text", "shown", "found"),
    [("a\n", "a\n", None), ("a\nb", "a\nb", None), ("a\n\n", "a", "\n\n")],
)
def test_a_stop_string_within_min_tokens_is_not_found_later(
    text: str, shown: str, found: str | None
) -> None:
    """It waited, because a longer one begins with it, and ended the text with the next token."""
    detokenizer = Detokenizer(byte_level(), stops=["\n", "\n\n"], min_tokens=2)
    pieces = [detokenizer.push([byte]) for byte in text.encode()]
    pieces += [] if pieces[-1].stop else [detokenizer.finish()]
    assert "".join(piece.text for piece in pieces) == shown
    assert pieces[-1].stop == found


def test_blanks_beside_tools_are_not_found_once_all_tokens_are_within_min_tokens() -> None:
    turn = TurnFormat(row=FORMATS["hermes"], schemas={"look": {"type": "object"}})
    detokenizer = Detokenizer(byte_level(), stops=["\n"], min_tokens=2, turn=turn)
    assert detokenizer.push(list(b"a\n")).stop is None
    assert (detokenizer.finish().text, detokenizer.finish().stop) == ("\n", None)


def test_stop_uses_only_the_tokens_it_needed() -> None:
    piece = Detokenizer(byte_level(), stops=["b"], include_stop=True).push(list(b"abcd"))
    assert (piece.text, piece.num_tokens) == ("ab", 2)


def test_the_bytes_of_a_bounded_number_of_tokens_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("foveal_runtime.frontend.text.tokenizer.MAX_SPELLED", 3)
    tokenizer = TextTokenizer(byte_tokenizer())
    expected = [byte_level().token_bytes(token_id) for token_id in range(100)]
    for _ in range(2):
        assert [tokenizer.token_bytes(token_id) for token_id in range(100)] == expected
        assert tokenizer.num_spelled <= 3


@pytest.mark.parametrize(("stop", "text", "shown"), [
    ("\n\n", "a\n\n\nb", "a"), ("\n", "a\nb", "a"), ("b\n", "ab\n\nc", "a"),
    (" \n", "a  \nb", "a "),
])  # fmt: skip
def test_a_stop_string_of_blanks_is_seen_at_once_beside_tools(
    stop: str, text: str, shown: str
) -> None:
    """Blanks wait, because they are dropped before a call: it was seen one token or a call late."""
    turn = TurnFormat(row=FORMATS["hermes"], schemas={"look": {"type": "object"}})
    detokenizer = Detokenizer(byte_level(), stops=[stop], turn=turn)
    piece = detokenizer.push(list(text.encode()))
    assert (piece.text, piece.stop) == (shown, stop)
    assert piece.num_tokens == text.index(stop) + len(stop)


CATS = ["▁the", "▁cat", "s", "▁", "é", "<0xE4>", "<0xB8>", "<0x96>", "▁世", "s"]
"""Of which no decoder sees more than one at a time: blanks and bytes were lost."""


def test_the_bytes_of_single_tokens_make_up_the_text() -> None:
    found = sentencepiece_like()
    ids = [token for name in CATS if (token := found.token_id(name)) is not None]
    scores = [TokenLogprobs(-0.5, 1) for _ in ids]
    content = [
        json.loads(bytes(one)) for one in chat_logprobs(found, ids, scores, starts=True)["content"]
    ]
    text = b"".join(bytes(one["bytes"]) for one in content).decode()
    assert text == "".join(stream(found, ids)) == "the cats é世 世s"
    assert [one["token"] for one in content[:3]] == ["the", " cat", "s"]


def test_offsets_count_the_characters_of_the_text() -> None:
    found = sentencepiece_like()
    ids = [token for name in CATS if (token := found.token_id(name)) is not None]
    widths = [num_chars(found, token) for token in ids]
    assert widths == [4, 4, 1, 1, 1, 1, 0, 0, 2, 1]
    assert sum(widths) == len(" the cats é世 世s")
    assert num_chars(found, ids[0], starts=True) == len("the")
