"""Trains the bundled model from nothing on two CPU cores, and writes `model/` and the log.

    python train.py --scratch /tmp/tiny-vlm

Run again with the same scratch folder, it goes on from the last checkpoint. Every random choice
comes from the seed. Figures it logs come from held-out scans and unseen scenes; the published
figures do not come from here but from `verify.py` and, through the HTTP API, `evaluate.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from batches import Batch, Batches
from blueprint import build_model, build_processor
from pixels import normalise, squeeze
from questions import FAMILIES
from scenes import SCANS_FILE, draw_digit, draw_scene, split_scans
from sight import IGNORED, Words, features_of, learn_to_see, sight_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from transformers import LlavaForConditionalGeneration, LlavaProcessor
from verify import ask_all, report

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "e2e" / "results"
SEED = 7
BATCH = 32
PEAK_RATE = 1e-3
WARM_UP = 200
SAVE_EVERY, CHECK_EVERY = 200, 1000
CHECK_EACH = 40

# Dense answers first: captions name place, colour and shape of everything, relations state both
# places before the verdict. Single-word answers alone leave the text model guessing.
DENSE = {
    "caption": 60,
    "digit": 10,
    "relation": 8,
    "two_scenes": 5,
    "two_digits": 3,
    "place": 3,
    "colour": 4,
    "shape": 3,
    "count": 2,
    "presence": 1,
    "detail": 4,
    "text": 1,
}
EVEN = {
    "caption": 6,
    "detail": 6,
    "digit": 9,
    "relation": 16,
    "two_scenes": 14,
    "two_digits": 8,
    "two_mixed": 7,
    "place": 5,
    "colour": 8,
    "shape": 5,
    "count": 8,
    "presence": 8,
    "same_digit": 7,
    "more": 3,
    "text": 1,
}
# What was still weak at step 9,000 gets more.
LATE = {
    "caption": 4,
    "detail": 8,
    "digit": 11,
    "relation": 12,
    "two_scenes": 16,
    "two_digits": 10,
    "two_mixed": 6,
    "place": 5,
    "colour": 14,
    "shape": 5,
    "count": 10,
    "presence": 7,
    "same_digit": 6,
    "more": 3,
    "text": 1,
}
# And what was weak at step 14,000: finding a thing by its shape, and in the right image.
LAST = {
    "caption": 4,
    "detail": 11,
    "digit": 5,
    "relation": 8,
    "two_scenes": 22,
    "two_digits": 4,
    "two_mixed": 5,
    "place": 4,
    "colour": 26,
    "shape": 4,
    "count": 6,
    "presence": 4,
    "same_digit": 5,
    "more": 1,
    "text": 1,
}
# Telling two images apart came last, above all in captions.
PAIRS = {
    "caption": 3,
    "detail": 8,
    "digit": 5,
    "relation": 6,
    "two_scenes": 38,
    "two_digits": 8,
    "two_mixed": 5,
    "place": 3,
    "colour": 9,
    "shape": 3,
    "count": 4,
    "presence": 3,
    "same_digit": 8,
    "more": 1,
    "text": 1,
}
# Last, what still missed the aim.
REST = {
    "caption": 2,
    "detail": 24,
    "digit": 4,
    "relation": 5,
    "two_scenes": 44,
    "two_digits": 3,
    "two_mixed": 4,
    "place": 2,
    "colour": 4,
    "shape": 2,
    "count": 3,
    "presence": 2,
    "same_digit": 3,
    "more": 1,
    "text": 1,
}
# Whole descriptions, word for word.
WHOLE = {**REST, "detail": 44, "two_scenes": 34, "place": 4, "relation": 6}
LEVEL = {**WHOLE, "two_scenes": 28, "place": 9, "relation": 9}
SIGHT_STEPS = 2400
SEEN_SHARE = 0.3
SIGHT_RATE = 0.5
STEPS = 38_300
# What is kept is the mean of the mean weights of these steps, the first and the last one.
MEANS = ((36_900, 37_600), (37_900, 38_300))
MEAN_EVERY = 10
SCHEDULE = [
    (0, DENSE),
    (2600, EVEN),
    (9000, LATE),
    (14_000, LAST),
    (18_000, PAIRS),
    (20_500, REST),
    (27_500, WHOLE),
    (30_500, LEVEL),
    (37_600, REST),
]
# The run was planned with fewer steps and went on from its checkpoints: from which step on, and the
# first step, the last step and the peak of the cosine that held from there.
PLANS = [
    (0, WARM_UP, 14_000, PEAK_RATE),
    (9000, WARM_UP, 17_000, PEAK_RATE),
    (14_000, 14_000, 21_000, 0.6 * PEAK_RATE),
    (16_000, 14_000, 19_000, 0.6 * PEAK_RATE),
    (18_000, 15_000, 20_500, 0.6 * PEAK_RATE),
    (20_500, 20_000, 22_900, 0.4 * PEAK_RATE),
    (22_900, 22_000, 27_500, 0.4 * PEAK_RATE),
    (27_500, 26_500, 30_500, 0.3 * PEAK_RATE),
    (30_500, 30_500, 36_500, 0.25 * PEAK_RATE),
    (36_500, 36_300, 38_000, 0.25 * PEAK_RATE),
    (37_600, 37_000, 38_500, 0.2 * PEAK_RATE),
]


class Log:
    """Prints, and appends to the log file, with the seconds since the run began."""

    def __init__(self, path: Path, before: float):
        self.path, self.start = path, time.monotonic() - before

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def __call__(self, text: str) -> None:
        line = f"[{self.seconds():7.0f} s] {text}"
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def rate_at(step: int) -> float:
    """Linear warm-up, then cosines down to a fiftieth of their peak."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    return cosine_at(step, PLANS)


