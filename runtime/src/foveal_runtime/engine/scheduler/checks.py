"""Checks of a request before the engine accepts it: each limit with both numbers.

Called by the request table when a request is added. A question: it changes nothing.
"""

from __future__ import annotations

from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    MediaTooLarge,
    Overloaded,
)
from foveal_runtime.plan.media import MODALITIES


def check_request(
    request: Request, limits: SchedulerLimits, traits: ModelTraits, num_waiting: int
) -> None:
    """Raises the error of a request that can never run here, or not now; changes nothing."""
    prompt = request.num_prompt_tokens
    indivisible = limits.disable_chunked_mm_input or traits.bidirectional == "item"
    if request.sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if prompt < 1:
        raise InvalidRequest("the prompt is empty", param="messages")
    if prompt + request.sampling.least_outputs > limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens after its media items are expanded; this model "
            f"takes at most {limits.max_model_len} tokens, prompt and output together: "
            "shorten the prompt or send fewer or smaller media items",
            param="messages",
        )
    if request.num_tokens > limits.kv_tokens:
        raise EngineFailure(
            f"the request has {request.num_tokens} tokens and this engine's KV cache holds "
            f"{limits.kv_tokens}: give the engine more KV memory or lower max_model_len"
        )
    if traits.bidirectional == "prompt":
        _check_whole_prompt(request, limits)
    for entry, embeds in zip(request.mm_inputs, request.mm_embeds, strict=True):
        what = MODALITIES[entry.modality]
        if embeds > min(limits.encoder_cache_embeds, limits.encoder_compute_embeds):
            raise MediaTooLarge(
                f"this {what} needs {embeds} encoder outputs; the encoder cache holds "
                f"{limits.encoder_cache_embeds} and a step computes "
                f"{limits.encoder_compute_embeds}: send a smaller {what} or raise both",
                param="messages",
            )
        length = entry.placeholder.length
        if indivisible and length > limits.max_num_batched_tokens:
            raise MediaTooLarge(
                f"this {what} takes {length} tokens that are computed in one step; "
                f"max_num_batched_tokens is {limits.max_num_batched_tokens}: send a smaller "
                f"{what} or raise it",
                param="messages",
            )
    if num_waiting >= limits.max_waiting:
        raise Overloaded(f"{num_waiting} requests are waiting in this engine already")


def _check_whole_prompt(request: Request, limits: SchedulerLimits) -> None:
    prompt = request.num_prompt_tokens
    if prompt > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"this model computes a prompt in one step: {prompt} tokens are more than "
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}): shorten the prompt or "
            "raise it",
            param="messages",
        )
    pairs = zip(request.mm_inputs, request.mm_embeds, strict=True)
    embeds = sum({entry.mm_hash: count for entry, count in pairs}.values())
    most = min(limits.encoder_cache_embeds, limits.encoder_compute_embeds)
    if embeds > most:
        raise MediaTooLarge(
            f"this model computes a prompt in one step: its media need {embeds} encoder "
            f"outputs together and a step has {most}: send fewer or smaller items, or raise "
            "engine.maxNumEncoderInputTokens and caches.encoder.tokens",
            param="messages",
        )
