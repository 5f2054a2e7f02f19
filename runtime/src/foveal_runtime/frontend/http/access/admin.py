"""Endpoints with keys of their own: administration, and injection of items processed elsewhere.

Administration of caches and LoRA adapters exists only with an admin key file; its paths are those
of other servers. Emptying a cache is never needed for correctness: it is for measurements and for
people who want content gone. Injection exists only when `injection.enabled`; its body is msgpack or
JSON of `items.injection.InjectedItems`, bounded by max_body_bytes. The middleware checks the keys.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.frontend.items.injection import Injector
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.errors import InvalidRequest, RateLimited, StartupError

Cache = Literal["mm", "encoder", "prefix", "quarantine"]
ADMIN_PATHS = frozenset(
    {
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/reset_prefix_cache",
        "/resize_ipc_cache",
        "/reset_quarantine",
        "/quarantine",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
MAX_BYTES = 1 << 50
LoraAction = Literal["load_lora", "unload_lora"]


class HeldRequest(BaseModel):
    """A kind of request that is refused: its key in hex and its sizes, no content."""

    key: str
    shape: str
    seconds_left: float


class QuarantineResponse(BaseModel):
    requests: list[HeldRequest]


class CacheAdmin(Protocol):
    """Implemented by main/ over the processor cache and the engine client."""

    async def reset_cache(self, cache: Cache) -> int:
        """Empties it in every process of this frontend and in every connected engine; entries in
        use stay until released. Returns the number of engines told."""
        ...

    def held_requests(self) -> list[HeldRequest]:
        """What is refused now because engines died of it."""
        ...

    async def resize_ipc_cache(self, size_bytes: int) -> int:
        """New capacity of every connected engine's value cache. Returns the number told; each keeps
        within its own bounds."""
        ...

    async def order_lora(self, action: LoraAction, name: str, path: str) -> int:
        """Loads or unloads an adapter in every connected engine. Returns how many did.

        Raises InvalidRequest with the engines' reasons, NoEngine where none answers."""
        ...


class ResizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int = Field(ge=0, le=MAX_BYTES, description="of each engine")


class ResizeResponse(BaseModel):
    bytes: int
    num_engines: int


class ResetResponse(BaseModel):
    cache: Cache
    num_engines: int


class LoadLoraRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1, max_length=256, description="what requests give as model")
    lora_path: str = Field(
        min_length=1, max_length=4096, description="the adapter's directory, where engines run"
    )


class UnloadLoraRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1, max_length=256)


class LoraResponse(BaseModel):
    lora_name: str
    num_engines: int


def build_admin_router(admin: CacheAdmin, served_name: str) -> APIRouter:
    router = APIRouter(tags=["administration"])

    @router.post("/reset_mm_cache")
    async def reset_mm_cache() -> ResetResponse:
        """Forgets processed media: the processor cache and every engine's value cache."""
        return ResetResponse(cache="mm", num_engines=await admin.reset_cache("mm"))

    @router.post("/reset_encoder_cache")
    async def reset_encoder_cache() -> ResetResponse:
        """Forgets encoder outputs in every engine."""
        return ResetResponse(cache="encoder", num_engines=await admin.reset_cache("encoder"))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> ResetResponse:
        """Forgets cached KV blocks in every engine."""
        return ResetResponse(cache="prefix", num_engines=await admin.reset_cache("prefix"))

    @router.post("/reset_quarantine")
    async def reset_quarantine() -> ResetResponse:
        """Takes requests again that engines died of: here at once, and at every other frontend as
        soon as the connected engines have passed it on."""
        return ResetResponse(cache="quarantine", num_engines=await admin.reset_cache("quarantine"))

    @router.get("/quarantine")
    async def quarantine() -> QuarantineResponse:
        """Requests that every frontend refuses now because engines died of them."""
        return QuarantineResponse(requests=admin.held_requests())

    @router.post("/resize_ipc_cache")
    async def resize_ipc_cache(body: ResizeRequest) -> ResizeResponse:
        """Resizes every connected engine's value cache until its next start; values in use stay
        until released. An engine keeps room for its largest request, and has no more than at its
        start, for which its memory is planned: see its foveal_cache_capacity_bytes."""
        told = await admin.resize_ipc_cache(body.bytes)
        return ResizeResponse(bytes=body.bytes, num_engines=told)

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadLoraRequest) -> LoraResponse:
        """Loads a LoRA adapter into every connected engine, until that engine's next start; 400
        with the reason where an engine cannot serve it."""
        if body.lora_name == served_name:
            raise InvalidRequest(
                f"LoRA adapter {body.lora_name!r}: the served model has this name already",
                param="lora_name",
            )
        done = await admin.order_lora("load_lora", body.lora_name, body.lora_path)
        return LoraResponse(lora_name=body.lora_name, num_engines=done)

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadLoraRequest) -> LoraResponse:
        """Takes a LoRA adapter from every connected engine. Requests that run with it end first."""
        done = await admin.order_lora("unload_lora", body.lora_name, "")
        return LoraResponse(lora_name=body.lora_name, num_engines=done)

    return router


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
