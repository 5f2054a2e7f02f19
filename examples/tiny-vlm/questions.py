"""Questions about pictures and their one right answer, and whole conversations made of them.

The training script learns these conversations; `evaluate.py` and `verify.py` ask their last
question. A question is only asked where the picture leaves no doubt. Never looks at pixels:
answers come from what the generator drew. Wordings marked held out are never trained on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from scenes import COLOURS, SHAPES, Picture, Thing, draw_digit, draw_scene
from wording import GREETINGS, PHRASES, SYSTEM, filler

SCENE_FAMILIES = ("colour", "shape", "count", "place", "presence", "relation")
CAPTIONS = ("caption", "detail")
TWO_IMAGE_FAMILIES = ("two_scenes", "two_digits", "two_mixed", "same_digit", "more")
FAMILIES = (*SCENE_FAMILIES, "digit", *TWO_IMAGE_FAMILIES, "follow_up", *CAPTIONS, "text")
NUMBER_WORDS = ("first", "second")
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


@dataclass
class Turn:
    """A question with its whole answer; `verdict` is how a right reply must end."""

    question: str
    answer: str
    verdict: str


@dataclass
class Sample:
    """A conversation; the last message is the user's or a tool's, `answer` is what should follow.
    `options` are what else a request asks for: tools, response_format."""

    family: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    answer: str = ""
    verdict: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def is_right(reply: str, verdict: str) -> bool:
    """Whether the reply ends in the verdict, ignoring case, punctuation and spacing; JSON and calls
    must be exact."""
    if verdict.startswith(("{", "<")):
        return reply == verdict
    got, want = (re.sub(r"[^a-z0-9]+", " ", text.lower()).strip() for text in (reply, verdict))
    return got == want or got.endswith(" " + want)


class Asker:
    """Makes turns from one random source; `held_out` picks the scans and `unseen` the wordings."""

    def __init__(self, rng: random.Random, held_out: bool = False, unseen: bool = False):
        self.rng = rng
        self.held_out = held_out
        self.unseen = unseen
        self.captions_of_one = (
            1  # how many parts of seven, of the questions about one of two scenes
        )

    def phrase(self, key: str, **slots: str) -> str:
        trained, held = PHRASES[key]
        return self.rng.choice(held if self.unseen and held else trained).format(**slots)

    def turn(self, family: str, picture: Picture) -> Turn | None:
        """A turn of the family about one picture, or None where the picture does not allow it."""
        if picture.digit is not None:
            return self._digit_turn(family, picture)
        return getattr(self, "_" + family)(picture.things)

    def _digit_turn(self, family: str, picture: Picture) -> Turn:
        if family in CAPTIONS:
            answer = f"the handwritten digit {picture.digit} in {picture.ink}."
            return Turn(self.phrase("caption"), answer, answer)
        return Turn(self.phrase("digit"), str(picture.digit), str(picture.digit))

    def unique(self, things: tuple[Thing, ...], *parts: str) -> list[Thing]:
        """The things no other thing equals in all the named attributes."""
        keys = [tuple(getattr(thing, part) for part in parts) for thing in things]
        return [thing for thing, key in zip(things, keys, strict=True) if keys.count(key) == 1]

    def _colour(self, things: tuple[Thing, ...]) -> Turn | None:
        by_shape = self.unique(things, "shape")
        if by_shape and self.rng.random() < 0.6:
            thing = self.rng.choice(by_shape)
            return Turn(self.phrase("colour", shape=thing.shape), thing.colour, thing.colour)
        thing = self.rng.choice(things)
        return Turn(self.phrase("colour_at", place=thing.place), thing.colour, thing.colour)

    def _shape(self, things: tuple[Thing, ...]) -> Turn | None:
        by_colour = self.unique(things, "colour")
        if by_colour and self.rng.random() < 0.6:
            thing = self.rng.choice(by_colour)
            return Turn(self.phrase("shape", colour=thing.colour), thing.shape, thing.shape)
        thing = self.rng.choice(things)
        return Turn(self.phrase("shape_at", place=thing.place), thing.shape, thing.shape)

    def _count(self, things: tuple[Thing, ...]) -> Turn | None:
        kind = self.rng.choice(("object", "object", "shape", "colour"))
        if kind == "object":
            number, what = len(things), self.rng.choice(("objects", "shapes"))
        else:
            value = getattr(self.rng.choice(things), kind)
            number = sum(getattr(thing, kind) == value for thing in things)
            what = value + "s" if kind == "shape" else f"{value} {self.rng.choice(OBJECTS)}"
        return Turn(self.phrase("count", what=what), str(number), str(number))

    def _place(self, things: tuple[Thing, ...]) -> Turn | None:
        unique = self.unique(things, "name")
        if not unique:
            return None
        thing = self.rng.choice(unique)
        return Turn(self.phrase("place", name=thing.name), thing.place, thing.place)

    def _presence(self, things: tuple[Thing, ...]) -> Turn | None:
        names = {thing.name for thing in things}
        absent = [f"{c} {s}" for c in COLOURS for s in SHAPES if f"{c} {s}" not in names]
        unique = self.unique(things, "name")
        if unique and self.rng.random() < 0.5:
            thing = self.rng.choice(unique)
            answer = f"the {thing.name} is {thing.place}: yes"
            return Turn(self.phrase("presence", name=with_article(thing.name)), answer, "yes")
        # The harder absences share a colour or a shape with something that is there.
        near = [n for n in absent if any(set(n.split()) & set(t.name.split()) for t in things)]
        name = self.rng.choice(near)
        question = self.phrase("presence", name=with_article(name))
        return Turn(question, f"there is no {name}: no", "no")

    def _relation(self, things: tuple[Thing, ...]) -> Turn | None:
        unique = self.unique(things, "name")
        if len(unique) < 2:
            return None
        one, other = self.rng.sample(unique, 2)
        facts = f"the {one.name} is {one.place} and the {other.name} is {other.place}, so it is"
        axes = directions(one, other)
        names = {"one": one.name, "other": other.name}
        kind = self.rng.random()
        if kind < 0.2:
            where = " and ".join(axes)
            return Turn(self.phrase("relation_where", **names), f"{facts} {where}", where)
        truth = self.rng.choice(axes)
        if kind < 0.5:
            key = "relation_side" if truth in ("left", "right") else "relation_height"
            return Turn(self.phrase(key, **names), f"{facts} {truth}", truth)
        asked, verdict = self.rng.choice(((truth, "yes"), (OPPOSITE[truth], "no")))
        how = {"left": "left of", "right": "right of"}.get(asked, asked)
        if how != asked and self.rng.random() < 0.5:
            how = f"to the {how}"
        question = self.phrase("relation", how=how, **names)
        return Turn(question, f"{facts} {truth}: {verdict}", verdict)

    def _caption(self, things: tuple[Thing, ...]) -> Turn:
        answer = listing(things) + "."
        return Turn(self.phrase("caption"), answer, answer)

    def _detail(self, things: tuple[Thing, ...]) -> Turn:
        number = f"{len(things)} object{'s' if len(things) > 1 else ''}"
        parts = [f"{number}: {listing(things)}."]
        # With two red circles "the red circle" would be neither: such a scene is listed, no more.
        has_twins = len({thing.name for thing in things}) < len(things)
        for index, pair in enumerate(() if has_twins else pairwise(things)):
            one, other = pair if index % 2 == 0 else pair[::-1]
            where = " and ".join(directions(one, other))
            of = " of" if where.endswith(("left", "right")) else ""
            parts.append(f"the {one.name} is {where}{of} the {other.name}.")
        answer = " ".join(parts)
        return Turn(self.phrase("detail"), answer, answer)

    def pair_turn(self, family: str, pictures: list[Picture]) -> Turn | None:
        """A turn about two pictures at once."""
        one, two = pictures
        if family == "same_digit":
            same = "yes" if one.digit == two.digit else "no"
            answer = f"the first image shows {one.digit} and the second shows {two.digit}: {same}"
            return Turn(self.phrase("same_digit"), answer, same)
        if family == "more":
            counts = len(one.things), len(two.things)
            if counts[0] == counts[1]:
                return None
            verdict = NUMBER_WORDS[counts[1] > counts[0]]
            answer = f"the first image has {counts[0]} and the second has {counts[1]}: {verdict}"
            return Turn(self.phrase("more"), answer, verdict)
        which = self.rng.randrange(2)
        picture = pictures[which]
        inner = self.rng.choice((*SCENE_FAMILIES, *["caption"] * self.captions_of_one))
        turn = self.turn("digit" if picture.digit is not None else inner, picture)
        if turn is None:
            return None
        ordinal = f"the {NUMBER_WORDS[which]} image"
        image = self.rng.choice((ordinal, ordinal, f"image {which + 1}"))
        if inner == "caption" and picture.digit is None:
            return Turn(self.phrase("caption_of", image=image), turn.answer, turn.verdict)
        if self.rng.random() < 0.5:
            question = f"in {image}, {turn.question}"
        else:
            question = turn.question.rstrip("?.") + f" in {image}?"
        return Turn(question, turn.answer, turn.verdict)

    def pictures_for(self, family: str) -> list[Picture]:
        """Fresh pictures that suit the family: none, one or two."""
        if family == "text":
            return []
        if family == "digit":
            return [draw_digit(self.rng, self.held_out)]
        if family == "same_digit":
            first = draw_digit(self.rng, self.held_out)
            again = first.digit if self.rng.random() < 0.5 else None
            return [first, draw_digit(self.rng, self.held_out, again)]
        if family == "two_digits":
            pair = [draw_digit(self.rng, self.held_out)]
            pair.append(draw_digit(self.rng, self.held_out))
            return pair
        if family == "two_mixed":
            pair = [draw_digit(self.rng, self.held_out), draw_scene(self.rng)]
            return self.rng.sample(pair, 2)
        if family in ("two_scenes", "more"):
            return [draw_scene(self.rng), draw_scene(self.rng)]
        return [draw_scene(self.rng)]

    def ask(self, family: str, pictures: list[Picture]) -> Turn | None:
        if family == "text":
            question, answer = self.rng.choice(GREETINGS)
            return Turn(question, answer, answer)
        if len(pictures) == 2:
            return self.pair_turn(family, pictures)
        return self.turn(family, pictures[0])

    def system(self, long: bool) -> list[dict[str, Any]]:
        """Now and then a system message."""
        if not long and self.rng.random() >= 0.15:
            return []
        prompt = filler(self.rng) if long else self.rng.choice(SYSTEM)
        return [{"role": "system", "content": prompt}]

    def sample(self, family: str, earlier: tuple[str, ...] = (), long: bool = False) -> Sample:
        """A conversation whose last question is of the family, after the `earlier` ones."""
        if family == "follow_up":
            first, last = self.rng.sample(SCENE_FAMILIES, 2)
            sample = self.sample(last, (first,))
            sample.family = family
            return sample
        while True:
            pictures = self.pictures_for(family)
            turns = [self.ask(name, pictures) for name in (*earlier, family)]
            if all(turns):
                break
        sample = Sample(family, self.system(long), pictures)
        for index, turn in enumerate(turns):
            text = as_typed(self.rng, turn.question)
            content = in_parts(self.rng, text, pictures if index == 0 else [])
            sample.messages.append({"role": "user", "content": content})
            sample.answer, sample.verdict = turn.answer, turn.verdict
            if index < len(turns) - 1:
                sample.messages.append({"role": "assistant", "content": turn.answer})
        return sample


OBJECTS = ("objects", "shapes")


def listing(things: tuple[Thing, ...]) -> str:
    """All the things in reading order, the place first: each word then only needs the image and
    the words just said, which is what a text model learns to look up first."""
    return ", ".join(f"{thing.place}: {with_article(thing.name)}" for thing in things)


def with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def directions(one: Thing, other: Thing) -> list[str]:
    """Where `one` lies seen from `other`: height first, then side; only where they differ."""
    found = []
    if one.row != other.row:
        found.append("above" if one.row < other.row else "below")
    if one.column != other.column:
        found.append("left" if one.column < other.column else "right")
    return found


def as_typed(rng: random.Random, question: str) -> str:
    if rng.random() < 0.35:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.12:
        question = question.rstrip("?.")
    return question


def in_parts(rng: random.Random, text: str, pictures: list[Picture]) -> str | list[dict[str, str]]:
    if not pictures:
        return text
    images = [{"type": "image"} for _ in pictures]
    if rng.random() < 0.2:
        return [{"type": "text", "text": text}, *images]
    return [*images, {"type": "text", "text": rng.choice(("", "", "\n", " ")) + text}]
