"""Words that cost about one token each: the text of the bench's prompts and of its tokenizers.

Seeded, ASCII, no meaning. The trace generator and e2e/bench/checkpoints.py must see the same words,
so that a prompt of 60 words has about 60 tokens in every server.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

_ONSETS = ("b", "br", "d", "f", "gl", "h", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("", "l", "n", "r", "s", "nd", "rk")
COMMON = 3000
"""Prompts use the first so many words: each of them is a token of its own."""


@functools.cache
def lexicon(num_words: int = 16_000) -> Sequence[str]:
    """Distinct words of two or three syllables, the same in every run."""
    rng = random.Random("foveal bench lexicon")
    words: dict[str, None] = {}
    while len(words) < num_words:
        syllables = rng.choice((2, 2, 3))
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
        )
        words[word] = None
    return tuple(words)


def sentence(rng: random.Random, num_words: int) -> str:
    """`num_words` common words; no punctuation, so that the token count stays predictable."""
    return " ".join(rng.choices(lexicon()[:COMMON], k=num_words))
