"""POST /tokenize, POST /detokenize, GET /tokenizer_info: the tokenizer as the server uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute

from foveal_runtime.frontend.http.asgi.replies import until_disconnect
from foveal_runtime.frontend.http.chat import template_variables
from foveal_runtime.frontend.http.completions import prompt_ids
from foveal_runtime.frontend.http.service import RequestScope, Service, pages_of, scope_of
from foveal_runtime.frontend.items.prepared import MediaPart, PreparedRequest
from foveal_runtime.frontend.items.source import Page
from foveal_runtime.frontend.protocol.constraints import calls_of
from foveal_runtime.frontend.protocol.requests import (
    ChatCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from foveal_runtime.frontend.protocol.responses import (
    DetokenizeResponse,
    TokenizeResponse,
    TokenizerInfo,
)
from foveal_runtime.frontend.protocol.rules import check_salt
from foveal_runtime.plan.errors import ContextLengthExceeded, InvalidRequest
from foveal_runtime.wire.item import read_header


def build_token_router(
    service: Service, route_class: type[APIRoute], errors: dict[int | str, dict[str, Any]]
) -> APIRouter:
    router = APIRouter(route_class=route_class, tags=["tokens"])

    @router.post("/tokenize", response_model=TokenizeResponse, responses=errors)
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        """Token ids of a prompt, or of messages through the chat template, media expanded unless
        `expand_media` is false."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        token_ids = await prompt_tokens(service, body, request)
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=service.max_model_len(),
            tokens=token_ids,
            token_strs=await service.in_thread(lambda: service.tokenizer.tokens(token_ids))
            if body.return_token_strs
            else None,
        )

    @router.post("/detokenize", response_model=DetokenizeResponse, responses=errors)
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        """The text of token ids, special tokens included. At most four contexts' worth."""
        service.find_lora(body.model)
        limit = service.longest_text(truncates=True)
        if len(body.tokens) > limit:
            raise ContextLengthExceeded(
                f"tokens has {len(body.tokens)} entries; at most {limit} are taken", param="tokens"
            )
        scope_of(service, request).ticket.charge_tokens(len(body.tokens))
        largest = max(body.tokens, default=0)
        if largest >= service.tokenizer.vocab_size:
            raise InvalidRequest(
                f"tokens: {largest} is not a token id below {service.tokenizer.vocab_size}",
                param="tokens",
            )
        text = await service.in_thread(lambda: service.tokenizer.decode(body.tokens))
        return DetokenizeResponse(prompt=text)

    @router.get("/tokenizer_info", response_model=TokenizerInfo)
    async def tokenizer_info() -> TokenizerInfo:
        """The tokenizer's class, size, special tokens and chat template."""
        tokenizer = service.tokenizer
        found = tokenizer.special_tokens_map()
        names = {name: str(text) for name, text in found.items() if text is not None}
        return TokenizerInfo(
            tokenizer_class=type(tokenizer.hf).__name__,
            vocab_size=tokenizer.vocab_size,
            max_model_len=service.max_model_len(),
            chat_template=service.template.source,
            special_tokens=names,
            **{name: names.get(name) for name in ("bos_token", "eos_token", "pad_token")},
        )

    return router


async def prompt_tokens(
    service: Service,
    body: TokenizeRequest | ChatCompletionRequest,
    request: Request,
    *,
    charge: bool = True,
) -> list[int]:
    """Of a chat request, those that it would send. Raises FovealError. `charge`: the tokens count
    as this request's."""
    service.find_lora(body.model)
    check_salt(body.cache_salt)
    scope = scope_of(service, request)
    pages = await pages_of(service, body.messages or (), scope, body.cache_salt or "")
    token_ids, parts = await service.in_thread(lambda: _tokenize(service, body, pages))
    if charge:
        scope.ticket.charge_tokens(len(token_ids))
    if parts and getattr(body, "expand_media", None) is not False:
        work = _expand(service, body, scope, token_ids, parts)
        token_ids = await until_disconnect(request.receive, work)
    return token_ids


def _tokenize(
    service: Service,
    body: TokenizeRequest | ChatCompletionRequest,
    pages: Mapping[str, Sequence[Page]],
) -> tuple[list[int], list[MediaPart]]:
    limit = service.longest_text(truncates=True)
    variables = body.chat_template_kwargs
    if isinstance(body, ChatCompletionRequest):
        calls = calls_of(body)
        tools = calls.shown_plain() if calls is not None else []
        variables = template_variables(body, service.template)
    elif body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = prompt_ids(service, body.prompt, add_special_tokens=special, truncates=True)
        return ids, []
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    token_ids, conversation = service.tokenise(body, pages, limit, variables, tools)
    return token_ids, conversation.parts


async def _expand(
    service: Service,
    body: TokenizeRequest | ChatCompletionRequest,
    scope: RequestScope,
    token_ids: list[int],
    parts: list[MediaPart],
) -> list[int]:
    """The prompt as an engine would see it, through the same processing and caches."""
    options = scope.options(
        mm_processor_kwargs=body.mm_processor_kwargs or {}, cache_salt=body.cache_salt or ""
    )
    prepared = await service.processor.prepare(token_ids, parts, options)
    try:
        return await expanded(prepared)
    finally:
        for item in prepared.items:
            item.source.release()


async def expanded(prepared: PreparedRequest) -> list[int]:
    """Placeholders become what they stand for; one of an item that only engines hold is repeated
    as often as it counts."""
    out: list[int] = []
    begin = 0
    for index, which in prepared.placements:
        item = prepared.items[which]
        placeholder = prepared.token_ids[index]
        out += prepared.token_ids[begin:index]
        if item.meta is None:
            out.append(placeholder)
        elif item.is_held_only:
            out += [placeholder] * item.meta.num_tokens
        else:
            out += read_header(memoryview(await item.source.value())).replacement
        begin = index + 1
    return out + prepared.token_ids[begin:]
