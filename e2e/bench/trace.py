"""Seeded traces: who asks what about which picture, and when. Pure; the same in every run.

A trace is conversations of turns. Turn k+1 of a conversation is sent after the reply to turn k,
with the whole history; different conversations overlap. Pictures are numbers here (`pictures` draws
them), so that a trace of 500 prompts is small and can be compared in tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from e2e.bench.report.wording import sentence


class Turn(NamedTuple):
    """Pictures stand before the text, as clients of image models commonly send them."""

    pictures: tuple[int, ...]
    text: str


class Trace(NamedTuple):
    """`conversations`: turns in order; most have one. `max_tokens`: of every reply."""

    name: str
    conversations: tuple[tuple[Turn, ...], ...]
    max_tokens: int

    @property
    def num_requests(self) -> int:
        return sum(len(turns) for turns in self.conversations)

    @property
    def pictures(self) -> list[int]:
        """Distinct pictures in the order in which they first appear."""
        shown = (p for turns in self.conversations for turn in turns for p in turn.pictures)
        return list(dict.fromkeys(shown))

    @property
    def hit_rate(self) -> float:
        """Share of picture uses that were shown before, counting a conversation's history once."""
        uses = [p for turns in self.conversations for turn in turns for p in turn.pictures]
        return 1 - len(set(uses)) / len(uses) if uses else 0.0


class Maker(NamedTuple):
    """What the kinds below need: chance, picture numbers of their own, and the size wanted."""

    rng: random.Random
    first_picture: int
    num_requests: int
    num_words: int

    def ask(self, *pictures: int) -> tuple[Turn, ...]:
        numbers = tuple(self.first_picture + p for p in pictures)
        return (Turn(numbers, sentence(self.rng, self.num_words)),)


Conversations = list[tuple[Turn, ...]]


def _hits(percent: int) -> Callable[[Maker], Conversations]:
    """Each request has one picture; `percent` of them show one that was shown before."""

    def make(maker: Maker) -> Conversations:
        num_new = max(1, round(maker.num_requests * (100 - percent) / 100))
        # Which requests are the first to show a picture: the very first, then any.
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
    """500 prompts over 350 pictures (or that ratio): 150 prompts repeat the one before them."""
    num_repeats = maker.num_requests * 3 // 10
    num_new = maker.num_requests - num_repeats
    repeated = set(maker.rng.sample(range(num_new), num_repeats))
    found: Conversations = []
    for picture in range(num_new):
        found += [maker.ask(picture)] * (1 + (picture in repeated))
    return found


def _turns(maker: Maker) -> Conversations:
    """Conversations of three turns about one picture, shown in the first."""
    found: Conversations = []
    for index in range(-(-maker.num_requests // 3)):
        first, second, third = maker.ask(index)[0], maker.ask()[0], maker.ask()[0]
        found.append((first, second, third))
    return found


def _several(maker: Maker) -> Conversations:
    """Three pictures a request out of a pool that is half as large as the requests."""
    pool = range(max(3, maker.num_requests // 2))
    return [maker.ask(*maker.rng.sample(pool, 3)) for _ in range(maker.num_requests)]


def _text(maker: Maker) -> Conversations:
    return [maker.ask() for _ in range(maker.num_requests)]


def _long_text(maker: Maker) -> Conversations:
    """Ten times the words, no picture: prefill."""
    return _text(maker._replace(num_words=10 * maker.num_words))


def _mixed(maker: Maker) -> Conversations:
    """Interleaved: a fifth text, a tenth long text, a fifth conversations, the rest new and
    popular pictures."""
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


KINDS: dict[str, Callable[[Maker], Conversations]] = {
    "hits-0": _hits(0),
    "hits-30": _hits(30),
    "hits-70": _hits(70),
    "hits-95": _hits(95),
    "grouped": _grouped,
    "turns": _turns,
    "several": _several,
    "text": _text,
    "long-text": _long_text,
    "mixed": _mixed,
}
USUAL_REQUESTS = {"grouped": 500}


def make_trace(
    kind: str, seed: int, num_requests: int = 0, *, num_words: int = 50, max_tokens: int = 16
) -> Trace:
    """A trace of about `num_requests` (0: the kind's usual number). Another seed has other
    pictures and other texts, so that a server that has seen one knows nothing of the other."""
    maker = Maker(
        random.Random(f"{kind} {seed}"),
        (seed * 100 + list(KINDS).index(kind)) * 100_000,
        num_requests or USUAL_REQUESTS.get(kind, 24),
        num_words,
    )
    return Trace(kind, tuple(KINDS[kind](maker)), max_tokens)


def poisson_starts(seed: int, num: int, rate: float) -> list[float]:
    """Seconds after the start at which `num` conversations arrive, `rate` a second on average."""
    rng = random.Random(f"arrivals {seed}")
    now, starts = 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        starts.append(now)
    return starts
