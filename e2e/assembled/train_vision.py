"""Trains the projector between the bundled model's vision tower and SmolLM2, on one CPU core.

    nice python -m e2e.assembled.train_vision --out /tmp/a
    nice python -m e2e.assembled.train_vision --course narrow --start /tmp/a --out /tmp/b
    nice python -m e2e.assembled.train_vision --course scenes --start /tmp/b --out /tmp/c
    nice python -m e2e.assembled.train_vision --course long --start /tmp/c

Nothing else learns. First the projector learns alone: what it makes of an image's 36 patches must
be near the word embeddings of what is there. Then it learns through the text model, from the
bundled model's questions and answers about one image, in four courses. Everything is seeded;
held-out figures are of unseen scenes and of scans that are never trained on. Writes
`vision-projector.safetensors` and the log.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from e2e.assembled import images
from e2e.assembled.assemble import VISION_PROJECTOR, vision_model, vision_processor
from e2e.assembled.images import Asker, Picture, Sample, as_typed, draw_digit, draw_scene
from e2e.assembled.learner import Learner, Lesson, Log, set_rate

LOG = Path(__file__).parents[2] / "e2e/results/smollm2-vision-train.log"
SEED = 5
ALONE_SCENES, ALONE_DIGITS = 1200, 800
ALONE_STEPS, ALONE_BATCH, ALONE_RATE = 400, 32, 2e-3
RATE = 1e-3
CHECKED = ("colour", "shape", "place", "presence", "count", "digit", "caption", "follow_up")


class Course(NamedTuple):
    """What is asked. A batch has `scenes` and `digits`; each scene is asked `questions` times, of
    the `families` as often as they weigh, and its tokens are computed once for all of them.
    `kinds`: of batches, in turn; answers of about one length go together."""

    seed: int
    steps: int
    kinds: tuple[str, ...]
    families: dict[str, int]
    scenes: int
    questions: int
    digits: int


PARTS = {"colour": 1, "shape": 1, "place": 1}
COURSES = {
    "broad": Course(
        SEED, 400, ("caption", "short", "short", "caption", "short", "follow_up"),
        {"colour": 3, "shape": 3, "place": 3, "presence": 1, "count": 1}, 3, 5, 3,
    ),
    "narrow": Course(SEED, 80, ("short",), PARTS, 3, 3, 6),
    "scenes": Course(SEED + 1, 150, ("short",), PARTS, 4, 4, 3),
    "long": Course(
        SEED + 2, 600, ("short", "short", "caption", "short", "follow_up"),
        {"colour": 3, "shape": 3, "place": 3, "presence": 2, "count": 2}, 3, 5, 3,
    ),
}  # fmt: skip
"""The first begins with the projector alone, each of the others from the one before (of the first,
its step 80)."""
NOTHING = " nothing"


class Sight:
    """Images to outputs of the frozen tower."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model.model, processor

    @torch.no_grad()
    def see(self, pictures: list[Picture]) -> torch.Tensor:
        """(images, 36, width)"""
        return self._model.vision_tower(self._pixels(pictures)).last_hidden_state[:, 1:]

    @torch.no_grad()
    def gap(self, pictures: list[Picture]) -> float:
        """The largest difference between the model's own image tokens and what is trained here."""
        own = self._model.get_image_features(self._pixels(pictures)).pooler_output
        here = self._model.multi_modal_projector(self.see(pictures))
        return (torch.stack(list(own)) - here).abs().max().item()

    def _pixels(self, pictures: list[Picture]) -> torch.Tensor:
        images = [picture.image for picture in pictures]
        found = self._processor.image_processor(images, return_tensors="pt")
        return found["pixel_values"]


def words_in(picture: Picture) -> list[list[str]]:
    """The words of each of 6 by 6 patches, row by row. Of a cell's four patches the left ones tell
    its colour and the right ones its shape, each with the place."""
    if picture.digit is not None:
        return [[str(picture.digit)]] * 36
    found = [[NOTHING]] * 36
    for thing in picture.things:
        place = [" " + word for word in thing.place.split()]
        for row in (2 * thing.row, 2 * thing.row + 1):
            at = 6 * row + 2 * thing.column
            found[at : at + 2] = [[*place, " " + thing.colour], [*place, " " + thing.shape]]
    return found


def learn_alone(projector: torch.nn.Module, sight: Sight, embedding_of: Callable[[str], Any],
                log: Log, steps: int) -> None:  # fmt: skip
    """The least square distance from the sum of the words' embeddings."""
    rng = random.Random(SEED)
    optimiser = torch.optim.AdamW(projector.parameters(), ALONE_RATE, weight_decay=0.01)
    pictures = [draw_scene(rng) for _ in range(ALONE_SCENES)]
    pictures += [draw_digit(rng, held_out=False) for _ in range(ALONE_DIGITS)]
    words = [words_in(picture) for picture in pictures]
    known = sorted({word for patches in words for patch in patches for word in patch})
    table = torch.stack([embedding_of(word) for word in known])
    place_of = {word: place for place, word in enumerate(known)}
    marks = torch.zeros(len(pictures), 36, len(known))
    for picture, patches in enumerate(words):
        for patch, told in enumerate(patches):
            marks[picture, patch, [place_of[word] for word in told]] = 1
    seen = torch.cat([sight.see(pictures[at : at + 100]) for at in range(0, len(pictures), 100)])
    total = 0.0
    for step in range(1, steps + 1):
        set_rate(optimiser, ALONE_RATE, step, steps)
        chosen = torch.tensor(rng.sample(range(len(pictures)), ALONE_BATCH))
        away = projector(seen[chosen]) - marks[chosen] @ table
        loss = away.pow(2).mean() / table.var()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item()
        if step % 100 == 0:
            log(f"alone {step}: distance {total / 100:.4f} of the words' variance")
            total = 0.0


