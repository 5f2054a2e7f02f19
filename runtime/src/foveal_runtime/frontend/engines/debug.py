"""Mirror state of this process, for comparison with what the engines hold.

`/debug/mirrors` is built by app.py when main/ hands it a source. Digests, counts and bytes only:
no content and no names of content. Never changes anything.
"""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3
from fastapi import APIRouter
from pydantic import BaseModel

from foveal_runtime.mirror.sender import Sender


class MirrorView(BaseModel):
    """One mirror. `digest`: hex BLAKE3 of the announced hashes in ascending order, equal to the
    engine's `mm_digest` when the two agree."""

    digest: str
    num_confirmed: int
    num_optimistic: int
    inflight_bytes: int
    num_requests: int

    @classmethod
    def of(cls, sender: Sender, num_requests: int) -> MirrorView:
        return cls(
            digest=blake3(b"".join(sorted(sender.confirmed))).hexdigest(),
            num_confirmed=len(sender.confirmed),
            num_optimistic=len(sender.optimistic),
            inflight_bytes=sender.inflight_bytes,
            num_requests=num_requests,
        )


MirrorSource = Callable[[], dict[str, MirrorView]]
"""Views by engine name; engines without a session are left out."""


class MirrorsResponse(BaseModel):
    """Each engine's digest under its name, and the whole views."""

    mirrors: dict[str, str]
    views: dict[str, MirrorView]


def build_debug_router(source: MirrorSource) -> APIRouter:
    router = APIRouter(tags=["debugging"])

    @router.get("/debug/mirrors")
    async def mirrors() -> MirrorsResponse:
        """What this process believes that each engine holds."""
        views = source()
        return MirrorsResponse(mirrors={n: v.digest for n, v in views.items()}, views=views)

    return router
