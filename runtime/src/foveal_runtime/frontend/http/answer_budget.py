"""The budget of an answer: what a frontend may come to hold of it, charged to the request's ticket.

Called by service.py once a prompt is known. What may wait for a client that reads nothing is
charged at admission; what a whole answer gathers beyond that is charged as it comes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from foveal_runtime.frontend.engines.stream import MAX_UNREAD
from foveal_runtime.frontend.http.access.admission import Ticket
from foveal_runtime.frontend.protocol.bounds import check_prompt_logprobs, tokens_with_scores
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest, CompletionRequest
from foveal_runtime.plan.sampling import SamplingParams

Hold = Callable[[int, int], None]
"""Called with so many tokens and log probabilities of an answer that is held until its end. Raises
RateLimited for log probabilities alone."""


def hold_nothing(num_tokens: int, num_scores: int) -> None:
    """For answers that go out as they come."""


def charge_answer(
    request: ChatCompletionRequest | CompletionRequest,
    ticket: Ticket,
    sampling: SamplingParams,
    num_tokens: int,
    num_prompts: int,
) -> tuple[SamplingParams, Hold]:
    """Of one of `num_prompts` prompts, which has `num_tokens`. Raises InvalidRequest or
    RateLimited."""
    num_choices = request.n or 1
    num_scores = check_prompt_logprobs(num_tokens * num_choices, sampling.prompt_logprobs)
    if not request.stream:
        given = request.max_tokens or getattr(request, "max_completion_tokens", None)
        max_tokens = tokens_with_scores(
            sampling.max_tokens, sampling.logprobs, num_choices * num_prompts,
            ticket.max_scores, is_given=given is not None,
        )  # fmt: skip
        least = min(sampling.min_tokens, max_tokens)
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=least)
    unread = num_choices * min(sampling.max_tokens, MAX_UNREAD)
    num_scores += unread * (sampling.logprobs + 1)
    ticket.charge_answer(unread, num_scores)
    return sampling, hold_nothing if request.stream else _holder(ticket, unread, num_scores)


def _holder(ticket: Ticket, first_tokens: int, first_scores: int) -> Hold:
    """Charges as much again whenever what was charged is used up."""
    left_tokens, left_scores = first_tokens, first_scores

    def hold(num_tokens: int, num_scores: int) -> None:
        nonlocal left_tokens, left_scores
        left_tokens -= num_tokens
        left_scores -= num_scores
        if left_tokens < 0:
            ticket.charge_answer(first_tokens - left_tokens, 0, has_begun=True)
            left_tokens = first_tokens
        if left_scores < 0:
            ticket.charge_answer(0, first_scores - left_scores, has_begun=True)
            left_scores = first_scores

    return hold
