"""The share of a step that others' prompts get beside streams, from what steps have taken.

Used by `planner` when the gap between two tokens has a target. Costs are moving averages of the
runner's own times, so they follow the machine, the context's length and the neighbours: a step of
decodes alone, a prompt token beside them, an encoder output of each modality. Knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.step import EncoderInput, StepPlan, StepResult

_WEIGHT = 0.2
_LEAST_SHARE = 0.1
"""Of a mixed step's time, what its prompt tokens are taken to cost at least."""
_LOOK_STEPS = 64
"""Mixed steps in a row after which one of streams alone is due: they may take longer by now."""
_FEW = 8
"""Short prompts that wait: beside more of them a step takes as many times what it takes for few."""
LEAST_SECONDS = 0.025
"""Without a target: what no reader notices, however fast streams alone are."""
MOST_SECONDS = 0.6
"""Without a target: a pause that throughput and first tokens are worth, and no longer one."""


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
        target_seconds: between two tokens of a stream; 0: a multiple of what a step of decodes
            alone takes, but LEAST_SECONDS, and never more than `start_tokens`.
        start_tokens: what a step may hold before anything was measured.
        growth, short: that multiple, at most MOST_SECONDS; and beside short prompts, or where
            MOST_SECONDS would be less.
    """

    def __init__(
        self, target_seconds: float, start_tokens: int, growth: float = 0.0, short: float = 0.0
    ) -> None:
        self._given = target_seconds
        self._growth = growth
        self._short_growth = short
        self._start_tokens = start_tokens
        self._decode = _Average()
        self._mixed = _Average()  # seconds of a step with prompt tokens, and how many it had
        self._num_prompt = _Average()
        self._embed: dict[int, _Average] = {}
        self._num_mixed = _LOOK_STEPS  # steps since the last one of decodes alone

    @classmethod
    def of(cls, limits: SchedulerLimits) -> Pace | None:
        """None where nothing but a number of tokens bounds a step beside streams."""
        if not limits.target_itl_seconds and not limits.mixed_growth:
            return None
        start = limits.max_num_mixed_tokens or limits.max_num_batched_tokens
        return cls(limits.target_itl_seconds, start, limits.mixed_growth, limits.short_growth)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in how long a step took."""
        whole = sum(entry.num_embeds for entry in plan.encode)
        for modality in {entry.modality for entry in plan.encode}:
            average = self._embed.setdefault(modality, _Average())
            average.add(result.encode_seconds / max(whole, 1))
        if not plan.scheduled or plan.slice_seconds:
            return  # no streams in it: neither what they take, nor what prompts do beside them
        num_prompt = plan.num_prompt_tokens
        self._num_mixed = self._num_mixed + 1 if num_prompt else 0
        if result.forward_seconds <= 0:
            return
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

    def _target(self, growth: float) -> float:
        decode = self._decode.value or 0.0
        most = min(growth * decode, MOST_SECONDS)
        return self._given or max(most, self._short_growth * decode, LEAST_SECONDS)

    @property
    def is_look_due(self) -> bool:
        """Whether the next step beside streams should be of streams alone: what they take is the
        bound, and nobody knows it."""
        return not self._given and self._num_mixed >= _LOOK_STEPS

    @property
    def _token_seconds(self) -> float:
        """Of one prompt token beside streams; 0 before one was seen."""
        if self._mixed.value is None or self._num_prompt.value is None:
            return 0.0
        more = self._mixed.value - (self._decode.value or 0.0)
        return max(more, _LEAST_SHARE * self._mixed.value) / self._num_prompt.value

    def tokens(self, *, are_short: bool = False, num_waiting: int = 0) -> int:
        """Prompt tokens that fit beside the streams' own; 0 or less = none.

        Args:
            are_short: all the prompts are: few of them cost little throughput when they are spread
                over more steps, where long ones and images would.
            num_waiting: prompts of which something is left to compute.
        """
        token = self._token_seconds
        if not token:
            return self._start_tokens
        target = self._target(self._growth)
        if are_short and not self._given:
            thin = self._target(self._short_growth)
            target = min(target, thin * max(num_waiting / _FEW, 1))
        fitting = int((target - (self._decode.value or 0.0)) / token)
        return fitting if self._given else min(fitting, self._start_tokens)

    def slice_seconds(self, inputs: Sequence[EncoderInput], num_tokens: int = 0) -> float:
        """How long streams may wait while `inputs` are encoded; 0 where that and so many prompt
        tokens after it are over in time."""
        target = self._target(self._growth)
        spare = target - (self._decode.value or 0.0)
        averages = [self._embed.get(entry.modality) for entry in inputs]
        costs = [0.0 if average is None else average.value or 0.0 for average in averages]
        whole = sum(entry.num_embeds * cost for entry, cost in zip(inputs, costs, strict=True))
        if all(costs) and whole + num_tokens * self._token_seconds <= spare:
            return 0.0
        return max(spare, _LEAST_SHARE * target)

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
