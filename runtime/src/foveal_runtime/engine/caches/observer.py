"""Observer of cached KV blocks: the seam between `scheduler` and the event stream.

Implemented by `events`; called inside the step, so an implementation only takes notes.
"""

from __future__ import annotations

from typing import Protocol

from foveal_runtime.engine.caches.block_pool import BlockHash
from foveal_runtime.engine.caches.prefix_cache import BlockHasher
from foveal_runtime.engine.types.request import Request


class CacheObserver(Protocol):
    def block_stored(self, request: Request, index: int, hasher: BlockHasher) -> None:
        """The request's full block `index` can be shared from now on."""
        ...

    def block_removed(self, block_hash: BlockHash) -> None: ...

    def blocks_cleared(self) -> None: ...

    def state_stored(self, block_hash: BlockHash) -> None:
        """The recurrent state at that block's end can be continued from now on."""
        ...

    def state_removed(self, block_hash: BlockHash) -> None: ...
