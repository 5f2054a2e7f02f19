"""The next step of a batch that only decodes, planned before this step's tokens are known.

Used by `scheduler` for a loop that keeps the device busy: while it computes step n, step n + 1 is
planned and submitted, and the runner reads the missing tokens on the device. Only what is certain
is planned: every running request goes on by one token, unless it is about to reach its length.
Anything else (prompts, encoders, a queue that could move, no free blocks, options that need the
text so far) is left to a usual pass, after the result. A request that ends by what step n says has
then been computed one token too far: that token is dropped, and its blocks are written by the
device before any request that gets them next.
"""

from __future__ import annotations

from foveal_runtime.engine.scheduler.book import Roster
from foveal_runtime.engine.scheduler.planner import Planner
from foveal_runtime.engine.types.request import Request, Status
from foveal_runtime.engine.types.step import ScheduledRequest, StepPlan
from foveal_runtime.plan.sampling import SamplingParams


class Ahead:
    """See the module. `plan`, then the running step's update, then `adopt`."""

    def __init__(self, roster: Roster, planner: Planner) -> None:
        self._roster = roster
        self._planner = planner

    def plan(self, running: StepPlan) -> StepPlan | None:
        """The step after `running`, whose result is not in yet; None when it must be waited for."""
        roster = self._roster
        if running.encode or roster.encoder.has_moves or roster.recalled:
            return None
        if not all(entry.sample for entry in running.scheduled):
            return None
        going_on = []
        for request in roster.running:
            if request.step != running.step or needs_text(request.sampling):
                return None
            if request.num_output_tokens + 1 < request.output_limit_tokens:
                going_on.append(request)
        if (
            not going_on
            or self._planner.may_admit(len(going_on))
            or not self._take_blocks(going_on)
        ):
            return None
        self._planner.step += 1
        take = roster.snapshots.take if roster.snapshots is not None else lambda *_: 0
        scheduled = [
            ScheduledRequest(
                r.request_id, r.num_tokens, 1, r.block_ids, True, take(r, r.num_tokens + 1)
            )
            for r in going_on
        ]
        gone, roster.gone = roster.gone, []
        return StepPlan(self._planner.step, scheduled=scheduled, finished=gone)

    def adopt(self, plan: StepPlan) -> None:
        """After the update of the step before: who is still running takes part in `plan`."""
        self._planner.encoding.clear()  # what the step before encoded
        for entry in plan.scheduled:
            request = self._roster.requests.get(entry.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # ended, or lost its blocks to another's failure
            assert request.num_computed == entry.num_computed_tokens == request.num_tokens - 1
            request.step = plan.step

    def _take_blocks(self, requests: list[Request]) -> bool:
        """A block for each who needs one for its next token; nothing when there are too few."""
        pool, size = self._roster.pool, self._roster.limits.block_size
        short = [r for r in requests if r.num_tokens >= len(r.block_ids) * size]
        if len(short) > pool.num_free_blocks:
            return False
        for request in short:
            request.block_ids.extend(pool.allocate(1))
        return True


def needs_text(sampling: SamplingParams) -> bool:
    """Whether a token depends on which tokens came before, not only on how many."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.grammar)
        or any(len(word) > 1 for word in sampling.bad_words)
    )
