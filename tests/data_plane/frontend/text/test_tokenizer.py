"""Texts to ids: whole, or cut between the special tokens that belong around them."""

from __future__ import annotations

import pytest
from tokenizers import processors

from foveal_runtime.frontend.protocol.rules import SamplingDefaults
from foveal_runtime.frontend.testing.fake_tokenizer import byte_tokenizer
from foveal_runtime.frontend.text.template_files import load_templates
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import StartupError

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


DEEP = '{"a": ' + "[" * 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "[]"), ("tokenizer.json", DEEP), ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", DEEP), ("tokenizer_config.json", '{"bos_token": 7}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": null}'),
        ("special_tokens_map.json", "[]"), ("chat_template.json", "[]"),
        ("chat_template.json", DEEP), ("generation_config.json", "[]"),
        ("generation_config.json", DEEP), ("generation_config.json", '{"top_k": Infinity}'),
        ("generation_config.json", f'{{"top_p": 1{"0" * 400}}}'),
    ],
    ids=lambda one: one[:40],
)  # fmt: skip
def test_files_of_a_checkpoint_that_are_none_are_refused_with_their_name(
    tmp_path, name: str, text: str
) -> None:
    """Each was a traceback of another type."""
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(StartupError) as caught:
        (load_templates(tmp_path, TextTokenizer.load(tmp_path)), SamplingDefaults.load(tmp_path))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
