"""The HTTP routes: thin functions between FastAPI and the handlers' modules.

`add_routes` is called by app.py. No logic here beyond picking streamed or whole answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast, get_type_hints

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope

from foveal_runtime.frontend.http import chat, completions
from foveal_runtime.frontend.http.apis.anthropic import build_messages_router
from foveal_runtime.frontend.http.apis.embeddings import build_embeddings_router
from foveal_runtime.frontend.http.apis.openai_responses import build_responses_router
from foveal_runtime.frontend.http.apis.transcription import build_transcription_router
from foveal_runtime.frontend.http.asgi.json_bodies import (
    LONG_BYTES,
    WHOLE_BYTES,
    decode_body,
    decode_json,
)
from foveal_runtime.frontend.http.asgi.replies import (
    json_response,
    named_relaxed,
    start_stream,
    until_disconnect,
)
from foveal_runtime.frontend.http.monitoring.health import Health
from foveal_runtime.frontend.http.monitoring.metrics import MetricsPage
from foveal_runtime.frontend.http.service import Service, scope_of
from foveal_runtime.frontend.http.tokens import build_token_router
from foveal_runtime.frontend.items.interfaces import PromptPlaceholders
from foveal_runtime.frontend.protocol.body_text import Body
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest, CompletionRequest
from foveal_runtime.frontend.protocol.responses import (
    ChatCompletion,
    Completion,
    ErrorResponse,
    HealthResponse,
    LoadResponse,
    MediaLimits,
    ModelCard,
    ModelList,
    VersionResponse,
)
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.media import MODALITIES, Modality
from foveal_runtime.telemetry.startup import runtime_version

_PARSED = b"{}"

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "the request is wrong; `param` names the field"},
    401: {"model": ErrorResponse, "description": "no valid API key"},
    403: {"model": ErrorResponse, "description": "media from there are not allowed"},
    404: {"model": ErrorResponse, "description": "no such model"},
    409: {"model": ErrorResponse, "description": "a uuid is bound to other content"},
    413: {"model": ErrorResponse, "description": "the body or a medium is too large"},
    424: {"model": ErrorResponse, "description": "a medium could not be fetched"},
    429: {"model": ErrorResponse, "description": "full; Retry-After says when to try again"},
    500: {"model": ErrorResponse, "description": "a failure of this server"},
    503: {"model": ErrorResponse, "description": "no engine, or shutting down; Retry-After"},
}


class _JsonRequest(Request):
    """A request whose JSON is parsed by msgspec: bodies hold megabytes of base64, so their bytes
    go once they are parsed."""

    def __init__(self, scope: Scope, receive: Receive, *, leaves_media: bool) -> None:
        super().__init__(scope, receive)
        size = self.headers.get("content-length", "")
        fits = size.isdecimal() and len(size) < 9 and LONG_BYTES < int(size) <= WHOLE_BYTES
        self._leaves_media = leaves_media and fits
        self._media_body: Body | None = None

    async def body(self) -> bytes:
        """The bytes; after they were parsed, no more than that there were some. They are gathered
        as they come: joining those of the largest body would hold the loop for 60 ms."""
        if hasattr(self, "_parsed"):
            return _PARSED
        if not hasattr(self, "_body"):
            gathered = bytearray()
            async for piece in self.stream():
                if not self._leaves_media:
                    gathered += piece
                    continue
                self._media_body = self._media_body or Body()
                if not self._media_body.add(piece):  # more than it was to be
                    gathered += self._media_body.content() + piece
                    self._media_body, self._leaves_media = None, False
            self._body = cast(bytes, gathered)
            if self._media_body is not None and self._media_body.size:
                self._body = _PARSED  # soon
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_parsed"):
            body = await self.body()
            if self._media_body is not None:
                self._parsed, self._media_body = decode_body(self._media_body), None
            elif len(body) > WHOLE_BYTES:
                self._parsed = await asyncio.to_thread(decode_json, body)
            else:
                self._parsed = decode_json(body)
            self._body = b""
        return self._parsed


class BodyRoute(APIRoute):
    """Reads and parses the body before FastAPI does, so that limits and syntax errors keep their
    own status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()
        model = _body_model(self.endpoint)

        async def handler(request: Request) -> Response:
            leaves_media = model is ChatCompletionRequest
            wrapped = _JsonRequest(request.scope, request.receive, leaves_media=leaves_media)
            if request.method == "POST" and await wrapped.body():
                value = await wrapped.json()
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if model and isinstance(value, dict) and kind == "application/json":
                    response: Response = await self.endpoint(_checked(model, value), wrapped)
                    return response
            return await inner(wrapped)

        return handler


def _body_model(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Of an endpoint that takes a body, the request and nothing else, and answers itself. It is
    called without FastAPI's search for what it may want, 7 % of a chat request."""
    hints = get_type_hints(endpoint)
    if list(hints) != ["body", "request", "return"] or hints["return"] is not Response:
        return None
    model: type[BaseModel] = hints["body"]
    return model


def _checked(model: type[BaseModel], value: dict[str, Any]) -> BaseModel:
    """Raises RequestValidationError, as FastAPI does."""
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in found]
        ) from error


