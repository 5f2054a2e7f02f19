"""POST /v1/embeddings: prompts to jobs that are pooled instead of continued, vectors to JSON."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from foveal_runtime.frontend.http.access.admission import hold_nothing
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.asgi.json_bodies import encode_json
from foveal_runtime.frontend.http.asgi.replies import json_response, until_disconnect
from foveal_runtime.frontend.http.completions import prompt_ids, prompts_of, refuse_placeholders
from foveal_runtime.frontend.http.service import (
    THREAD_CHARS,
    Job,
    RequestScope,
    Service,
    open_run,
    pages_of,
    scope_of,
)
from foveal_runtime.frontend.items.interfaces import PromptPlaceholders
from foveal_runtime.frontend.items.prepared import MediaPart
from foveal_runtime.frontend.protocol.requests import EmbeddingRequest
from foveal_runtime.frontend.protocol.responses import EmbeddingList
from foveal_runtime.frontend.protocol.rules import check_extra, check_salt, check_truncates
from foveal_runtime.plan.errors import ContextLengthExceeded, EngineFailure, InvalidRequest
from foveal_runtime.plan.sampling import SamplingParams

_AT_A_TIME = 128
"""Inputs of one request that are on their way."""
_THREAD_VALUES = 50_000
_SCORE_VALUES = 8
"""Values of embeddings that take about as much memory as one log probability."""


def build_embeddings_router(
    service: Service,
    info: PromptPlaceholders,
    route_class: type[APIRoute],
    errors: dict[int | str, dict[str, Any]],
) -> APIRouter:
    router = APIRouter(route_class=route_class, tags=["OpenAI"])

    @router.post("/v1/embeddings", response_model=EmbeddingList, responses=errors)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embeds texts, or one conversation with images, video and audio. Needs a server that was
        started with `--task embed` or `both`."""
        scope = scope_of(service, request)
        jobs = await _plan(service, info, body, scope)
        answer = await until_disconnect(request.receive, _answer(service, body, scope, jobs))
        return json_response(answer)

    return router


async def _plan(
    service: Service, info: PromptPlaceholders, request: EmbeddingRequest, scope: RequestScope
) -> list[Job]:
    """Everything that can be refused before media are touched."""
    service.check_task("embed")
    service.find_lora(request.model)
    check_extra(request.model_extra or {}, service.config.ignore_unknown_options)
    check_salt(request.cache_salt)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("send either input or messages", param="input")
    if request.messages is not None:
        pages = await pages_of(service, request.messages, scope, request.cache_salt or "")
        limit = service.longest_text(truncates=request.truncate_prompt_tokens is not None)
        work = functools.partial(
            service.tokenise, request, pages, limit, request.chat_template_kwargs, generates=False
        )
        token_ids, conversation = await service.in_thread(work)
        return [_job(service, request, scope, "messages", token_ids, conversation.parts)]
    assert request.input is not None
    prompts = prompts_of(request.input)
    truncates = request.truncate_prompt_tokens is not None
    most = _most_tokens(service, request)
    is_single = len(prompts) == 1 and request.input != prompts

    def tokenise() -> list[tuple[str, list[int]]]:
        special = request.add_special_tokens is not False
        found = []
        for index, prompt in enumerate(prompts):
            name = "input" if is_single else f"input[{index}]"
            ids = prompt_ids(
                service, prompt, add_special_tokens=special, truncates=truncates, param=name,
                most=most or 0,
            )  # fmt: skip
            refuse_placeholders(info, ids, name)
            found.append((name, ids))
        return found

    num_chars = sum(len(prompt) for prompt in prompts)
    named = await service.in_thread(tokenise) if num_chars > THREAD_CHARS else tokenise()
    return [
        _job(service, request, scope, name, ids, (), f"-p{index}" if index else "")
        for index, (name, ids) in enumerate(named)
    ]


