"""The injection endpoint: items processed elsewhere, over HTTP, under a key of their own.

Exists only when `injection.enabled`; `app.build_app` mounts it, `intake.RequireKey` checks its key.
The body is msgpack or JSON of `injection.InjectedItems`; it is bounded by max_body_bytes, and only
a few bodies are held at a time.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import BaseModel

from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.frontend.items.injection import Injector
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.errors import RateLimited, StartupError

INJECTION_PATH = "/v1/media/items"
MAX_BODIES = 4


class InjectionResponse(BaseModel):
    """`stored`: items kept by this process; `sent`: those an engine took, known to everyone."""

    stored: int
    sent: int


def injection_keys(config: FrontendConfig) -> KeyFile | None:
    """The injectors' keys, None when injection is off. Raises StartupError without a key file."""
    if not config.injection.enabled:
        return None
    if not config.injection.api_key_file:
        raise StartupError("injection.enabled needs injection.api_key_file")
    return KeyFile(config.injection.api_key_file)


def build_injection_router(injector: Injector, config: FrontendConfig) -> APIRouter:
    router = APIRouter(tags=["media"])
    bodies = asyncio.Semaphore(MAX_BODIES)

    @router.post(INJECTION_PATH)
    async def inject(request: Request) -> InjectionResponse:
        """Stores preprocessed media items; requests name them by `uuid`."""
        if bodies.locked():
            raise RateLimited(f"{MAX_BODIES} injections are under way already")
        tenant = b""
        if config.tenant_salt_header:
            tenant = request.headers.get(config.tenant_salt_header, "").encode()
        async with bodies:
            body = await request.body()
            content_type = request.headers.get("content-type", "")
            items = await asyncio.to_thread(injector.read_payload, body, content_type)
            return InjectionResponse(**injector.store_payload(items, tenant))

    return router
