"""Administration over HTTP: emptying caches. Exists only with an admin key file.

The paths are those of other servers; the admin key is not the API key. Emptying a cache is never
needed for correctness: it is for measurements and for people who want content gone.
"""

from __future__ import annotations

from typing import Literal, Protocol

from fastapi import APIRouter
from pydantic import BaseModel

Cache = Literal["mm", "encoder", "prefix"]
ADMIN_PATHS = frozenset({"/reset_mm_cache", "/reset_encoder_cache", "/reset_prefix_cache"})


class CacheAdmin(Protocol):
    """Implemented by main/ over the processor cache and the engine client."""

    def reset_cache(self, cache: Cache) -> int:
        """Empties it here and in every connected engine; entries in use stay until released.
        Returns the number of engines told."""
        ...


class ResetResponse(BaseModel):
    cache: Cache
    num_engines: int


def build_admin_router(admin: CacheAdmin) -> APIRouter:
    router = APIRouter(tags=["administration"])

    @router.post("/reset_mm_cache")
    async def reset_mm_cache() -> ResetResponse:
        """Forgets processed media: the processor cache and every engine's value cache."""
        return ResetResponse(cache="mm", num_engines=admin.reset_cache("mm"))

    @router.post("/reset_encoder_cache")
    async def reset_encoder_cache() -> ResetResponse:
        """Forgets encoder outputs in every engine."""
        return ResetResponse(cache="encoder", num_engines=admin.reset_cache("encoder"))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> ResetResponse:
        """Forgets cached KV blocks in every engine."""
        return ResetResponse(cache="prefix", num_engines=admin.reset_cache("prefix"))

    return router
