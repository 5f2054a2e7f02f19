"""A first step before readiness, so that the user's first request is not the slow one.

Called by main/engine with a fresh runner: a prefill and a decode step on the first KV block, then
everything about them is forgotten. Touches no scheduler state.
"""

from __future__ import annotations

import logging
import time

from foveal_runtime.engine.limits import SchedulerLimits
from foveal_runtime.engine.step import ModelRunner, NewRequest, ScheduledRequest, StepPlan
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.sampling import SamplingParams

log = logging.getLogger(__name__)
NAME = "warm-up"


def warm_up(runner: ModelRunner, limits: SchedulerLimits) -> None:
    """Runs two steps of one text request. Raises StartupError when the model cannot do them."""
    started = time.perf_counter()
    num_tokens = min(limits.block_size - 1, limits.max_num_batched_tokens, limits.max_model_len - 2)
    request = NewRequest(NAME, [0] * num_tokens, num_tokens, (), (), SamplingParams(max_tokens=2))
    result = runner.execute(
        StepPlan(0, [request], [ScheduledRequest(NAME, 0, num_tokens, [1], True)])
    )
    if NAME not in result.failed:
        result = runner.execute(StepPlan(0, [], [ScheduledRequest(NAME, num_tokens, 1, [1], True)]))
    runner.execute(StepPlan(0, finished=[NAME]))
    if NAME in result.failed:
        raise StartupError(f"the model failed its first step: {result.failed[NAME]}")
    log.info("warmed up", extra={"seconds": round(time.perf_counter() - started, 2)})
