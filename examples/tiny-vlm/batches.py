"""Endless seeded training batches, made in a worker process beside the optimiser.

Used by `train.py` only. Pixels take the same road as in the processor (bicubic to 48 by 48, then
normalise); `train.py` checks that on samples before the first step. Held-out scans never enter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from blueprint import IMAGE_TOKENS, SIDE
from pixels import squeeze, through_jpeg
from questions import CAPTIONS, SCENE_FAMILIES, Sample
from scenes import Picture
from sight import IGNORED, Facts, facts_of
from structured import StructuredAsker
from torch.utils.data import IterableDataset
from transformers import LlavaProcessor

POOL = 10
VERDICT_WEIGHT = 3.0  # a relation's yes or no is one word in twenty-five
# Before this step only the colours of empty cells were taught to be nothing, and a shape asked for
# was found in empty cells, too: "what colour is the circle?" stayed at chance.
EMPTY_CELLS_FROM = 9000
PAIRS_FROM = 18_000
VALUES_FROM = 40_600  # from here on JSON's values weigh as much as verdicts
VALUE_MARKS = ('": "', '": ')
# From here on so do the words that hang on what is not said yet: "a" or "an", and after a full
# stop whether there is more to say. "shows a orange circle" and descriptions that stopped early,
# or too late, were most of what was wrong.
TURNS_FROM = 43_900
ARTICLES = ("Ġa", "Ġan")
LONG_POOLS = 6  # one pool in so many carries long system prompts in one of its batches


@dataclass
class Batch:
    """Token ids and labels padded on the right, what each label weighs in the loss; pixels and
    facts of all images in order."""

    ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    pixels: torch.Tensor
    facts: Facts


@dataclass
class Drawn:
    """One conversation before it joins a batch."""

    ids: list[int]
    labels: list[int]
    pixels: list[np.ndarray]
    pictures: list[Picture]


class Batches(IterableDataset):
    """Batches from `first_step` on: a pure function of seed, step and the mixture of families."""

    def __init__(
        self,
        processor: LlavaProcessor,
        seed: int,
        size: int,
        schedule: list[tuple[int, dict[str, float]]],
        first_step: int = 0,
    ):
        super().__init__()
        if first_step % POOL:
            raise ValueError(f"the first step must be a multiple of {POOL}")
        self.tokenizer = processor.tokenizer
        self.template = processor.chat_template
        self.seed, self.size, self.schedule, self.first_step = seed, size, schedule, first_step
        names = ("<pad>", "</s>", "<image>", "<|assistant|>")
        self.pad, self.end, self.image, self.reply = self.tokenizer.convert_tokens_to_ids(
            list(names)
        )
        known = self.tokenizer.get_added_vocab()
        self.value_marks = torch.tensor(
            [known[mark] for mark in VALUE_MARKS if mark in known], dtype=torch.long
        )
        self.articles = torch.tensor(self.tokenizer.convert_tokens_to_ids(list(ARTICLES)))
        self.full_stop = self.tokenizer.convert_tokens_to_ids(".")

    def __iter__(self) -> Iterator[Batch]:
        step = self.first_step
        while True:
            rng = random.Random(f"{self.seed}/{step}")
            weights = next(mix for start, mix in reversed(self.schedule) if step >= start)
            yield from self._pool(rng, weights, step)
            step += POOL

    def _pool(self, rng: random.Random, weights: dict[str, float], step: int) -> list[Batch]:
        """Ten batches grouped by length, so that little of a batch is padding."""
        families = rng.choices(list(weights), list(weights.values()), k=self.size * POOL)
        asker = StructuredAsker(rng)
        if step >= PAIRS_FROM:
            asker.captions_of_one = 4
        long = self.size if step // POOL % LONG_POOLS == LONG_POOLS - 1 else 0
        drawn = []
        for index, family in enumerate(families):
            sample = asker.sample(family, self._earlier(rng, family), long=index < long)
            pixels = [squeeze(through_jpeg(rng, picture.image)) for picture in sample.pictures]
            drawn.append(Drawn(*self._tokens(sample), pixels, sample.pictures))
        drawn.sort(key=lambda item: len(item.ids))
        batches = [
            self._collate(drawn[at : at + self.size], step)
            for at in range(0, len(drawn), self.size)
        ]
        rng.shuffle(batches)
        return batches

    @staticmethod
    def _earlier(rng: random.Random, family: str) -> tuple[str, ...]:
        """Which questions precede the last one; their answers are learnt from as well."""
        if family in (*SCENE_FAMILIES, *CAPTIONS, "json"):
            number = rng.choice((0, 0, 1, 2, 3))
            choice = (*SCENE_FAMILIES, "caption")
            return tuple(rng.choice(choice) for _ in range(number))
        if family in ("two_scenes", "two_digits", "two_mixed"):
            return (family,) * rng.choice((0, 1, 1))
        return ()

    def _tokens(self, sample: Sample) -> tuple[list[int], list[int]]:
        """The ids of the whole conversation, and labels on the assistant's words and end marks."""
        messages = [*sample.messages, {"role": "assistant", "content": sample.answer}]
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=sample.options.get("tools"),
            chat_template=self.template,
            tokenize=False,
        )
        text = text.replace("<image>", "<image>" * IMAGE_TOKENS)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        labels, speaking = [], False
        for token in ids:
            labels.append(token if speaking else IGNORED)
            speaking = token == self.reply or (speaking and token != self.end)
        return ids, labels

    def _collate(self, items: list[Drawn], step: int) -> Batch:
        width = max(len(item.ids) for item in items)
        ids = torch.full((len(items), width), self.pad)
        labels = torch.full((len(items), width), IGNORED)
        for row, item in enumerate(items):
            ids[row, : len(item.ids)] = torch.tensor(item.ids)
            labels[row, : len(item.labels)] = torch.tensor(item.labels)
        # The word before an end mark that is learnt is the reply's verdict.
        weights = (labels != IGNORED).float()
        weights[:, :-1][labels[:, 1:] == self.end] = VERDICT_WEIGHT
        if step >= VALUES_FROM:
            weights[:, 1:][torch.isin(labels[:, :-1], self.value_marks)] = VERDICT_WEIGHT
            weights[:, 2:][torch.isin(labels[:, :-2], self.value_marks)] = VERDICT_WEIGHT
        if step >= TURNS_FROM:
            weights[torch.isin(labels, self.articles)] = VERDICT_WEIGHT
            weights[:, 1:][labels[:, :-1] == self.full_stop] = VERDICT_WEIGHT
        arrays = [array for item in items for array in item.pixels]
        pictures = [picture for item in items for picture in item.pictures]
        facts = facts_of(pictures, step >= EMPTY_CELLS_FROM)
        stacked = np.stack(arrays) if arrays else np.zeros((0, SIDE, SIDE, 3), np.uint8)
        return Batch(ids, labels, weights, torch.from_numpy(stacked), facts)