def add_routes(
    router: APIRouter, service: Service, info: PromptPlaceholders, health: Health, page: MetricsPage
) -> None:
    router.route_class = BodyRoute
    _add_generation(router, service, info)
    _add_models(router, service, info)
    errors: dict[int | str, dict[str, Any]] = {
        status: ERRORS[status] for status in (400, 401, 403, 404, 413, 424, 429, 500, 503)
    }
    router.include_router(build_token_router(service, BodyRoute, errors))
    router.include_router(build_messages_router(service, BodyRoute, list(ERRORS)))
    router.include_router(build_responses_router(service, BodyRoute, ERRORS))
    router.include_router(build_embeddings_router(service, info, BodyRoute, ERRORS))
    router.include_router(build_transcription_router(service, ERRORS))
    _add_health(router, health, service)
    _add_metrics(router, page)


def _add_generation(router: APIRouter, service: Service, info: PromptPlaceholders) -> None:
    @router.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS, tags=["OpenAI"]
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation with text, images, video and audio. With `stream: true` the
        answer is text/event-stream."""
        run = await chat.plan_chat(service, body, scope_of(service, request))
        if body.stream:
            return named_relaxed(
                await start_stream(request.receive, chat.stream_answer(run)), run.relaxed
            )
        whole = await until_disconnect(request.receive, chat.whole_answer(run))
        return named_relaxed(json_response(whole), run.relaxed)

    @router.post("/v1/completions", response_model=Completion, responses=ERRORS, tags=["OpenAI"])
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several text prompts. Media belong to chat completions."""
        run = await completions.plan_completion(service, info, body, scope_of(service, request))
        if body.stream:
            stream = await start_stream(request.receive, completions.stream_answer(run))
            return named_relaxed(stream, run.relaxed)
        whole = await until_disconnect(request.receive, completions.whole_answer(run))
        return named_relaxed(json_response(whole), run.relaxed)


def _media_limits(service: Service, info: PromptPlaceholders) -> dict[Modality, MediaLimits]:
    found: dict[Modality, MediaLimits] = {}
    for modality in MODALITIES:
        limits: ModalityLimits = getattr(service.config.modalities, modality)
        if limits.max_per_prompt and info.placeholder_token_id(modality) is not None:
            found[modality] = MediaLimits(
                max_per_prompt=limits.max_per_prompt,
                max_bytes=limits.max_bytes,
                max_pixels=None if modality == "audio" else limits.max_pixels,
                max_seconds=None if modality == "image" else limits.max_seconds,
                max_pages=limits.max_pages if modality == "image" else None,
            )
    return found


def _add_models(router: APIRouter, service: Service, info: PromptPlaceholders) -> None:
    def card(name: str = "") -> ModelCard:
        """Of the served model, or of an adapter to it."""
        return ModelCard(
            id=name or service.model_name,
            created=service.created,
            root=service.model_name,
            parent=service.model_name if name else None,
            max_model_len=service.generator.max_model_len() or service.config.model.max_model_len,
            modalities=_media_limits(service, info),
        )

    @router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
    async def models() -> ModelList:
        """The served model, then its LoRA adapters."""
        return ModelList(data=[card(), *map(card, sorted(service.generator.loras()))])

    @router.get(
        "/v1/models/{model:path}", response_model=ModelCard, responses={404: ERRORS[404]},
        tags=["OpenAI"],
    )  # fmt: skip
    async def model_card(model: str) -> ModelCard:
        lora = service.find_lora(model)
        return card("" if lora is None else lora.name)

    @router.get("/version", response_model=VersionResponse, tags=["server"])
    async def version() -> VersionResponse:
        return VersionResponse(version=runtime_version())


def _add_health(router: APIRouter, health: Health, service: Service) -> None:
    unavailable: dict[int | str, dict[str, Any]] = {503: {"model": HealthResponse}}

    @router.get("/livez", response_model=HealthResponse, tags=["server"])
    async def livez() -> HealthResponse:
        """This process answers. Says nothing about engines."""
        return HealthResponse(status="ok")

    @router.get("/health", response_model=HealthResponse, responses=unavailable, tags=["server"])
    async def health_endpoint() -> Response:
        """A round trip to an engine that makes progress."""
        return _verdict(*await health.engine_answers())

    @router.get("/ping", response_model=HealthResponse, responses=unavailable, tags=["server"])
    @router.post("/ping", response_model=HealthResponse, responses=unavailable, tags=["server"])
    async def ping() -> Response:
        """The same as /health, by the name that some platforms ask for."""
        return _verdict(*await health.engine_answers())

    @router.get("/load", response_model=LoadResponse, tags=["server"])
    async def load() -> LoadResponse:
        """Requests that this process serves now, and what its engines last reported."""
        engines = service.generator.load()
        return LoadResponse(
            server_load=service.gate.num_requests,
            num_running=engines.num_running,
            num_waiting=engines.num_waiting,
            kv_usage=engines.kv_usage,
        )

    @router.get("/readyz", response_model=HealthResponse, responses=unavailable, tags=["server"])
    async def readyz() -> Response:
        """Traffic may come: engine session, model loaded, first image warm, not draining."""
        return _verdict(*health.ready())


def _add_metrics(router: APIRouter, page: MetricsPage) -> None:
    @router.get("/metrics", response_class=PlainTextResponse, tags=["server"])
    async def metrics(request: Request, own: bool = False) -> Response:
        """This process and its peers, as Prometheus text, or as OpenMetrics for those who accept
        it; `own` leaves the peers out."""
        return await page.response(request, own=own)


def _verdict(ok: bool, detail: str) -> Response:
    if ok:
        return json_response({"status": "ok", "detail": ""})
    return json_response({"status": "unavailable", "detail": detail}, 503, {"retry-after": "1"})