def _most_tokens(service: Service, request: EmbeddingRequest) -> int | None:
    """What `truncate_prompt_tokens` leaves of an input; None: all of it."""
    size = request.truncate_prompt_tokens
    return service.max_model_len() if size is not None and size < 0 else size


def _job(
    service: Service,
    request: EmbeddingRequest,
    scope: RequestScope,
    name: str,
    token_ids: list[int],
    parts: Sequence[MediaPart],
    suffix: str = "",
) -> Job:
    """Raises InvalidRequest or RateLimited."""
    limit, most = service.max_model_len(), _most_tokens(service, request)
    if most is not None and not (parts and request.truncate_prompt_tokens == -1):
        check_truncates(parts)
        token_ids = token_ids[:most]
    if not token_ids:
        raise InvalidRequest(f"{name} has no tokens", param=name)
    if len(token_ids) > limit:
        raise ContextLengthExceeded(
            f"{name} has {len(token_ids)} tokens; the model's context is {limit} tokens: send less "
            "text, or truncate_prompt_tokens",
            param=name,
        )
    scope.ticket.charge_tokens(len(token_ids))
    options = scope.options(
        suffix,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, pooling=service.embedder.pooling),
        mm_processor_kwargs=request.mm_processor_kwargs or {},
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        lora=service.find_lora(request.model),
    )
    return Job(
        token_ids=token_ids,
        parts=parts,
        options=options,
        num_choices=1,
        stops=(),
        include_stop=False,
        skip_special_tokens=True,
        continues_prompt=False,
        hold=hold_nothing,
    )


async def _answer(
    service: Service, request: EmbeddingRequest, scope: RequestScope, jobs: Sequence[Job]
) -> dict[str, Any]:
    tally = Tally()
    found: list[bytes] = [b""] * len(jobs)
    is_charged = False
    async with open_run(service, jobs, scope.started, "embeddings", _AT_A_TIME) as deltas:
        async for index, delta in deltas:
            if delta.embedding and not is_charged:
                num_values = _check_size(request, len(delta.embedding) // 4)
                num_scores = num_values * len(jobs) // _SCORE_VALUES
                if num_scores > scope.ticket.max_scores:
                    raise InvalidRequest(
                        f"input: {len(jobs)} embeddings of {num_values} values are more than the "
                        f"{scope.ticket.max_scores * _SCORE_VALUES} values that this server holds: "
                        "send fewer inputs at a time",
                        param="input",
                    )
                scope.ticket.charge_answer(0, num_scores)
                is_charged = True
            tally.add(index, delta)
            found[index] = delta.embedding
    if not all(found):
        raise EngineFailure("an engine ended the request without an embedding")

    def encode() -> list[msgspec.Raw]:
        normalizes = service.embedder.normalizes
        entries = (_entry(request, i, one, normalizes=normalizes) for i, one in enumerate(found))
        return [msgspec.Raw(encode_json(entry)) for entry in entries]

    is_long = len(found) * len(found[0]) // 4 > _THREAD_VALUES
    return {
        **service.head(f"embd-{scope.request_id}", "list", request.model),
        "data": await service.in_thread(encode) if is_long else encode(),
        "usage": tally.usage(),
    }


def _check_size(request: EmbeddingRequest, num_values: int) -> int:
    if (request.dimensions or 0) > num_values:
        raise InvalidRequest(
            f"dimensions is {request.dimensions}; this model's embeddings have {num_values}",
            param="dimensions",
        )
    return num_values


def _entry(
    request: EmbeddingRequest, index: int, raw: bytes, *, normalizes: bool
) -> dict[str, Any]:
    values = np.frombuffer(raw, "<f4")[: request.dimensions].astype(np.float64)
    if normalizes if request.normalize is None else request.normalize:
        values /= np.linalg.norm(values) or 1.0
    single = values.astype("<f4")
    as_text = request.encoding_format == "base64"
    shown = base64.b64encode(single.tobytes()).decode() if as_text else single.tolist()
    return {"object": "embedding", "index": index, "embedding": shown}
