"""Pictures whose content is known: scenes of coloured shapes, and scanned handwritten digits.

Used by the training script, by the evaluation through the HTTP API and by the bundled images.
Everything is drawn from the `random.Random` handed in, so one seed gives one picture. Never
imports torch or transformers: a machine with only Pillow and numpy can ask held-out questions.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

HELD_OUT_SCANS = 300
SPLIT_SEED = 20250607
SCANS_FILE = Path(__file__).with_name("held-out-digits.npz")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 35),
    "green": (35, 155, 60),
    "blue": (40, 75, 215),
    "yellow": (242, 215, 40),
    "purple": (140, 45, 170),
    "orange": (245, 135, 25),
}
INKS = COLOURS | {"white": (245, 245, 245), "black": (15, 15, 15)}
LIGHT_INKS = ("white", "yellow", "orange", "red", "green")
DARK_INKS = ("black", "blue", "red", "purple", "green")
SHAPES = ("circle", "square", "triangle")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
LIGHT = ((255, 255, 255), (238, 238, 232), (222, 226, 230))
DARK = ((0, 0, 0), (28, 30, 36), (48, 46, 50))


@dataclass(frozen=True)
class Thing:
    """One coloured shape in one cell of the three by three grid."""

    row: int
    column: int
    colour: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"


@dataclass(frozen=True)
class Picture:
    """A rendered image and what it shows: shapes in reading order, or one digit and its ink."""

    image: Image.Image
    things: tuple[Thing, ...] = ()
    digit: int | None = None
    ink: str = ""


def draw_scene(rng: random.Random, count: int | None = None) -> Picture:
    """A scene of one to five shapes. A quarter of the scenes may repeat a coloured shape."""
    cells = rng.sample(range(9), count or rng.randint(1, 5))
    repeats = rng.random() < 0.25
    things: list[Thing] = []
    for cell in sorted(cells):
        while True:
            thing = Thing(cell // 3, cell % 3, rng.choice(list(COLOURS)), rng.choice(SHAPES))
            if repeats or all(thing.name != other.name for other in things):
                break
        if repeats and things and rng.random() < 0.5:
            twin = rng.choice(things)
            thing = Thing(cell // 3, cell % 3, twin.colour, twin.shape)
        things.append(thing)
    return Picture(_paint_scene(rng, things), tuple(things))


def _paint_scene(rng: random.Random, things: list[Thing]) -> Image.Image:
    side = rng.choice((96, 96, 120, 144))
    width = height = side
    if rng.random() < 0.25:
        # Not every photo is square: the processor squeezes it, and the answer must stay.
        width, height = rng.choice(((side * 4 // 3, side), (side, side * 4 // 3)))
    image = Image.new("RGB", (width, height), _jitter(rng, rng.choice(LIGHT + DARK), 6))
    pen = ImageDraw.Draw(image)
    cell = min(width, height) / 3
    for thing in things:
        x = (thing.column + 0.5) * width / 3 + rng.uniform(-0.1, 0.1) * cell
        y = (thing.row + 0.5) * height / 3 + rng.uniform(-0.1, 0.1) * cell
        _paint_thing(rng, pen, thing, x, y, cell * rng.uniform(0.28, 0.38))
    return image


def _paint_thing(
    rng: random.Random, pen: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, radius: float
) -> None:
    fill = _jitter(rng, COLOURS[thing.colour], 12)
    if thing.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif thing.shape == "square":
        half = radius * 0.9
        pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    else:
        corners = ((x, y - radius), (x - radius, y + radius * 0.9), (x + radius, y + radius * 0.9))
        pen.polygon(corners, fill=fill)


def _jitter(rng: random.Random, colour: tuple[int, int, int], by: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-by, by))) for part in colour)
    return red, green, blue


def draw_digit(rng: random.Random, held_out: bool, digit: int | None = None) -> Picture:
    """One scanned handwritten digit pasted on a plain canvas; `digit` picks which, if given."""
    scans, labels = load_scans(held_out)
    if digit is None:
        digit = rng.randrange(10)
    scan = scans[rng.choice(np.flatnonzero(labels == digit).tolist())]
    side = rng.choice((96, 96, 120, 144))
    size = int(side * rng.uniform(0.55, 0.95))
    mask = Image.fromarray((scan.astype(np.uint8) * 15).clip(0, 255)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    if not held_out:
        mask = _bend(rng, mask)
    dark_paper = rng.random() < 0.5
    ink = rng.choice(LIGHT_INKS if dark_paper else DARK_INKS)
    ground = _jitter(rng, rng.choice(DARK if dark_paper else LIGHT), 6)
    paper = Image.new("RGB", (side, side), ground)
    at = (rng.randint(0, side - size), rng.randint(0, side - size))
    paper.paste(Image.new("RGB", mask.size, _jitter(rng, INKS[ink], 10)), at, mask)
    return Picture(paper, digit=digit, ink=ink)


def _bend(rng: random.Random, mask: Image.Image) -> Image.Image:
    """Light augmentation of a training scan: turn, slant, stretch. Held-out scans are untouched."""
    centre = mask.width / 2
    angle = np.deg2rad(rng.uniform(-12, 12))
    slant = rng.uniform(-0.15, 0.15)
    stretch_x, stretch_y = rng.uniform(0.9, 1.15), rng.uniform(0.9, 1.15)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[stretch_x, slant], [0.0, stretch_y]])
    shift = np.array([centre, centre]) - matrix @ np.array([centre, centre])
    row_x, row_y = np.column_stack([matrix, shift]).tolist()
    coefficients = (*row_x, *row_y)
    return mask.transform(
        mask.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
    )


@lru_cache(maxsize=2)
def load_scans(held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """The 8 by 8 scans (values 0 to 16) and labels of one side of the fixed split.

    The held-out side is a small file beside this one, so asking needs no scikit-learn.
    """
    if held_out and SCANS_FILE.exists():
        stored = np.load(SCANS_FILE)
        return stored["scans"], stored["labels"]
    training, rest = split_scans()
    return rest if held_out else training


def split_scans() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's bundled digit scans as (training, held-out), the same on every machine."""
    from sklearn.datasets import load_digits  # only training needs it

    scans = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(scans.target))
    images = scans.images.astype(np.uint8)
    held, kept = order[:HELD_OUT_SCANS], order[HELD_OUT_SCANS:]
    return (images[kept], scans.target[kept]), (images[held], scans.target[held])


def to_bytes(image: Image.Image, image_format: str = "PNG", quality: int = 85) -> bytes:
    """The image as a PNG, or a JPEG of the given quality."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **({"quality": quality} if image_format == "JPEG" else {}))
    return buffer.getvalue()


def to_data_url(image: Image.Image) -> str:
    """The image as a `data:` URL, the way a chat request carries it."""
    return "data:image/png;base64," + base64.b64encode(to_bytes(image)).decode()
