"""Teaches the model of `train.py` to answer in JSON and to call tools, and writes `model/`.

    python finetune.py --base /tmp/tiny-vlm-base --scratch /tmp/tiny-vlm-tools

`base` is what `train.py` wrote (`--out`). The new tokens stand behind the old ones, so that every
old one keeps its id and its weights; all that was learnt before stays in the mixture. Run again
with the same scratch folder, it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from blueprint import CHAT_TEMPLATE
from structured import ALL_FAMILIES
from tokenizers import AddedToken
from train import HERE, RESULTS, SEED, STEPS, WARM_UP, Course, Trainer, cosine_at
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

PEAK_RATE = 4e-4
LAST = 44_300
MEANS = ((43_700, 43_900), (44_210, LAST))
# JSON's punctuation as few tokens: a scene of five shapes is 80 instead of 167.
PUNCTUATION = ('{"', '": "', '", "', '": ', ', "', '"}', '"}, {"')
HOW_IT_WAS_LOADED = {"is_local", "local_files_only"}  # no part of the tokenizer
NEW_TOKENS = ("<tool_call>", "</tool_call>", *PUNCTUATION)
MIXTURE = {
    "json": 18,
    "look": 14,
    "compare": 10,
    "unasked": 8,
    "two_scenes": 12,
    "relation": 7,
    "place": 7,
    "detail": 6,
    "digit": 5,
    "colour": 5,
    "count": 5,
    "two_digits": 4,
    "two_mixed": 4,
    "presence": 4,
    "same_digit": 4,
    "shape": 3,
    "caption": 2,
    "more": 2,
    "text": 2,
}
# What was still weak at step 40,400.
LATE = {
    "json": 36,
    "look": 6,
    "compare": 5,
    "unasked": 5,
    "two_scenes": 14,
    "detail": 10,
    "relation": 5,
    "place": 5,
    "same_digit": 5,
    "colour": 4,
    "count": 4,
    "digit": 3,
    "two_digits": 3,
    "two_mixed": 3,
    "presence": 3,
    "shape": 2,
    "caption": 1,
    "more": 1,
    "text": 1,
}
# And of what was known before, once JSON was right.
REST = {
    "json": 16,
    "look": 10,
    "compare": 4,
    "unasked": 6,
    "two_scenes": 14,
    "detail": 10,
    "place": 9,
    "relation": 7,
    "count": 6,
    "colour": 5,
    "same_digit": 5,
    "digit": 4,
    "two_digits": 4,
    "two_mixed": 4,
    "presence": 4,
    "shape": 2,
    "caption": 2,
    "more": 2,
    "text": 2,
}
# Last, what had fallen below its old share: two scenes told apart, and whole descriptions.
KNOWN = {
    "two_scenes": 20,
    "detail": 20,
    "json": 14,
    "look": 9,
    "place": 6,
    "relation": 5,
    "unasked": 4,
    "count": 4,
    "compare": 3,
    "colour": 3,
    "two_digits": 3,
    "two_mixed": 3,
    "same_digit": 3,
    "digit": 2,
    "presence": 2,
    "shape": 1,
    "caption": 1,
    "more": 1,
    "text": 1,
}
# With two scenes right again, descriptions and pictures that a tool returned were still short.
SHORT = {**KNOWN, "detail": 26, "look": 18, "two_scenes": 15}
SCHEDULE = [
    (STEPS, MIXTURE),
    (40_600, LATE),
    (42_000, REST),
    (43_000, KNOWN),
    (43_600, SHORT),
]
# As in train.py: from which step on, and the first step, the last step and the peak of the cosine.
PLANS = [
    (STEPS, STEPS + WARM_UP, 43_300, PEAK_RATE),
    (40_600, STEPS + WARM_UP, 44_000, PEAK_RATE),
    (42_000, 41_000, 43_000, 0.6 * PEAK_RATE),
    (43_000, 43_000, 43_600, 0.25 * PEAK_RATE),
    (43_600, 43_600, 43_900, 0.2 * PEAK_RATE),
    (43_900, 43_900, 45_000, 0.2 * PEAK_RATE),
    (44_200, 44_200, LAST, 0.16 * PEAK_RATE),
]


def rate_at(step: int) -> float:
    """Linear warm-up, then cosines."""
    if step < STEPS + WARM_UP:
        return PEAK_RATE * (step - STEPS + 1) / WARM_UP
    return cosine_at(step, PLANS)


def grow(processor: LlavaProcessor, model: LlavaForConditionalGeneration) -> None:
    """The tokens of calls, results and JSON, and a template that shows tools."""
    tokenizer = processor.tokenizer
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in NEW_TOKENS])
    marks = [*tokenizer.extra_special_tokens, "<|tool|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": marks})
    processor.chat_template = tokenizer.chat_template = CHAT_TEMPLATE
    for name in set(tokenizer.init_kwargs) & HOW_IT_WAS_LOADED:
        del tokenizer.init_kwargs[name]
    # Drawn from the mean and the spread of the words that are there.
    model.resize_token_embeddings(len(tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--log", type=Path, default=RESULTS / "tiny-vlm-finetune.log")
    parser.add_argument("--steps", type=int, default=LAST, help="stop at this step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    processor = AutoProcessor.from_pretrained(options.base)
    model = LlavaForConditionalGeneration.from_pretrained(options.base, dtype=torch.float32)
    grow(processor, model)
    course = Course(SCHEDULE, rate_at, MEANS, ALL_FAMILIES)
    trainer = Trainer(options.scratch, options.log, course, processor, model, STEPS)
    trainer.run(options.steps)
    trainer.write(options.out)


if __name__ == "__main__":
    main()
