"""Asks the saved model held-out questions through plain transformers, greedily in float32.

    python verify.py model --each 300

`train.py` uses `ask_all` for its checkpoints. Prints accuracy by family and exits with 1 if one is
below 95 %. Never trains, and never asks about a scan or a scene that was trained on.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections.abc import Iterable

import torch
from PIL import Image
from questions import Sample, is_right
from scenes import to_bytes
from structured import ALL_FAMILIES, StructuredAsker
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

BATCH = 50
LONGEST = {"caption": 60, "detail": 150, "json": 160, "unasked": 150}
REQUIRED = 0.95
Counts = dict[str, tuple[int, int]]


def replies(
    model: PreTrainedModel, processor: ProcessorMixin, samples: list[Sample], jpeg: bool = False
) -> list[str]:
    """What the model answers to each sample, one padded batch for all."""
    texts = [
        processor.apply_chat_template(
            sample.messages,
            tools=sample.options.get("tools"),
            add_generation_prompt=True,
            tokenize=False,
        )
        for sample in samples
    ]
    images = [picture.image for sample in samples for picture in sample.pictures]
    if jpeg:
        images = [Image.open(io.BytesIO(to_bytes(image, "JPEG", 85))) for image in images]
    inputs = processor(
        text=texts, images=images or None, padding=True, padding_side="left", return_tensors="pt"
    )
    longest = LONGEST.get(samples[0].family, 40)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
    fresh = output[:, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.batch_decode(fresh, skip_special_tokens=True)


def ask_all(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    families: Iterable[str],
    each: int,
    seed: str,
    unseen: bool = False,
    jpeg: bool = False,
    show: int = 0,
) -> Counts:
    """Right answers and questions by family."""
    counts: Counts = {}
    for family in families:
        asker = StructuredAsker(
            random.Random(f"held out/{seed}/{family}"), held_out=True, unseen=unseen
        )
        right = wrong = 0
        for start in range(0, each, BATCH):
            samples = [asker.sample(family) for _ in range(min(BATCH, each - start))]
            for sample, reply in zip(
                samples, replies(model, processor, samples, jpeg), strict=True
            ):
                if is_right(reply, sample.verdict):
                    right += 1
                    continue
                wrong += 1
                if wrong <= show:
                    print(
                        f"  {family}: {sample.messages[-1]['content']!r}\n"
                        f"    said {reply!r}, right is {sample.answer!r}"
                    )
        counts[family] = right, each
    return counts


def report(counts: Counts, separator: str = "\n") -> str:
    return separator.join(
        f"{family} {right / asked:.3f}" + (f" ({right}/{asked})" if separator == "\n" else "")
        for family, (right, asked) in counts.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--each", type=int, default=300, help="questions per family")
    parser.add_argument("--seed", default="verify")
    parser.add_argument("--families", nargs="*", default=list(ALL_FAMILIES))
    parser.add_argument("--unseen", action="store_true", help="wordings never trained on")
    parser.add_argument("--jpeg", action="store_true", help="send the images as JPEG, quality 85")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per family")
    options = parser.parse_args()
    torch.set_num_threads(2)
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32).eval()
    counts = ask_all(
        model,
        processor,
        options.families,
        options.each,
        options.seed,
        options.unseen,
        options.jpeg,
        options.show,
    )
    print(report(counts))
    return int(any(right / asked < REQUIRED for right, asked in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
