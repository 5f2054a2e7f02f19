"""One sequence over all its attempts: what was emitted, how often it was lost.

Made by `client` for each request. Pure state; never sends anything.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from foveal_runtime.frontend.engines.routing import affinity_keys
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineOutput, RequestBody

MAX_LOSSES = 2
"""A request that is charged with the death of so many engines ends with an error. The requests of
an engine that died are all charged with it, until they get on elsewhere (see quarantine)."""
MAX_REJECTIONS = 4
MAX_ATTEMPTS = 64
"""Whatever the reasons, and they may all be a bad network, this is enough: with the pauses between
them, about a minute of links that break as soon as they are up."""
MAX_PAUSE_SECONDS = 1.0

Fate = Literal["alive", "dead", "unknown"]
"""Of an engine whose link broke: back with the same boot, gone for good, or not known yet."""


class EngineRun:
    """One sequence over all its attempts."""

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request
        self.attempt = 0
        self.num_losses = 0
        self.num_deaths = 0
        self.suspects: dict[tuple[str, int], float] = {}  # (endpoint, boot) → when it was lost
        self.is_suspect = False
        self.num_proofs = 0
        self.rejections = 0
        self.emitted: list[int] = []
        self.has_first = False
        self.began = time.monotonic()
        self.avoid: set[str] = set()
        self.affinity = affinity_keys(
            request.token_ids, [item.mm_hash for item in request.items], request.cache_salt
        )

    @functools.cached_property
    def key(self) -> bytes:
        """What the request is: its tokens, its media and its options, but not its seed."""
        request = self.request
        found = hashlib.blake2b(digest_size=16)
        found.update(codec.pack_tokens(request.token_ids, wide=True)[0])
        for item in request.items:
            found.update(item.mm_hash)
        found.update(msgspec.msgpack.encode(msgspec.structs.replace(request.sampling, seed=0)))
        return found.digest()

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

    def on_lost(self, endpoint: str, boot: int) -> None:
        """An attempt ended with its session. Why is not known yet: an engine that comes back with
        the same boot did not die, its link did."""
        self.num_losses += 1
        self.is_suspect = True
        self.suspects.setdefault((endpoint, boot), time.monotonic())

    def acquit(self) -> None:
        """It got on where it was tried again: the engines that died did so of something else."""
        self.is_suspect = False
        self.num_deaths = 0
        self.suspects.clear()

    def settle(self, fate_of: Callable[[str, int, float], Fate]) -> bool:
        """Learns what became of the engines this request was lost on; True when it may go on.

        False: those it saw die and those it may have killed are as many as it may see die; ask
        again when more is known. Only deaths count, once each, however often a link breaks.
        Raises EngineFailure when too many died, or after too many attempts for whatever reason.
        """
        for (endpoint, boot), lost_at in list(self.suspects.items()):
            fate = fate_of(endpoint, boot, lost_at)
            if fate != "unknown":
                del self.suspects[endpoint, boot]
                self.num_deaths += fate == "dead"
        if self.num_deaths >= MAX_LOSSES:
            raise EngineFailure(f"{self.num_deaths} engines died while running this request")
        if self.attempt >= MAX_ATTEMPTS:
            raise EngineFailure(f"the request was interrupted {self.attempt} times")
        return self.num_deaths + len(self.suspects) < MAX_LOSSES

    @property
    def pause_seconds(self) -> float:
        """Before the next attempt: none after one loss, then more and more."""
        if self.num_losses < 2:
            return 0.0
        return min(0.05 * 2.0 ** min(self.num_losses - 2, 10), MAX_PAUSE_SECONDS)
