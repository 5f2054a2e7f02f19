"""The HTTP application of one frontend process: routes, error answers, middleware, and the OpenAPI
document as this server really behaves (errors in its own shape, streams, keys).

main/ calls `build_app` with real collaborators, tests with those of testing/fake.py. Importing this
module loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from foveal_runtime.frontend.engines.debug import MirrorSource, build_debug_router
from foveal_runtime.frontend.grammars.compiler import Compiler
from foveal_runtime.frontend.http.access.admin import (
    CacheAdmin,
    build_admin_router,
    build_injection_router,
    injection_keys,
)
from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.frontend.http.asgi.middleware import (
    CLIENT_CLOSED,
    Intake,
    LoadReport,
    RequestContext,
    RequireKey,
    allow_origins,
    without_last_slash,
)
from foveal_runtime.frontend.http.asgi.replies import (
    CLIENT_DISCONNECT,
    ClientGone,
    error_response,
    failure,
    http_exception_response,
    internal_error,
)
from foveal_runtime.frontend.http.body_route import Direct, refused_body
from foveal_runtime.frontend.http.monitoring.health import Health
from foveal_runtime.frontend.http.monitoring.metrics import MetricsPage
from foveal_runtime.frontend.http.monitoring.metrics_source import text_source
from foveal_runtime.frontend.http.monitoring.request_stats import begin_at_zero, door_source
from foveal_runtime.frontend.http.pages import page_response
from foveal_runtime.frontend.http.routes import add_routes
from foveal_runtime.frontend.http.service import Service
from foveal_runtime.frontend.items.injection import Injector
from foveal_runtime.frontend.items.interfaces import Generator, InputProcessor, PromptPlaceholders
from foveal_runtime.frontend.protocol.messages import check_variables
from foveal_runtime.frontend.protocol.responses import ChatCompletionChunk
from foveal_runtime.frontend.protocol.rules import SamplingDefaults
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.template_files import load_templates
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.embedder import Embedder, read_embedder
from foveal_runtime.plan.errors import FovealError, InvalidRequest, StartupError
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.startup import runtime_version
from foveal_runtime.telemetry.tracing import Tracing


@dataclass(slots=True)
class HttpApp:
    """`asgi` is what the server runs; `gate.draining = True` begins a shutdown."""

    asgi: ASGIApp
    api: FastAPI
    service: Service
    gate: Gate
    health: Health

    def close(self) -> None:
        """Ends the processes that this application started."""
        self.service.grammars.close()


def _check_variables(config: FrontendConfig) -> None:
    try:
        check_variables(config.request_defaults.chat_template_kwargs, (), False)
    except InvalidRequest as error:
        raise StartupError(f"request defaults: {error}") from error


def build_app(
    config: FrontendConfig,
    *,
    processor: InputProcessor,
    info: PromptPlaceholders,
    generator: Generator,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    admin: CacheAdmin | None = None,
    injector: Injector | None = None,
    siblings: Sequence[str] = (),
    mirrors: MirrorSource | None = None,
) -> HttpApp:
    """Reads tokenizer, chat template, sampling defaults and key files; raises StartupError.

    `siblings`: metrics peers that serve the same port.
    """
    _check_variables(config)
    tokenizer = TextTokenizer.load(config.model.path)
    sources = load_templates(config.model.path, tokenizer, config.chat_template)
    template = ChatTemplate(tokenizer, sources.default, info, config.tool_format, sources.tools)
    gate = Gate(config.admission)
    health = Health(generator, processor, gate)
    metrics = _metrics(config, generator) if metrics is None else metrics
    begin_at_zero(metrics)
    metrics.add_source(door_source(gate, health, generator))
    grammars = Compiler(metrics)
    metrics.add_source(text_source(tokenizer, grammars))
    service = Service(
        config=config,
        tokenizer=tokenizer,
        template=template,
        processor=processor,
        generator=generator,
        defaults=SamplingDefaults.load(config.model.path, config.request_defaults),
        gate=gate,
        metrics=metrics,
        grammars=grammars,
        created=int(time.time()),
        embedder=_embedder(config),
    )
    page = MetricsPage(metrics, config.metrics_peers, siblings)
    keys = KeyFile(config.api_key_file) if config.api_key_file else None
    api = FastAPI(
        title="Foveal",
        version=runtime_version(),
        description="OpenAI-compatible API of a multimodal model served by Foveal.",
        docs_url=None,
        redoc_url=None,
    )
    routes = add_routes(api.router, service, info, health, page)
    admin_keys = KeyFile(config.admin_key_file) if config.admin_key_file else None
    if admin is not None and admin_keys is not None:
        api.include_router(build_admin_router(admin, config.model.served_name))
    inject_keys = injection_keys(config)
    if injector is not None and inject_keys is not None:
        api.include_router(build_injection_router(injector, config))
    if mirrors is not None:
        api.include_router(build_debug_router(mirrors))
    describe(api, needs_key=keys is not None, with_page=config.page and config.task != "embed")
    _add_error_handlers(api, {route.path for route in routes if isinstance(route, Route)})
    guarded = RequireKey(Intake(Direct(api, routes), gate), keys, admin_keys, inject_keys)
    context = RequestContext(LoadReport(guarded, generator), gate, metrics, tracing or Tracing())
    asgi = without_last_slash(allow_origins(context, config.allowed_origins))
    return HttpApp(asgi=asgi, api=api, service=service, gate=gate, health=health)


def _metrics(config: FrontendConfig, generator: Generator) -> Metrics:
    return Metrics(
        "frontend",
        model_name=config.model.served_name,
        process=config.frontend_id,
        max_model_len=generator.max_model_len() or config.model.max_model_len,
    )


def _embedder(config: FrontendConfig) -> Embedder:
    """Raises StartupError for a checkpoint that asks for what is not served."""
    if config.task == "generate":
        return Embedder("last")
    return read_embedder(config.model.path, config.pooling)


def _add_error_handlers(api: FastAPI, known: Collection[str]) -> None:
    """`known` are the paths of the API."""

    @api.exception_handler(FovealError)
    async def foveal_error(request: Request, error: FovealError) -> Response:
        request.scope["foveal.error"] = error.code
        return error_response(request.scope, error)

    @api.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        return refused_body(request.scope, error)

    @api.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        request.scope["foveal.error"] = CLIENT_DISCONNECT
        return Response(status_code=CLIENT_CLOSED)

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Answers only; the framework raises the error again and the middleware logs it.
        body = internal_error(request.scope["foveal.request_id"])
        return failure(request.scope, body, 500)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return http_exception_response(request.scope, error, known)


_STREAMS = {
    "/v1/chat/completions": "ChatCompletionChunk",
    "/v1/completions": "Completion",
    "/v1/messages": "",
    "/v1/responses": "",
    "/v1/audio/transcriptions": "",
    "/v1/audio/translations": "",
}
"""The type of each event; "": many types."""
_OPEN_TAGS = frozenset({"server"})


def describe(api: FastAPI, *, needs_key: bool, with_page: bool) -> None:
    """Replaces `api.openapi` and adds /docs and, `with_page`, the chat at /."""
    derive = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _corrected(derive(), needs_key)
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return page_response("docs")

    if with_page:

        @api.get("/", include_in_schema=False)
        async def chat() -> HTMLResponse:
            return page_response("chat")


def _corrected(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    chunk = ChatCompletionChunk.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(chunk.pop("$defs", {}))
    schemas["ChatCompletionChunk"] = chunk
    for path, methods in document["paths"].items():
        for operation in methods.values():
            # The framework would answer 422 for bad bodies; this server answers 400.
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
            if path in _STREAMS:
                content = operation["responses"]["200"]["content"]
                named = {"$ref": f"#/components/schemas/{_STREAMS[path]}"}
                content["text/event-stream"] = {"schema": named if _STREAMS[path] else {}}
            if needs_key and not _OPEN_TAGS & set(operation.get("tags", ())):
                operation["security"] = [{"key": []}]
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document
