"""One sequence over all its attempts: what was emitted, how often it was lost.

Made by engine_client for each request. Pure state; never sends anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from foveal_runtime.frontend.prepared import PreparedRequest
from foveal_runtime.frontend.routing import affinity_keys
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineOutput, RequestBody

MAX_LOSSES = 4
"""A request that lost this many engines may be what kills them: it ends with an error."""
MAX_ATTEMPTS = 32
"""Whatever the reasons, and they may all be a bad network, this is enough."""


class EngineRun:
    """One sequence over all its attempts."""

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request
        self.attempt = 0
        self.lost_on: list[tuple[str, int]] = []
        self.rejections = 0
        self.emitted: list[int] = []
        self.has_first = False
        self.is_counted = False
        self.began = time.monotonic()
        self.avoid: set[str] = set()
        self.affinity = affinity_keys(
            request.token_ids, [item.mm_hash for item in request.items], request.cache_salt
        )

    def body(self) -> RequestBody:
        request = self.request
        wide = max(request.token_ids + self.emitted, default=0) > 0xFFFF
        return RequestBody(
            token_ids=codec.pack_tokens(request.token_ids, wide=wide)[0],
            wide=wide,
            placements=tuple(request.placements),
            sampling=request.sampling,
            emitted=codec.pack_tokens(self.emitted, wide=wide)[0],
            priority=request.priority,
            cache_salt=request.cache_salt,
            read_prefix_cache=request.read_prefix_cache,
            echo_prompt=request.echo_prompt and not self.has_first,
            arrival_seconds=time.monotonic() - self.began,
        )

    def take(self, output: EngineOutput) -> EngineOutput:
        """Remembers what was emitted; `first` is told once."""
        self.emitted.extend(output.token_ids)
        if output.first is None:
            return output
        if self.has_first:
            return msgspec.structs.replace(output, first=None)
        self.has_first = True
        return output

    def on_lost(self, endpoint: str, boot: int, boot_of: Callable[[str], int]) -> None:
        """An attempt ended with its session. Raises EngineFailure when too many engines died.

        `boot_of` gives the boot of a connected engine, 0 of others. An engine that is back with the
        same boot did not die: its link did.
        """
        self.lost_on.append((endpoint, boot))
        deaths = sum(boot_of(where) != then for where, then in self.lost_on)
        if deaths >= MAX_LOSSES:
            raise EngineFailure(f"{deaths} engines were lost while running this request")
        if self.attempt >= MAX_ATTEMPTS:
            raise EngineFailure(f"the request was interrupted {self.attempt} times")
