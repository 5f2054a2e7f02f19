"""The HTTP routes: thin functions between FastAPI and the handlers' modules.

`add_routes` is called by app.py. No logic here beyond picking streamed or whole answers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from foveal_runtime.frontend.http import chat, completions
from foveal_runtime.frontend.http.apis.anthropic import build_messages_router
from foveal_runtime.frontend.http.apis.embeddings import build_embeddings_router
from foveal_runtime.frontend.http.apis.openai_responses import build_responses_router
from foveal_runtime.frontend.http.apis.transcription import build_transcription_router
from foveal_runtime.frontend.http.asgi.replies import (
    json_response,
    named_relaxed,
    start_stream,
    until_disconnect,
)
from foveal_runtime.frontend.http.body_route import BodyRoute
from foveal_runtime.frontend.http.monitoring.health import Health
from foveal_runtime.frontend.http.monitoring.metrics import MetricsPage
from foveal_runtime.frontend.http.service import Service, scope_of
from foveal_runtime.frontend.http.tokens import build_token_router
from foveal_runtime.frontend.items.interfaces import PromptPlaceholders
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

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "the request is wrong; `param` names the field"},
    401: {"model": ErrorResponse, "description": "no valid API key"},
    403: {"model": ErrorResponse, "description": "media from there are not allowed"},
    404: {"model": ErrorResponse, "description": "no such model"},
    408: {"model": ErrorResponse, "description": "the body arrived too slowly"},
    409: {"model": ErrorResponse, "description": "a uuid is bound to other content"},
    413: {"model": ErrorResponse, "description": "the body or a medium is too large"},
    422: {"model": ErrorResponse, "description": "engines died of it: refused for ten minutes"},
    424: {"model": ErrorResponse, "description": "a medium could not be fetched"},
    429: {"model": ErrorResponse, "description": "full; Retry-After says when to try again"},
    500: {"model": ErrorResponse, "description": "a failure of this server"},
    503: {"model": ErrorResponse, "description": "no engine, or shutting down; Retry-After"},
}


def add_routes(
    router: APIRouter, service: Service, info: PromptPlaceholders, health: Health, page: MetricsPage
) -> list[BaseRoute]:
    """Returns them all, those of included routers among them."""
    router.route_class = BodyRoute
    _add_generation(router, service, info)
    _add_models(router, service, info)
    errors: dict[int | str, dict[str, Any]] = {
        status: ERRORS[status] for status in (400, 401, 403, 404, 408, 413, 424, 429, 500, 503)
    }
    included = (
        build_token_router(service, BodyRoute, errors),
        build_messages_router(service, BodyRoute, list(ERRORS)),
        build_responses_router(service, BodyRoute, ERRORS),
        build_embeddings_router(service, info, BodyRoute, ERRORS),
        build_transcription_router(service, ERRORS),
    )
    for one in included:
        router.include_router(one)
    _add_health(router, health, service)
    _add_metrics(router, page)
    return [route for one in (router, *included) for route in one.routes]


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
            display_name=name or service.model_name,
            created=service.created,
            created_at=datetime.fromtimestamp(service.created, UTC),
            root=service.model_name,
            parent=service.model_name if name else None,
            max_model_len=service.generator.max_model_len() or service.config.model.max_model_len,
            modalities=_media_limits(service, info),
        )

    @router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
    async def models() -> ModelList:
        """The served model, then its LoRA adapters."""
        cards = [card(), *map(card, sorted(service.generator.loras()))]
        return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)

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