def cosine_at(step: int, plans: Sequence[tuple[int, int, int, float]]) -> float:
    """That of the last plan that has begun."""
    first, last, peak = next(plan[1:] for plan in reversed(plans) if step >= plan[0])
    progress = min(1.0, (step - first) / (last - first))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def check_pixels(processor: LlavaProcessor) -> float:
    """The largest difference between the training pixels and the processor's, in deviations."""
    rng = random.Random(SEED)
    worst = 0.0
    for index in range(40):
        picture = draw_scene(rng) if index % 2 else draw_digit(rng, held_out=False)
        mine = normalise(torch.from_numpy(squeeze(picture.image))[None], processor)
        theirs = processor.image_processor(picture.image, return_tensors="pt")["pixel_values"]
        worst = max(worst, (mine - theirs).abs().max().item())
    return worst


def loss_of(
    model: LlavaForConditionalGeneration,
    batch: Batch,
    processor: LlavaProcessor,
    words: Words,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean cross-entropy of the answers' tokens, and the loss of what the images show.

    The same steps as the model's own forward; right padding needs no mask in a causal model.
    """
    seen = torch.zeros(())
    with torch.autocast("cpu", torch.bfloat16):
        embeds = model.get_input_embeddings()(batch.ids)
        if len(batch.pixels):
            features = features_of(model, normalise(batch.pixels, processor))
            places = (batch.ids == model.config.image_token_index)[..., None].expand_as(embeds)
            embeds = embeds.masked_scatter(places, features.to(embeds.dtype))
            seen = words.loss(model, features.float(), batch.facts)
        hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False)[0]
        targets = batch.labels[:, 1:].reshape(-1)
        spoken = targets != IGNORED
        scores = model.lm_head(hidden[:, :-1].reshape(-1, hidden.shape[-1])[spoken])
    weights = batch.weights[:, 1:].reshape(-1)[spoken]
    losses = torch.nn.functional.cross_entropy(scores.float(), targets[spoken], reduction="none")
    return (losses * weights).sum() / weights.sum(), seen


def keep_held_out_scans() -> None:
    """Writes the held-out scans beside the scripts, for those who ask without scikit-learn."""
    if not SCANS_FILE.exists():
        scans, labels = split_scans()[1]
        np.savez_compressed(SCANS_FILE, scans=scans, labels=labels.astype(np.uint8))


@dataclass(frozen=True)
class Course:
    """What is learnt: mixtures and rates by step, from which step to which one weights are
    averaged, and what is asked at checkpoints."""

    schedule: list[tuple[int, dict[str, float]]]
    rate_at: Callable[[int], float]
    means: tuple[tuple[int, int], ...]
    families: tuple[str, ...]


class Trainer:
    """The model, its optimiser and how far they have come; a checkpoint holds all of it."""

    def __init__(
        self,
        scratch: Path,
        log_path: Path,
        course: Course,
        processor: LlavaProcessor,
        model: LlavaForConditionalGeneration,
        step: int = 0,
    ):
        self.course, self.processor, self.model, self.step = course, processor, model, step
        self.words = Words(self.processor)
        # At a hundred tokens the plain attention is the fastest on a CPU.
        self.model.set_attn_implementation("eager")
        # What has learnt to see learns on at a slower rate, lest the words undo it.
        sight = sight_parameters(self.model)
        known = {id(p) for p in sight}
        speech = [p for p in self.model.parameters() if id(p) not in known]
        groups = [
            {
                "params": [p for p in part if (p.ndim > 1) == matrix],
                "weight_decay": 0.05 * matrix,
                "share": share,
            }
            for part, share in ((sight, SIGHT_RATE), (speech, 1.0))
            for matrix in (True, False)
        ]
        self.optimiser = torch.optim.AdamW(groups, PEAK_RATE, betas=(0.9, 0.98), fused=True)
        self.means = [AveragedModel(self.model) for _ in course.means]
        self.saved = scratch / "checkpoint.pt"
        before = 0.0
        if self.saved.exists():
            state = torch.load(self.saved)
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            for mean, saved in zip(self.means, state["means"], strict=True):
                mean.load_state_dict(saved)
            self.step, before = state["step"], state["seconds"]
        self.log = Log(log_path, before)

    def run(self, steps: int) -> None:
        """Trains up to the given step, checking and saving on the way."""
        self.log(
            f"seed {SEED}, {sum(p.numel() for p in self.model.parameters())} parameters, "
            f"vocabulary {len(self.processor.tokenizer)}, step {self.step} of {steps}, "
            f"batch {BATCH}, pixel gap {check_pixels(self.processor):.4f}"
        )
        data = Batches(self.processor, SEED, BATCH, self.course.schedule, self.step)
        loader = iter(DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=20))
        self.model.train()
        total, waited, mark = 0.0, 0.0, time.monotonic()
        while self.step < steps:
            asked = time.monotonic()
            batch = next(loader)
            waited += time.monotonic() - asked
            total += self.learn(batch, self.course.rate_at(self.step))
            self.step += 1
            for mean, (first, last) in zip(self.means, self.course.means, strict=True):
                if first <= self.step <= last and self.step % MEAN_EVERY == 0:
                    mean.update_parameters(self.model)
            if self.step % 100 == 0:
                spent = time.monotonic() - mark
                self.log(
                    f"step {self.step}: loss {total / 100:.4f}, {spent / 100:.3f} s a step, "
                    f"{waited / spent:.0%} waiting for data"
                )
                total, waited, mark = 0.0, 0.0, time.monotonic()
            if self.step % CHECK_EVERY == 0 or self.step == steps:
                self.check()
                mark = time.monotonic()
            if self.step % SAVE_EVERY == 0 or self.step == steps:
                self.save()

    def learn(self, batch: Batch, rate: float) -> float:
        """One optimiser step; the loss of the words before it."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["share"]
        loss, seen = loss_of(self.model, batch, self.processor, self.words)
        self.optimiser.zero_grad()
        (loss + SEEN_SHARE * seen).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return loss.item()

    def check(self) -> None:
        right = ask_all(
            self.kept(), self.processor, self.course.families, CHECK_EACH, f"check {self.step}"
        )
        self.log("held out: " + report(right, ", "))
        self.model.train()

    def kept(self) -> LlavaForConditionalGeneration:
        """The mean of the means that have begun, each with the same weight; before, the model."""
        begun = [mean.module for mean in self.means if mean.n_averaged]
        if not begun:
            return self.model.eval()
        whole = AveragedModel(begun[0])
        for mean in begun:
            whole.update_parameters(mean)
        return whole.module.eval()

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "means": [mean.state_dict() for mean in self.means],
            "step": self.step,
            "seconds": self.log.seconds(),
        }
        torch.save(state, self.saved.with_suffix(".new"))
        self.saved.with_suffix(".new").replace(self.saved)

    def write(self, out: Path) -> None:
        """The mean model and its processor, as transformers loads them."""
        self.kept().save_pretrained(out)
        self.processor.save_pretrained(out)
        # Loaders that predate the joint processor file read this one.
        self.processor.image_processor.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--log", type=Path, default=RESULTS / "tiny-vlm-train.log")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    keep_held_out_scans()
    torch.manual_seed(SEED)
    processor = build_processor(SEED)
    model = build_model(processor.tokenizer)
    course = Course(SCHEDULE, rate_at, MEANS, FAMILIES)
    trainer = Trainer(options.scratch, options.log, course, processor, model)
    if trainer.step == 0:
        learn_to_see(model, processor, SEED, SIGHT_STEPS, trainer.log)
        trainer.save()
    trainer.run(options.steps)
    trainer.write(options.out)


if __name__ == "__main__":
    main()