class Lessons:
    """The bundled model's questions in SmolLM2's chat template."""

    def __init__(self, processor: Any, sight: Sight, course: Course) -> None:
        self._processor, self._sight, self._course = processor, sight, course
        self._end = processor.tokenizer.eos_token_id

    def ask(self, sample: Sample, seen: torch.Tensor) -> Lesson:
        """`seen`: the tower's outputs for the sample's picture."""
        processor = self._processor
        text = processor.apply_chat_template(
            sample.messages, add_generation_prompt=True, tokenize=False
        )
        before, after = text.split(processor.image_token)
        start, mark, question = before.rpartition("<|im_start|>user\n")
        answer = [*self.ids(sample.answer), self._end]
        first = tuple(self.ids(start + mark))
        if question:
            return Lesson(first, (self.ids(question), seen, self.ids(after)), answer)
        return Lesson(first, (self.ids(after),), answer, seen)

    def ids(self, text: str) -> list[int]:
        return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def batch_of(self, step: int) -> list[Lesson]:
        """All with the same system prompt, and all with the image first or last."""
        course = self._course
        rng = random.Random(f"{course.seed}/{step}")
        asker, kind = Asker(rng), course.kinds[step % len(course.kinds)]
        image_first, system = rng.random() < 0.8, asker.system(long=False)
        many = {"short": course.questions, "follow_up": course.questions // 2, "caption": 1}[kind]
        scenes = [draw_scene(rng) for _ in range(course.scenes if many > 1 else 2 * course.scenes)]
        digits = [draw_digit(rng, held_out=False) for _ in range(course.digits)]
        lessons = []
        for picture, seen in zip(scenes + digits, self._sight.see(scenes + digits), strict=True):
            for _ in range(many if image_first and picture.things else max(1, many // 3)):
                sample = self._drawn(asker, kind, picture, image_first)
                if sample is not None:
                    sample.messages[:0] = system
                    lessons.append(self.ask(sample, seen))
        return lessons

    def _drawn(self, asker: Asker, kind: str, picture: Picture, image_first: bool) -> Sample | None:
        """None where the picture does not allow the question."""
        names = ["caption" if kind == "caption" else "digit"]
        if picture.things and kind != "caption":
            number = 2 if kind == "follow_up" else 1
            families = self._course.families
            names = asker.rng.choices(list(families), list(families.values()), k=number)
        turns = [turn for name in names if (turn := asker.turn(name, picture)) is not None]
        if len(turns) < len(names):
            return None
        sample = Sample(names[-1], [], [picture], turns[-1].answer, turns[-1].verdict)
        for turn in turns:
            text: Any = as_typed(asker.rng, turn.question)
            if not sample.messages and image_first:
                space = asker.rng.choice(("", "", "\n", " "))
                text = [{"type": "image"}, {"type": "text", "text": space + text}]
            elif not sample.messages:
                text = [{"type": "text", "text": text}, {"type": "image"}]
            sample.messages.append({"role": "user", "content": text})
            if turn is not turns[-1]:
                sample.messages.append({"role": "assistant", "content": turn.answer})
        return sample

    def held_out(self, family: str, num: int) -> list[Lesson]:
        samples = images.held_out(family, "check", num)
        return [self.ask(one, self._sight.see(one.pictures)[0]) for one in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=VISION_PROJECTOR)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--start", type=Path, help="learns on from a projector")
    parser.add_argument("--alone", type=int, default=ALONE_STEPS, help="steps of the first part")
    parser.add_argument("--course", choices=COURSES, default="broad")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--checked", type=int, default=10, help="held-out questions of a family")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log = Log(options.log)
    model = vision_model()
    with TemporaryDirectory() as work:
        processor = vision_processor(Path(work))
    sight, projector = Sight(model, processor), model.model.multi_modal_projector
    course = COURSES[options.course]
    lessons = Lessons(processor, sight, course)
    gap = sight.gap([draw_scene(random.Random("gap"))])
    log(f"{options.course}, seed {course.seed}; checks: {options.checked} held-out questions each, "
        f"whole answers; gap {gap:.1e}")  # fmt: skip
    table = model.get_input_embeddings().weight.detach().clone()
    if options.start:
        projector.load_state_dict({k: t.float() for k, t in load_file(options.start).items()})
    else:
        learn_alone(
            projector, sight, lambda word: table[lessons.ids(word)].mean(0), log, options.alone
        )
    learner = Learner(model.model.language_model, model.lm_head, projector, log)
    held_out = {family: lessons.held_out(family, options.checked) for family in CHECKED}

    def check() -> str:
        save_file({name: t.half() for name, t in projector.state_dict().items()}, options.out)
        right = {family: sum(learner.right(asked)) for family, asked in held_out.items()}
        return ", ".join(f"{family} {number}" for family, number in right.items())

    log(f"step 0: held out: {check()}")
    steps = course.steps if options.steps is None else options.steps
    learner.fit(lessons.batch_of, steps, RATE, 40, check)
    log(f"{options.out.name}: {options.out.stat().st_size} bytes, float16")


if __name__ == "__main__":
    main()
