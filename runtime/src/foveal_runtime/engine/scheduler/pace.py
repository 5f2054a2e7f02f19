"""The share of a step that others' prompts get beside streams, from what steps have taken.

Used by `planner` when the gap between two tokens has a target. Costs are moving averages of the
runner's own times, so they follow the machine, the context's length and the neighbours: a step of
decodes alone, a prompt token beside them, an encoder output of each modality. Knows no requests.
"""

from __future__ import annotations

import math

from foveal_runtime.engine.types.step import StepPlan, StepResult

_WEIGHT = 0.2
_LEAST_SHARE = 0.1
"""Of a mixed step's time, what its prompt tokens are taken to cost at least."""


class _Average:
    """A moving average that starts with its first value; None before that."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        before = self.value
        self.value = value if before is None else before + _WEIGHT * (value - before)


class Pace:
    """Costs of one engine's steps.

    Args:
        target_seconds: between two tokens of a stream.
        start_tokens: what a step may hold before anything was measured.
    """

    def __init__(self, target_seconds: float, start_tokens: int) -> None:
        self._target = target_seconds
        self._start_tokens = start_tokens
        self._decode = _Average()
        self._mixed = _Average()  # seconds of a step with prompt tokens, and how many it had
        self._num_prompt = _Average()
        self._embed: dict[int, _Average] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in how long a step took."""
        whole = sum(entry.num_embeds for entry in plan.encode)
        for modality in {entry.modality for entry in plan.encode}:
            average = self._embed.setdefault(modality, _Average())
            average.add(result.encode_seconds / max(whole, 1))
        if not plan.scheduled or result.forward_seconds <= 0:
            return
        num_prompt = plan.num_prompt_tokens
        if num_prompt == 0:
            self._decode.add(result.forward_seconds)
        else:
            self._mixed.add(result.forward_seconds)
            self._num_prompt.add(num_prompt)
            self._bound_decode(plan, (1 - _LEAST_SHARE) * result.forward_seconds)

    def _bound_decode(self, plan: StepPlan, most: float) -> None:
        """Streams alone take less than with a prompt beside them. While prompts queue no step is
        without one, so an average from slower times would stay, and prompts would crawl."""
        decode = self._decode.value
        if decode is None or most >= decode:
            return
        if any(entry.num_scheduled_tokens == 1 for entry in plan.scheduled):
            self._decode.add(most)

    @property
    def _token_seconds(self) -> float:
        """Of one prompt token beside streams; 0 before one was seen."""
        if self._mixed.value is None or self._num_prompt.value is None:
            return 0.0
        more = self._mixed.value - (self._decode.value or 0.0)
        return max(more, _LEAST_SHARE * self._mixed.value) / self._num_prompt.value

    @property
    def tokens(self) -> int:
        """Prompt tokens that fit beside the streams' own; 0 or less = none."""
        token = self._token_seconds
        if not token:
            return self._start_tokens
        return int((self._target - (self._decode.value or 0.0)) / token)

    def tokens_instead(self, num_embeds: int, modality: int) -> int:
        """Prompt tokens that take as long as so much encoding; 0 for a modality never seen."""
        average, token = self._embed.get(modality), self._token_seconds
        if average is None or average.value is None or not token:
            return 0
        return math.ceil(num_embeds * average.value / token)

    def embeds_instead(self, num_tokens: int, modality: int) -> int:
        """The other way round. 0 for a modality never seen: one item of it is encoded first."""
        average = self._embed.get(modality)
        if average is None or not average.value:
            return 0
        return int(num_tokens * self._token_seconds / average.value)
