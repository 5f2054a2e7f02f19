"""Teaches the vision tower to see, in the language model's own words.

Used by `train.py` only: first alone, as the lesson before any question, then as a second loss on
the images of every batch. What the projector makes of a grid cell must score highest with the
words for its colour, shape, row and column in the (tied) word embeddings, and a digit's tokens
with that digit. So nothing but the model itself is trained, and the words can simply be looked up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from blueprint import PATCH, SIDE
from pixels import normalise, squeeze, through_jpeg
from scenes import COLOURS, COLUMNS, ROWS, SHAPES, Picture, draw_digit, draw_scene
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlavaForConditionalGeneration, LlavaProcessor

SCENES, DIGITS = 32, 96  # in a batch; handwriting takes by far the longest to learn
PEAK_RATE = 1e-3
WARM_UP = 100
IGNORED = -100
NOTHING, NO_SHAPE = len(COLOURS), len(SHAPES)
CELLS = 9
SIZE = 0.3  # root mean square of an image token, near that of a word embedding


@dataclass
class Facts:
    """What images show: a colour and a shape per cell, and a digit; ignored where there is none."""

    colours: torch.Tensor
    shapes: torch.Tensor
    digits: torch.Tensor


def facts_of(pictures: list[Picture], empty_cells: bool = False) -> Facts:
    """What the pictures show; with `empty_cells`, that an empty cell has no shape as well."""
    colours = torch.full((len(pictures), CELLS), IGNORED)
    shapes = torch.full((len(pictures), CELLS), IGNORED)
    digits = torch.full((len(pictures),), IGNORED)
    for row, picture in enumerate(pictures):
        if picture.digit is not None:
            digits[row] = picture.digit
            continue
        colours[row] = NOTHING
        if empty_cells:
            shapes[row] = NO_SHAPE
        for thing in picture.things:
            cell = thing.row * 3 + thing.column
            colours[row, cell] = list(COLOURS).index(thing.colour)
            shapes[row, cell] = SHAPES.index(thing.shape)
    return Facts(colours, shapes, digits)


class Words:
    """The token ids of the words that images are matched with, and the matching itself."""

    def __init__(self, processor: LlavaProcessor):
        self.tokenizer = processor.tokenizer
        nothing = self.tokenizer.convert_tokens_to_ids("<pad>")
        # A word that opens a reply and the same word after a space are two tokens.
        self.colours = [[*self._ids(COLOURS, space), nothing] for space in ("", " ")]
        self.shapes = [[*self._ids(SHAPES, space), nothing] for space in ("", " ")]
        self.rows, self.columns = self._ids(ROWS, " "), self._ids(COLUMNS, " ")
        self.digits = self._ids([str(digit) for digit in range(10)], "")

    def _ids(self, words: object, space: str) -> list[int]:
        tokens = [self.tokenizer(space + word)["input_ids"] for word in words]
        if any(len(ids) != 1 for ids in tokens):
            raise ValueError(f"not all of these are single tokens: {words}")
        return [ids[0] for ids in tokens]

    def scores(
        self, model: LlavaForConditionalGeneration, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of all words for each image's nine cells, and for each image as a whole."""
        features = features.float()
        features = features * features.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        side = SIDE // PATCH // 3
        cells = features.reshape(len(features), 3, side, 3, side, -1).mean((2, 4))
        words = model.lm_head.weight
        return cells.reshape(len(features), CELLS, -1) @ words.T, features.mean(1) @ words.T

    def loss(
        self, model: LlavaForConditionalGeneration, features: torch.Tensor, facts: Facts
    ) -> torch.Tensor:
        cells, wholes = self.scores(model, features)
        cells = cells.reshape(-1, cells.shape[-1])
        total = features.new_zeros(())
        no_shape = bool((facts.shapes == NO_SHAPE).any())
        shapes = self.shapes if no_shape else [ids[:-1] for ids in self.shapes]
        for targets, choices in ((facts.colours, self.colours), (facts.shapes, shapes)):
            if (targets != IGNORED).any():
                for ids in choices:
                    total = total + 0.5 * cross_entropy(
                        cells[:, ids], targets.reshape(-1), ignore_index=IGNORED
                    )
        if (facts.digits != IGNORED).any():
            total = total + cross_entropy(
                wholes[:, self.digits], facts.digits, ignore_index=IGNORED
            )
        # Image tokens as long as 80 word embeddings drown whatever the language model adds.
        size = features.float().pow(2).mean(-1).add(1e-6).sqrt()
        total = total + 0.05 * (size / SIZE).log().pow(2).mean()
        places = torch.arange(CELLS).repeat(len(features))
        total = total + 0.2 * cross_entropy(cells[:, self.rows], places // 3)
        return total + 0.2 * cross_entropy(cells[:, self.columns], places % 3)


class Lessons(IterableDataset):
    """Endless seeded batches of pixels and facts, scenes before digits."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Facts]]:
        rng = random.Random(f"{self.seed}/sight")
        while True:
            pictures = [draw_scene(rng) for _ in range(SCENES)]
            pictures += [draw_digit(rng, held_out=False) for _ in range(DIGITS)]
            pixels = [squeeze(through_jpeg(rng, picture.image)) for picture in pictures]
            yield torch.from_numpy(np.stack(pixels)), facts_of(pictures)


def features_of(model: LlavaForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """The projected image tokens exactly as the model puts them among the words' embeddings."""
    tower = model.model.vision_tower(pixels, output_hidden_states=True)
    return model.model.multi_modal_projector(tower.hidden_states[-1][:, 1:])


def sight_parameters(model: LlavaForConditionalGeneration) -> list[torch.nn.Parameter]:
    """The vision tower's and the projector's."""
    parts = model.model.vision_tower, model.model.multi_modal_projector
    return [parameter for part in parts for parameter in part.parameters()]


def learn_to_see(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    seed: int,
    steps: int,
    log: Callable[[str], None],
) -> None:
    """Trains tower, projector and word embeddings in place."""
    words = Words(processor)
    parameters = [*sight_parameters(model), model.lm_head.weight]
    optimiser = torch.optim.AdamW(
        parameters, PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    loader = iter(DataLoader(Lessons(seed), batch_size=None, num_workers=1, prefetch_factor=10))
    model.train()
    total = 0.0
    for step in range(1, steps + 1):
        pixels, facts = next(loader)
        for group in optimiser.param_groups:
            falling = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = PEAK_RATE * min(step / WARM_UP, falling)
        with torch.autocast("cpu", torch.bfloat16):
            features = features_of(model, normalise(pixels, processor))
        loss = words.loss(model, features.float(), facts)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        total += loss.item()
        if step % 100 == 0:
            log(
                f"sight {step}: loss {total / 100:.4f}, held out: "
                + check(model, processor, words, step)
            )
            total = 0.0


@torch.inference_mode()
def check(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, words: Words, step: int
) -> str:
    """The share of right cells' colours and shapes, and of right held-out digits."""
    rng = random.Random(f"sight check {step}")
    pictures = [draw_scene(rng) for _ in range(150)]
    pictures += [draw_digit(rng, held_out=True) for _ in range(300)]
    pixels = torch.from_numpy(np.stack([squeeze(picture.image) for picture in pictures]))
    cells, wholes = words.scores(model, features_of(model, normalise(pixels, processor)))
    facts = facts_of(pictures)
    shares = []
    for scores, ids, targets in (
        (cells, words.colours[1], facts.colours),
        (cells, words.shapes[1], facts.shapes),
        (wholes, words.digits, facts.digits),
    ):
        right = (scores[..., ids].argmax(-1) == targets)[targets != IGNORED]
        shares.append(right.float().mean().item())
    return "colours {:.3f}, shapes {:.3f}, digits {:.3f}".format(*shares)
