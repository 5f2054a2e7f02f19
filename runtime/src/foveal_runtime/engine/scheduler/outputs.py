"""Outputs of the scheduler about requests, as the messages that frontends receive.

Used by `scheduler`; emptied by `core`, which groups by session. Turns step results into
EngineOutputs and takes the times of a request's stages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.stats import EngineStats
from foveal_runtime.engine.types.step import Sampled
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.wire.messages import EngineOutput, FirstOutput, TokenLogprobs

MESSAGE_SCORES = 1 << 16
"""Log probabilities of prompts after which a message goes out: 5 ms of a frontend's time."""


class Outbox:
    """Outputs in order, until somebody takes them."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._outputs: list[tuple[Request, EngineOutput]] = []

    def take(self) -> list[tuple[Request, EngineOutput]]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def token(
        self, request: Request, sampled: Sampled, finish: str, stop_token: int | None, now: float
    ) -> None:
        """One new token; `finish` when it is the last."""
        first = None
        if request.first_seconds == 0.0:
            request.first_seconds = now
            first = _first_output(request)
            self._stats.num_prompt_tokens += first.num_prompt_tokens
            self._stats.num_cached_prompt_tokens += first.num_cached_tokens
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.logprobs >= 0:
            logprobs = (
                TokenLogprobs(sampled.logprob, sampled.rank, sampled.top_ids, sampled.top_logprobs),
            )
        output = EngineOutput(request.rid, (sampled.token_id,), finish, stop_token, first, logprobs)
        self._outputs.append((request, output))
        if finish:
            self._observe_end(request, finish, now)

    def embedding(self, request: Request, values: bytes, now: float) -> None:
        """The end of a request that wanted no tokens."""
        request.first_seconds = now
        first = _first_output(request)
        self._stats.num_prompt_tokens += first.num_prompt_tokens
        self._stats.num_cached_prompt_tokens += first.num_cached_tokens
        output = EngineOutput(request.rid, finish="stop", first=first, embedding=values)
        self._outputs.append((request, output))
        self._observe_end(request, "stop", now)

    def finish(self, request: Request, finish: str, now: float) -> None:
        """The end without a new token."""
        first = _first_output(request) if request.first_seconds == 0.0 else None
        self._outputs.append((request, EngineOutput(request.rid, (), finish, None, first)))
        self._observe_end(request, finish, now)

    def error(self, request: Request, error: FovealError) -> None:
        """The end by an error of this request alone."""
        output = EngineOutput(request.rid, finish="error", error=(error.code, error.message))
        self._outputs.append((request, output))
        self._stats.finished["error"] += 1
        self._stats.errors[error.code] += 1

    def _observe_end(self, request: Request, finish: str, now: float) -> None:
        self._stats.finished[finish] += 1
        self._stats.observed.residence_seconds.observe(now - request.arrival_seconds)
        self._stats.observed.preemptions.observe(request.num_preemptions)


def in_messages(outputs: Iterable[EngineOutput]) -> Iterator[list[EngineOutput]]:
    """Outputs by the message they go in: one with many scores of prompts is read in one piece, and
    stops a frontend for as long."""
    part: list[EngineOutput] = []
    num_scores = 0
    for output in outputs:
        part.append(output)
        prompt = output.first.prompt_logprobs if output.first is not None else ()
        num_scores += sum(1 + len(one.top_ids) for one in prompt if one is not None)
        if num_scores >= MESSAGE_SCORES:
            yield part
            part, num_scores = [], 0
    if part:
        yield part


def _first_output(request: Request) -> FirstOutput:
    prompt_ids, wide = b"", False
    prompt = request.num_prompt_tokens
    if request.echo_prompt:
        ids = request.token_ids[:prompt]
        wide = max(ids) > 0xFFFF
        packed = array("I" if wide else "H", ids)
        prompt_ids = packed.tobytes()
    admitted = request.admit_seconds or request.arrival_seconds
    logprobs = _prompt_logprobs(request)
    return FirstOutput(
        num_prompt_tokens=prompt,
        num_cached_tokens=min(request.num_cached_tokens, prompt),
        num_mm_items=len(request.mm_inputs),
        num_mm_hits=request.num_mm_hits,
        num_encoder_hits=request.num_encoder_hits,
        queue_seconds=max(admitted - request.arrival_seconds, 0.0),
        prefill_seconds=max(request.first_seconds - admitted, 0.0),
        prompt_token_ids=prompt_ids,
        prompt_wide=wide,
        prompt_logprobs=logprobs,
        prompt_logprob_ids=tuple(request.token_ids[:prompt]) if logprobs else (),
        num_encoded=request.num_encoded,
    )


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...]:
    """One entry per prompt token; the first has nothing before it, hence None."""
    if request.sampling.prompt_logprobs < 0:
        return ()
    entries: list[TokenLogprobs | None] = [None] * request.num_prompt_tokens
    for part in request.prompt_logprobs:
        for index, logprob in enumerate(part.logprobs):
            position = part.start + 1 + index
            if position < len(entries):
                entries[position] = TokenLogprobs(
                    logprob, part.ranks[index], part.top_ids[index], part.top_logprobs[index]
                )
    request.prompt_logprobs.clear()
    return tuple(entries)
