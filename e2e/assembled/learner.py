"""A projector that learns to speak to a frozen text model, from questions and their answers.

Used by the training scripts. Gradients pass through the text model; nothing of it changes. It
computes in bfloat16, the projector in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

LEAST_SHARE = 0.02


class Lesson(NamedTuple):
    """A prompt and its answer.

    Attributes:
        start: the prompt's first ids, the same for all lessons of a batch: computed once.
        pieces: what follows: ids, or outputs of the tower (n, width) for the projector.
        answer: ids, with the end mark.
        seen: outputs of the tower between start and pieces. Lessons of a batch with the same tensor
            share its computation; all of a batch have one of the same length, or none has.
    """

    start: tuple[int, ...]
    pieces: tuple[list[int] | torch.Tensor, ...]
    answer: list[int]
    seen: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces)) + len(self.answer)


class Log:
    """Prints, and appends to the log file, with the seconds since the run began."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin = path, time.monotonic()
        path.write_text("")

    def __call__(self, text: str) -> None:
        line = f"[{time.monotonic() - self._begin:6.0f} s] {text}"
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


class Learner:
    """`decoder`, `head`: of a causal model, taken over, frozen; `projector`: trained in place."""

    def __init__(self, decoder: Any, head: Any, projector: torch.nn.Module, log: Log) -> None:
        self._decoder = decoder.to(torch.bfloat16).eval().requires_grad_(False)
        self._head = head.to(torch.bfloat16).requires_grad_(False)
        self._projector = projector.float()
        self._log = log
        self._starts: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def fit(
        self, batch_of: Callable[[int], Sequence[Lesson]], steps: int, rate: float,
        check_every: int, check: Callable[[], str],
    ) -> None:  # fmt: skip
        """AdamW, a warm-up of a twentieth, then half a cosine."""
        optimiser = torch.optim.AdamW(self._projector.parameters(), rate, weight_decay=0.01)
        total, mark = 0.0, time.monotonic()
        for step in range(1, steps + 1):
            set_rate(optimiser, rate, step, steps)
            scores, targets, _ = self._answers(batch_of(step))
            loss = cross_entropy(scores.float(), targets)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._projector.parameters(), 1.0)
            optimiser.step()
            total += loss.item()
            if step % 20 == 0:
                spent = (time.monotonic() - mark) / 20
                self._log(f"step {step}: loss {total / 20:.4f}, {spent:.2f} s a step")
                total, mark = 0.0, time.monotonic()
            if step % check_every == 0 or step == steps:
                self._log(f"step {step}: held out: {check()}")
                mark = time.monotonic()

    @torch.inference_mode()
    def right(self, lessons: Sequence[Lesson]) -> list[bool]:
        """Whether the model's greedy answer is the lesson's, to the end mark: it is if every token
        of it wins where those before it are given."""
        batches: dict[Any, list[int]] = {}
        for place, lesson in enumerate(lessons):
            batches.setdefault((lesson.start, lesson.seen is None), []).append(place)
        wrong = set()
        for places in batches.values():
            scores, targets, owners = self._answers([lessons[place] for place in places])
            wrong |= {places[row] for row in owners[scores.argmax(-1) != targets].tolist()}
        return [place not in wrong for place in range(len(lessons))]

    def _answers(
        self, lessons: Sequence[Lesson]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits (answers' tokens, vocabulary), what they should say, and whose they are."""
        rows = [self._embedded(lesson) for lesson in lessons]
        # Padding on the right needs no mask: nothing before it looks there.
        embeds = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = self._decoder(inputs_embeds=embeds, past_key_values=self._known(lessons))[0]
        said, targets, owners = [], [], []
        for row, lesson in enumerate(lessons):
            first = len(rows[row]) - len(lesson.answer)
            said.append(hidden[row, first - 1 : len(rows[row]) - 1])
            targets += lesson.answer
            owners += [row] * len(lesson.answer)
        scores = self._head(torch.cat(said))
        return scores, torch.tensor(targets), torch.tensor(owners)

    def _known(self, lessons: Sequence[Lesson]) -> DynamicCache:
        """Keys and values of all that comes before the lessons' pieces."""
        [start] = {lesson.start for lesson in lessons}

        def repeated(times: int) -> DynamicCache:
            state = self._state(start)
            return DynamicCache([tuple(t.expand(times, -1, -1, -1) for t in one) for one in state])

        seen = {id(lesson.seen): lesson.seen for lesson in lessons if lesson.seen is not None}
        if not seen:
            return repeated(len(lessons))
        cache = repeated(len(seen))
        embeds = self._projector(torch.stack(list(seen.values()))).to(torch.bfloat16)
        self._decoder(inputs_embeds=embeds, past_key_values=cache)
        rows = torch.tensor([list(seen).index(id(lesson.seen)) for lesson in lessons])
        return DynamicCache([(layer.keys[rows], layer.values[rows]) for layer in cache.layers])

    def _embedded(self, lesson: Lesson) -> torch.Tensor:
        table = self._decoder.get_input_embeddings()
        found = [
            self._projector(piece).to(torch.bfloat16)
            if isinstance(piece, torch.Tensor)
            else table(torch.tensor(piece))
            for piece in (*lesson.pieces, lesson.answer)
        ]
        return torch.cat(found)

    def _state(self, start: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a prompt's beginning, by layer."""
        if start not in self._starts:
            cache = DynamicCache()
            with torch.no_grad():
                self._decoder(input_ids=torch.tensor([start]), past_key_values=cache)
            self._starts[start] = [(one.keys.clone(), one.values.clone()) for one in cache.layers]
        return self._starts[start]


def set_rate(optimiser: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """A warm-up of a twentieth, then half a cosine down to a fiftieth."""
    falling = 0.5 * (1 + math.cos(math.pi * step / steps))
    share = min(20 * step / steps, LEAST_SHARE + (1 - LEAST_SHARE) * falling)
    for group in optimiser.param_groups:
        group["lr"] = peak * share
