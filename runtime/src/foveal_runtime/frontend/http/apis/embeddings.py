"""POST /v1/embeddings: prompts to jobs that are pooled instead of continued, vectors to JSON."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from foveal_runtime.frontend.http.answer_budget import hold_nothing
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.asgi.disconnect import until_disconnect
from foveal_runtime.frontend.http.asgi.errors import json_response
from foveal_runtime.frontend.http.asgi.json_out import encode_json
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
from foveal_runtime.frontend.items.seams import MediaPart, PrepareOptions, PromptPlaceholders
from foveal_runtime.frontend.items.source import Page
from foveal_runtime.frontend.protocol.embeddings import EmbeddingList, EmbeddingRequest
from foveal_runtime.frontend.protocol.rules import check_extra, check_salt
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
        token_ids, parts = await service.in_thread(lambda: _conversation(service, request, pages))
        return [_job(service, request, scope, "messages", token_ids, parts)]
    assert request.input is not None
    prompts = prompts_of(request.input)
    truncates = request.truncate_prompt_tokens is not None
    is_single = len(prompts) == 1 and request.input != prompts

    def tokenise() -> list[tuple[str, list[int]]]:
        special = request.add_special_tokens is not False
        found = []
        for index, prompt in enumerate(prompts):
            name = "input" if is_single else f"input[{index}]"
            ids = prompt_ids(
                service, prompt, add_special_tokens=special, truncates=truncates, param=name
            )
            refuse_placeholders(info, ids, name)
            found.append((name, ids))
        return found

    num_chars = sum(len(prompt) for prompt in prompts)
    named = await service.in_thread(tokenise) if num_chars > THREAD_CHARS else tokenise()
    return [
        _job(service, request, scope, name, ids, (), f"-p{index}" if index else "")
        for index, (name, ids) in enumerate(named)
    ]


def _conversation(
    service: Service, request: EmbeddingRequest, pages: Mapping[str, Sequence[Page]]
) -> tuple[list[int], Sequence[MediaPart]]:
    conversation = service.template.render(
        request.messages or [],
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=bool(request.continue_final_message),
        variables=request.chat_template_kwargs,
        pages=pages,
    )
    limit = service.longest_text(truncates=request.truncate_prompt_tokens is not None)
    special = bool(request.add_special_tokens)
    ids = service.template.encode(conversation, add_special_tokens=special, limit=limit)
    return ids, conversation.parts


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
    limit, most = service.max_model_len(), request.truncate_prompt_tokens
    if most is not None:
        if parts:
            raise InvalidRequest(
                "truncate_prompt_tokens cannot be used with media: it would cut them off",
                param="truncate_prompt_tokens",
            )
        token_ids = token_ids[: limit if most < 0 else most]
    if not token_ids:
        raise InvalidRequest(f"{name} has no tokens", param=name)
    if len(token_ids) > limit:
        raise ContextLengthExceeded(
            f"{name} has {len(token_ids)} tokens; the model's context is {limit} tokens: send less "
            "text, or truncate_prompt_tokens",
            param=name,
        )
    scope.ticket.charge_tokens(len(token_ids))
    options = PrepareOptions(
        request_id=scope.unique_id + suffix,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, pooling=service.pooling),
        mm_processor_kwargs=request.mm_processor_kwargs or {},
        cache_salt=request.cache_salt or "",
        tenant=scope.tenant,
        priority=request.priority or 0,
        charge_media_bytes=scope.ticket.charge_media_bytes,
        client=scope.tenant.decode("latin-1") or scope.ticket.client,
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
                scope.ticket.charge_answer(0, num_values * len(jobs) // _SCORE_VALUES)
                is_charged = True
            tally.add(index, delta)
            found[index] = delta.embedding
    if not all(found):
        raise EngineFailure("an engine ended the request without an embedding")

    def encode() -> list[msgspec.Raw]:
        return [msgspec.Raw(encode_json(_entry(request, i, one))) for i, one in enumerate(found)]

    is_long = len(found) * len(found[0]) // 4 > _THREAD_VALUES
    return {
        "id": f"embd-{scope.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model or service.model_name,
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


def _entry(request: EmbeddingRequest, index: int, raw: bytes) -> dict[str, Any]:
    values = np.frombuffer(raw, "<f4")[: request.dimensions].astype(np.float64)
    if request.normalize is not False:
        values /= np.linalg.norm(values) or 1.0
    single = values.astype("<f4")
    as_text = request.encoding_format == "base64"
    shown = base64.b64encode(single.tobytes()).decode() if as_text else single.tolist()
    return {"object": "embedding", "index": index, "embedding": shown}
