"""Seeded traces: who asks what about which image, and in which order; the same in every run.

A trace is conversations of questions. Question k+1 of a conversation is sent after the reply to
question k, with the whole history; different conversations overlap. Images are numbers here
(`images` draws them), so that a trace of 500 prompts is small and can be compared in tests.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Question(NamedTuple):
    """One user turn: `before`, then the images, then `text`, as clients of image models commonly
    send them. A saved trace has `messages` instead, as the API takes them, and may say
    `max_tokens` (0: the trace's)."""

    images: tuple[int, ...]
    text: str
    before: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int = 0


class Trace(NamedTuple):
    """`conversations`: questions in order; most have one. `max_tokens`: of every reply. `starts`:
    seconds at which each conversation begins; (): the trace does not say."""

    name: str
    conversations: tuple[tuple[Question, ...], ...]
    max_tokens: int
    starts: tuple[float, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(len(questions) for questions in self.conversations)

    @property
    def images(self) -> list[int]:
        """Distinct images in the order in which they first appear."""
        shown = (i for questions in self.conversations for one in questions for i in one.images)
        return list(dict.fromkeys(shown))

    @property
    def hit_rate(self) -> float:
        """Share of image uses that were shown before, counting a conversation's history once."""
        uses = [i for questions in self.conversations for one in questions for i in one.images]
        return 1 - len(set(uses)) / len(uses) if uses else 0.0


class Maker(NamedTuple):
    """What the kinds below need: chance, image numbers of their own, and the size wanted."""

    rng: random.Random
    first_image: int
    num_requests: int
    num_words: int

    def ask(self, *images: int, before: str = "") -> tuple[Question, ...]:
        numbers = tuple(self.first_image + i for i in images)
        return (Question(numbers, sentence(self.rng, self.num_words), before),)


Conversations = list[tuple[Question, ...]]


def _hits(percent: int) -> Callable[[Maker], Conversations]:
    """Each request has one image; `percent` of them show one that was shown before."""

    def make(maker: Maker) -> Conversations:
        num_new = max(1, round(maker.num_requests * (100 - percent) / 100))
        # Which requests are the first to show an image: the very first, then any.
        later = range(1, maker.num_requests)
        firsts = {0, *maker.rng.sample(later, min(num_new, maker.num_requests) - 1)}
        found: Conversations = []
        num_shown = 0
        for index in range(maker.num_requests):
            if index in firsts:
                found.append(maker.ask(num_shown))
                num_shown += 1
            else:
                found.append(maker.ask(maker.rng.randrange(num_shown)))
        return found

    return make


def _grouped(maker: Maker) -> Conversations:
    """500 prompts over 350 images (or that ratio): 150 prompts repeat the one before them."""
    num_repeats = maker.num_requests * 3 // 10
    num_new = maker.num_requests - num_repeats
    repeated = set(maker.rng.sample(range(num_new), num_repeats))
    found: Conversations = []
    for image in range(num_new):
        found += [maker.ask(image)] * (1 + (image in repeated))
    return found


PASSES = 4
"""How often the cache scenarios ask about the same thing."""


def _identical(maker: Maker) -> Conversations:
    """A quarter of the requests, then all of them again, three times over."""
    first = [maker.ask(image) for image in range(-(-maker.num_requests // PASSES))]
    return (first * PASSES)[: maker.num_requests]


def _same_image(maker: Maker) -> Conversations:
    """As `identical`, but with another text each time."""
    num_images = -(-maker.num_requests // PASSES)
    return [maker.ask(index % num_images) for index in range(maker.num_requests)]


def _partial_prefix(maker: Maker) -> Conversations:
    """All begin with the same long instructions, followed by an image and a text of their own."""
    before = sentence(maker.rng, 10 * maker.num_words)
    return [maker.ask(index, before=before) for index in range(maker.num_requests)]


def _multi_turn(maker: Maker) -> Conversations:
    """Conversations of three questions about one image, shown in the first."""
    found: Conversations = []
    for index in range(-(-maker.num_requests // 3)):
        first, second, third = maker.ask(index)[0], maker.ask()[0], maker.ask()[0]
        found.append((first, second, third))
    return found


def _several(maker: Maker) -> Conversations:
    """Three images a request out of a pool that is half as large as the requests."""
    pool = range(max(3, maker.num_requests // 2))
    return [maker.ask(*maker.rng.sample(pool, 3)) for _ in range(maker.num_requests)]


def _text(maker: Maker) -> Conversations:
    return [maker.ask() for _ in range(maker.num_requests)]


def _long_text(maker: Maker) -> Conversations:
    """Ten times the words, no image: prefill."""
    return _text(maker._replace(num_words=10 * maker.num_words))


def _mixed(maker: Maker) -> Conversations:
    """Interleaved: a fifth text, a tenth long text, a fifth conversations, the rest new and
    popular images."""
    found: Conversations = []
    kinds = ["text"] * 4 + ["long"] * 2 + ["turns"] * 1 + ["new"] * 6 + ["popular"] * 7
    num_new = 5
    while sum(map(len, found)) < maker.num_requests:
        kind = maker.rng.choice(kinds)
        if kind == "text":
            found.append(maker.ask())
        elif kind == "long":
            found.append(maker._replace(num_words=10 * maker.num_words).ask())
        elif kind == "popular":
            found.append(maker.ask(maker.rng.randrange(5)))
        else:
            first = maker.ask(num_new)
            num_new += 1
            found.append(first if kind == "new" else (*first, *maker.ask(), *maker.ask()))
    return found


class Kind(NamedTuple):
    """`text`: for people who choose one."""

    text: str
    make: Callable[[Maker], Conversations]


KINDS: dict[str, Kind] = {
    "hits-0": Kind("one image a request, never shown before", _hits(0)),
    "hits-30": Kind("of which 30 % were shown before", _hits(30)),
    "hits-70": Kind("of which 70 % were shown before", _hits(70)),
    "hits-95": Kind("of which 95 % were shown before", _hits(95)),
    "grouped": Kind("500 prompts over 350 images, repeats right after another", _grouped),
    "multi-turn": Kind("three questions about one image, with the history", _multi_turn),
    "several": Kind("three images a request, out of a pool", _several),
    "text": Kind("no image", _text),
    "long-text": Kind("ten times the words, no image", _long_text),
    "mixed": Kind("text, long text, conversations, new and popular images", _mixed),
    "identical": Kind("every request four times, in four passes", _identical),
    "same-image-other-text": Kind("every image four times, each with another text", _same_image),
    "partial-prefix": Kind("the same long beginning, then another image", _partial_prefix),
}
USUAL_REQUESTS = {"grouped": 500}


def make_trace(
    kind: str, seed: int, num_requests: int = 0, *, num_words: int = 50, max_tokens: int = 16
) -> Trace:
    """A trace of about `num_requests` (0: the kind's usual number). Another seed has other
    images and other texts, so that a server that has seen one knows nothing of the other."""
    maker = Maker(
        random.Random(f"{kind} {seed}"),
        (seed * 100 + list(KINDS).index(kind)) * 100_000,
        num_requests or USUAL_REQUESTS.get(kind, 24),
        num_words,
    )
    return Trace(kind, tuple(KINDS[kind].make(maker)), max_tokens)


def poisson_starts(seed: int, num: int, rate: float) -> list[float]:
    """Seconds after the start at which `num` conversations arrive, `rate` a second on average."""
    rng = random.Random(f"arrivals {seed}")
    now, starts = 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        starts.append(now)
    return starts


_ONSETS = ("b", "br", "d", "f", "gl", "h", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("", "l", "n", "r", "s", "nd", "rk")
COMMON = 3000
"""Prompts use the first so many words: each of them is a token of its own."""


@functools.cache
def lexicon() -> Sequence[str]:
    """Distinct words of two or three syllables, the same in every run: each of the bench's own
    tokenizers has them as tokens, so a prompt of 60 words has about 60 tokens in every server."""
    rng = random.Random("foveal bench lexicon")
    words: dict[str, None] = {}
    while len(words) < 16_000:
        syllables = rng.choice((2, 2, 3))
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
        )
        words[word] = None
    return tuple(words)


def sentence(rng: random.Random, num_words: int) -> str:
    """`num_words` common words; no punctuation, so that the token count stays predictable."""
    return " ".join(rng.choices(lexicon()[:COMMON], k=num_words))
