"""The model's tokenizer without torch: text to ids, ids to text, single tokens to text and bytes.

Built once per HTTP process from the model directory; used by the chat template, the detokenizer
and the HTTP handlers. Only the fast (`tokenizer.json`) form is read: it needs neither torch nor
the model's own tokenizer class. Never downloads anything.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from foveal_runtime.plan.errors import ContextLengthExceeded, StartupError

_SURE_CHARS = 4
"""Texts of fewer characters per token allowed are tokenised without counting first."""
_PIECE_CHARS = 1 << 15
_CUT_TOKENS = 16
_BYTE = re.compile("<0x[0-9A-F]{2}>")
MAX_SPELLED = 1 << 14
"""Tokens whose bytes are remembered."""


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """The byte-level BPE alphabet: printable characters stand for themselves, the other bytes for
    the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return table


class TextTokenizer:
    """Thin, torch-free view of a fast tokenizer.

    Attributes:
        hf: the transformers object (chat templates, names of special tokens).
        vocab_size: ids are below this.
        special_ids: ids that `skip_special_tokens` leaves out of the text.
        is_byte_level: every token is a byte string (GPT-2 style), so decoding is exact per byte.
    """

    def __init__(self, hf: PreTrainedTokenizerFast) -> None:
        self.hf = hf
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        # A file may ask for both, for training: texts would be cut and filled up without a word.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._marks = {
            token.content: i for i, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }  # fmt: skip
        self.is_byte_level = type(self._backend.decoder).__name__ == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_path: str | Path) -> TextTokenizer:
        """Raises StartupError when the directory holds no usable tokenizer.json."""
        path = Path(model_path)
        if not (path / "tokenizer.json").is_file():
            raise StartupError(
                f"{path} has no tokenizer.json; save the tokenizer once with "
                "AutoTokenizer.from_pretrained(path).save_pretrained(path)"
            )
        try:
            return cls(PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True))
        except Exception as error:  # of whatever type: files that are none end in many
            raise StartupError(
                f"cannot load the tokenizer of {path} (tokenizer.json, tokenizer_config.json or "
                f"special_tokens_map.json): {' '.join(str(error).split())[:400]}: copy the files "
                "again"
            ) from error

    def encode(
        self, text: str, *, add_special_tokens: bool, limit: int = 0, most: int = 0
    ) -> list[int]:
        """Token ids. Batches let other threads run; single calls of the library need not.

        Of a text with more than `most` tokens (0: any number) the first ones, with the special
        tokens that belong before and behind them.
        Raises ContextLengthExceeded for a text that has more than `limit` tokens (0: any number)
        as soon as that is certain: work and memory grow with the limit, not with the text.
        """
        if limit and len(text) > _SURE_CHARS * limit:
            self._check_length(text, limit)
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        num_special = self._backend.num_special_tokens_to_add(is_pair=False)
        if add_special_tokens and num_special < most < len(found.ids):
            [found] = self._backend.encode_batch_fast([text], add_special_tokens=False)
            found.truncate(most - num_special)
            found = self._backend.post_process(found)
        ids: list[int] = found.ids
        return ids[:most] if most else ids

    def _check_length(self, text: str, limit: int) -> None:
        """Counts piece by piece: a cut costs at most a few tokens more than the whole text has."""
        at_least = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            found = self._backend.encode_batch_fast([piece], add_special_tokens=False)[0]
            at_least += max(0, len(found.ids) - _CUT_TOKENS)
            if at_least > limit:
                raise ContextLengthExceeded(
                    f"the prompt is too long: it has {len(text)} characters, and its first "
                    f"{start + len(piece)} are more than {limit} tokens already: this model's "
                    "maximum context length is exceeded"
                )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Full decode; ids outside the vocabulary are left out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token ("Ġthe"); None outside the vocabulary."""
        spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    def tokens(self, token_ids: list[int]) -> list[str]:
        """`token` of each; "" outside the vocabulary."""
        return [self.token(token_id) or "" for token_id in token_ids]

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def marks(self, text: str) -> dict[str, int]:
        """Of the tokens that stand for themselves alone, those that the text spells."""
        return {mark: token for mark, token in self._marks.items() if mark in text}

    def token_text(self, token_id: int, *, starts: bool = False) -> str:
        """`token_bytes` as text; an incomplete character shows as U+FFFD."""
        if self.is_byte_level:
            return self.decode([token_id])
        return self.token_bytes(token_id, starts=starts).decode(errors="replace")

    @property
    def num_spelled(self) -> int:
        """Tokens whose bytes are remembered."""
        return len(self._bytes)

    def token_bytes(self, token_id: int, *, starts: bool = False) -> bytes:
        """What the token adds to a text, or where it `starts` one: some decoders leave out a blank
        there."""
        if starts and not self.is_byte_level:
            return self._spell(token_id, starts=True)
        known = self._bytes.get(token_id)
        if known is None:
            if len(self._bytes) >= MAX_SPELLED:
                self._bytes.clear()  # an LRU would cost more than spelling them again
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int, *, starts: bool = False) -> bytes:
        spelling = self.token(token_id)
        if spelling is None:
            return b""
        if not self.is_byte_level:
            return self._added(token_id, spelling, starts)
        table = byte_of_char()
        try:
            return bytes(table[char] for char in spelling)
        except KeyError:  # an added token with characters outside the alphabet: taken literally
            return spelling.encode()

    def _added(self, token_id: int, spelling: str, starts: bool) -> bytes:
        alone = self.decode([token_id])
        if _BYTE.fullmatch(spelling) and alone != spelling:
            return bytes([int(spelling[3:5], 16)])
        before = [] if starts else self.encode("a", add_special_tokens=False)
        text, shown = self.decode(before), self.decode([*before, token_id])
        return (shown[len(text) :] if shown.startswith(text) else alone).encode()

    def special_tokens_map(self) -> dict[str, Any]:
        return dict(self.hf.special_tokens_map)
