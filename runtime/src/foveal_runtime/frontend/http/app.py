"""The HTTP application of one frontend process: routes, error answers, middleware.

main/ calls `build_app` with real collaborators, tests with those of testing/fake.py. Importing this
module loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from foveal_runtime.frontend.engines.debug import MirrorSource, build_debug_router
from foveal_runtime.frontend.grammars.compiler import Compiler
from foveal_runtime.frontend.http.access.admin import CacheAdmin, build_admin_router
from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.frontend.http.asgi.disconnect import CLIENT_DISCONNECT, ClientGone
from foveal_runtime.frontend.http.asgi.errors import (
    error_response,
    failure,
    http_exception_response,
    internal_error,
    validation_response,
)
from foveal_runtime.frontend.http.asgi.intake import Intake
from foveal_runtime.frontend.http.asgi.middleware import (
    CLIENT_CLOSED,
    LoadReport,
    RequestContext,
    RequireKey,
    allow_origins,
)
from foveal_runtime.frontend.http.injection import build_injection_router, injection_keys
from foveal_runtime.frontend.http.monitoring.health import Health
from foveal_runtime.frontend.http.monitoring.metrics import MetricsPage
from foveal_runtime.frontend.http.monitoring.metrics_source import text_source
from foveal_runtime.frontend.http.monitoring.request_stats import begin_at_zero, door_source
from foveal_runtime.frontend.http.openapi import describe
from foveal_runtime.frontend.http.routes import build_router
from foveal_runtime.frontend.http.service import Service, runtime_version
from foveal_runtime.frontend.items.injection import Injector
from foveal_runtime.frontend.items.seams import Generator, InputProcessor, PromptPlaceholders
from foveal_runtime.frontend.protocol.embeddings import checkpoint_pooling
from foveal_runtime.frontend.protocol.rules import SamplingDefaults
from foveal_runtime.frontend.text.chat_template import ChatTemplate, load_template
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.config import FrontendConfig, Pooling
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.telemetry.metrics import Metrics
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


def build_app(
    config: FrontendConfig,
    *,
    processor: InputProcessor,
    info: PromptPlaceholders,
    generator: Generator,
    tokenizer: TextTokenizer | None = None,
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
    tokenizer = tokenizer if tokenizer is not None else TextTokenizer.load(config.model.path)
    source = load_template(config.model.path, tokenizer)
    template = ChatTemplate(tokenizer, source, info, config.tool_format)
    gate = Gate(config.admission)
    health = Health(generator, processor, gate)
    metrics = _metrics(config, generator) if metrics is None else metrics
    begin_at_zero(metrics, runtime_version())
    metrics.add_source(door_source(gate, health, generator))
    grammars = Compiler(metrics)
    metrics.add_source(text_source(tokenizer, grammars))
    service = Service(
        config=config,
        tokenizer=tokenizer,
        template=template,
        processor=processor,
        generator=generator,
        defaults=SamplingDefaults.load(config.model.path),
        gate=gate,
        metrics=metrics,
        grammars=grammars,
        created=int(time.time()),
        pooling=_pooling(config),
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
    api.include_router(build_router(service, info, health, page))
    admin_keys = KeyFile(config.admin_key_file) if config.admin_key_file else None
    if admin is not None and admin_keys is not None:
        api.include_router(build_admin_router(admin, config.model.served_name))
    inject_keys = injection_keys(config)
    if injector is not None and inject_keys is not None:
        api.include_router(build_injection_router(injector, config))
    if mirrors is not None:
        api.include_router(build_debug_router(mirrors))
    describe(api, needs_key=keys is not None, with_page=config.page and config.task != "embed")
    _add_error_handlers(api)
    guarded = RequireKey(Intake(api, gate), keys, admin_keys, inject_keys)
    context = RequestContext(LoadReport(guarded, generator), gate, metrics, tracing or Tracing())
    asgi = allow_origins(context, config.allowed_origins)
    return HttpApp(asgi=asgi, api=api, service=service, gate=gate, health=health)


def _metrics(config: FrontendConfig, generator: Generator) -> Metrics:
    return Metrics(
        "frontend",
        model_name=config.model.served_name,
        process=config.frontend_id,
        max_model_len=generator.max_model_len() or config.model.max_model_len,
    )


def _pooling(config: FrontendConfig) -> Pooling:
    """Raises StartupError for a checkpoint that asks for what is not served."""
    if config.pooling or config.task == "generate":
        return config.pooling or "last"
    return checkpoint_pooling(config.model.path) or "last"


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(FovealError)
    async def foveal_error(request: Request, error: FovealError) -> Response:
        request.scope["foveal.error"] = error.code
        return error_response(request.scope, error)

    @api.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        request.scope["foveal.error"] = "invalid_request_error"
        return validation_response(request.scope, error)

    @api.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        request.scope["foveal.error"] = CLIENT_DISCONNECT
        return Response(status_code=CLIENT_CLOSED)

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Answers only; the framework raises the error again and intake.py logs it.
        body = internal_error(request.scope["foveal.request_id"])
        return failure(request.scope, body, 500)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return http_exception_response(request.scope, error)
