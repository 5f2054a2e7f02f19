"""A first step before readiness, so that the user's first request is not the slow one.

Called by main/engine with a fresh runner: a prefill and a decode step on the first KV block, then
everything about them is forgotten. Touches no scheduler state.
"""

from __future__ import annotations

from foveal_runtime.engine.types.step import (
    TRASH_BLOCK,
    ModelRunner,
    NewRequest,
    ScheduledRequest,
    StepPlan,
)
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.sampling import SamplingParams

NAME = "warm-up"


def warm_up(runner: ModelRunner, block_size: int) -> None:
    """Runs two steps of one text request. Raises StartupError when the model cannot do them."""
    num_tokens = max(1, block_size - 1)
    request = NewRequest(NAME, [0] * num_tokens, num_tokens, (), (), SamplingParams(max_tokens=2))
    blocks = [TRASH_BLOCK + 1] * 2  # one block is enough; a second entry serves block size 1
    prefill = ScheduledRequest(NAME, 0, num_tokens, blocks, True)
    result = runner.execute(StepPlan(0, [request], [prefill]))
    if NAME not in result.failed:
        decode = ScheduledRequest(NAME, num_tokens, 1, blocks, True)
        result = runner.execute(StepPlan(0, [], [decode]))
    runner.execute(StepPlan(0, finished=[NAME]))
    if NAME in result.failed:
        raise StartupError(f"the model failed its first step: {result.failed[NAME]}")
