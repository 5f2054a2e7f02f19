"""Texts to ids: whole, or cut between the special tokens that belong around them."""

from __future__ import annotations

import pytest
from tokenizers import processors

from foveal_runtime.frontend.testing.fake_tokenizer import byte_tokenizer
from foveal_runtime.frontend.text.tokenizer import TextTokenizer

START, END, PAD = 257, 256, 258


def tokenizer_of(folder, **asked) -> TextTokenizer:
    """As saved with a template of one special token before a text and one behind it."""
    hf = byte_tokenizer()
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|end|>", special_tokens=[("<|user|>", START), ("<|end|>", END)]
    )
    if asked:
        hf.backend_tokenizer.enable_truncation(asked["truncation"])
        hf.backend_tokenizer.enable_padding(length=asked["padding"], pad_id=PAD)
    hf.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return TextTokenizer.load(folder)


def test_a_file_that_asks_to_cut_and_to_fill_is_not_obeyed(tmp_path) -> None:
    """As all-MiniLM-L6-v2 has it: 128 tokens of every text, no more and no fewer."""
    found = tokenizer_of(tmp_path, truncation=8, padding=8)
    for text in ("abc", "abc" * 10):
        whole = [START, *text.encode(), END]
        assert found.encode(text, add_special_tokens=True) == whole
        assert found.encode(text, add_special_tokens=False) == whole[1:-1]


@pytest.mark.parametrize(
    ("most", "left"),
    [
        (0, [START, *b"abcde", END]),
        (7, [START, *b"abcde", END]),
        (6, [START, *b"abcd", END]),
        (3, [START, *b"a", END]),
        (2, [START, *b"a"]),
        (1, [START]),
    ],
)
def test_a_cut_text_keeps_its_special_tokens(tmp_path, most: int, left: list[int]) -> None:
    found = tokenizer_of(tmp_path)
    assert found.encode("abcde", add_special_tokens=True, most=most) == left
    plain = found.encode("abcde", add_special_tokens=False, most=most)
    assert plain == list(b"abcde")[: most or None]
