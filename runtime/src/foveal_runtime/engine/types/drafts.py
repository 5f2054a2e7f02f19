"""Tokens that a stream's own text suggests, for the model to check many in one step.

Made with a request where `num_speculative_tokens` is set, asked by `scheduler`. Prompt lookup:
where the last few tokens stood before, what followed them there is likely to follow again: in
answers that quote their prompt (extraction, code, documents) and in texts that repeat themselves.
A draft changes no answer: its tokens count only where the model draws the same at their places.
"""

from __future__ import annotations

from collections.abc import Sequence

_UNKNOWN = chr(0x10FFFF)
"""Stands for ids that end a draft."""
_MOST_MISSES = 5
"""Drafts in a row of which no token counted, from which on the wait does not grow: 31 tokens."""


class Drafts:
    """Of one request.

    Args:
        vocab_size: no id from here on is drafted: models draw no placeholders. end_ids: nor one of
            these, which end what follows.
        least, most: tokens at the end that must have stood before; longer matches come first.
    """

    __slots__ = ("_ends", "_least", "_misses", "_most", "_text", "_vocab_size", "_wait")

    def __init__(self, vocab_size: int, end_ids: Sequence[int], least: int, most: int) -> None:
        self._vocab_size, self._ends = vocab_size, end_ids
        self._least, self._most = least, most
        self._text = ""  # a character for each token: str.rfind compares at C's speed
        self._misses = self._wait = 0

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens to follow `token_ids`, which only grows from call to call."""
        if self._wait:
            self._wait -= 1
            return []
        new = token_ids[len(self._text) :]
        self._text += "".join(chr(one) if self._may_follow(one) else _UNKNOWN for one in new)
        text = self._text
        for length in range(min(self._most, len(text) - 1), self._least - 1, -1):
            at = text.rfind(text[-length:], 0, len(text) - 1)
            if at >= 0:
                follows = text[at + length : at + length + count]
                follows *= -(-count // len(follows))  # what ends the text is about to come again
                return [ord(one) for one in follows[:count].partition(_UNKNOWN)[0]]
        return []

    def _may_follow(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and token not in self._ends

    def count(self, num_accepted: int) -> None:
        """Of the last draft. One that failed as a whole cost time: after some of those in a row
        nothing is proposed for 1, 3, 7 ... tokens."""
        self._misses = 0 if num_accepted else min(self._misses + 1, _MOST_MISSES)
        self._wait = (1 << self._misses) - 1
