"""A trace of questions with known answers, for the models whose texts mean something.

Spoken digits for `smollm2-audio`, the bundled model's questions for `smollm2-vision`
(e2e/assembled). A third of the requests have a clip or an image that none before had. All rounds
have the same trace: a second one is answered from the caches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from e2e.assembled import images, speech, wordings
from foveal_runtime.bench.result import RunResult
from foveal_runtime.bench.traces import Question, Trace

MOST_TOKENS = {"smollm2-audio": 16, "smollm2-vision": 64}


class Truths(NamedTuple):
    """`answers`: in the order of the trace; `is_right`: of a text and its answer."""

    trace: Trace
    answers: tuple[str, ...]
    is_right: Callable[[str, str], bool]

    def share(self, result: RunResult) -> float:
        """Of right answers in a result of this trace."""
        told = zip(result.texts, self.answers, strict=True)
        return sum(self.is_right(*pair) for pair in told) / len(self.answers)


def truths(model: str, seed: int, num_requests: int) -> Truths:
    """The same for the same arguments, but for the breath of espeak-ng's voices.
    Raises packages.Unavailable where there is no voice."""
    rng = random.Random(f"truths {seed}")
    num_items = max(1, num_requests // 3)
    if model == "smollm2-audio":
        clips = [speech.draw(rng, speech.HELD_OUT) for _ in range(num_items)]
        wording = wordings.TRAINED[0]
        known = [(wordings.messages(wording, clip.part()), clip.digits) for clip in clips]
        is_right = _is_said
    else:
        families, seed_of = images.LEARNT, f"truths {seed}"
        drawn = [images.held_out(family, seed_of, num_items) for family in families]
        samples = [drawn[item % len(families)][item] for item in range(num_items)]
        known = [(images.to_request(one, model)["messages"], one.verdict) for one in samples]
        is_right = images.is_right
    asked = [known[index % len(known)] for index in range(num_requests)]
    rng.shuffle(asked)
    return Truths(_trace(model, [messages for messages, _ in asked]),
                  tuple(answer for _, answer in asked), is_right)  # fmt: skip


def _is_said(text: str, digits: str) -> bool:
    return text.strip() == digits


def _trace(model: str, asked: Sequence[list[dict[str, Any]]]) -> Trace:
    conversations = tuple((Question((), "", messages=tuple(one)),) for one in asked)
    return Trace("truths", conversations, MOST_TOKENS[model])
