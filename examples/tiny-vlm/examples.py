"""Draws the bundled held-out pictures in `images/` and writes down what is asked about them.

    python examples.py

The demo and the tests read `images/questions.json`: each item names its images, a question and
the right answer. The digits are scans that were held out of training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from questions import Asker, Turn
from scenes import Picture, draw_digit, draw_scene, to_bytes

FOLDER = Path(__file__).with_name("images")
SEED = "bundled images"
DIGITS = (3, 7, 8)
# How many shapes each bundled scene has, and what is asked about it.
SCENES = (
    (2, ("colour", "relation")),
    (3, ("count",)),
    (4, ("place", "relation")),
    (5, ("shape", "caption")),
    (3, ("presence",)),
)
PAIRS = (
    ("two_scenes", ["scene-1.png", "scene-4.png"]),
    ("same_digit", ["digit-3.png", "digit-7.png"]),
    ("two_mixed", ["digit-8.png", "scene-5.png"]),
)


def item(images: list[str], turn: Turn) -> dict[str, Any]:
    return {
        "images": images,
        "question": turn.question,
        "answer": turn.answer,
        "verdict": turn.verdict,
    }


def first_turn(asker: Asker, family: str, pictures: list[Picture]) -> Turn:
    """A turn of the family, tried until the pictures allow one."""
    for _ in range(100):
        turn = asker.ask(family, pictures)
        if turn is not None:
            return turn
    raise ValueError(f"these pictures allow no question of family {family}")


def draw_all(rng: random.Random) -> dict[str, Picture]:
    """File names and pictures; every coloured shape in a bundled scene is unique."""
    pictures: dict[str, Picture] = {}
    for number, (count, _) in enumerate(SCENES, 1):
        while True:
            picture = draw_scene(rng, count)
            names = [thing.name for thing in picture.things]
            if len(set(names)) == len(names):
                break
        pictures[f"scene-{number}.png"] = picture
    for digit in DIGITS:
        pictures[f"digit-{digit}.png"] = draw_digit(rng, held_out=True, digit=digit)
    return pictures


def main() -> None:
    rng = random.Random(SEED)
    asker = Asker(rng, held_out=True)
    FOLDER.mkdir(exist_ok=True)
    pictures = draw_all(rng)
    questions = [
        ([f"scene-{number}.png"], family)
        for number, (_, families) in enumerate(SCENES, 1)
        for family in families
    ]
    questions += [([f"digit-{digit}.png"], "digit") for digit in DIGITS]
    questions += [(names, family) for family, names in PAIRS]
    for name, picture in pictures.items():
        (FOLDER / name).write_bytes(to_bytes(picture.image))
    items = [
        item(names, first_turn(asker, family, [pictures[name] for name in names]))
        for names, family in questions
    ]
    text = json.dumps(items, indent=1, ensure_ascii=False)
    (FOLDER / "questions.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
