"""One sequence over all its attempts: what was emitted, how often it was lost; and the stream of
engine outputs for one attempt, filled by `link`.

Made by `client` for each request. Pure state; never sends anything.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.engines.routing import affinity_keys
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.mirror.messages import RequestId
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.plan.errors import EngineFailure, FovealError, RateLimited
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineOutput, RequestBody

MAX_LOSSES = 2
"""A request that is charged with the death of so many engines ends with an error. The requests of
an engine that died are all charged with it, until they make progress elsewhere (see quarantine)."""
MAX_REJECTIONS = 4
MAX_ATTEMPTS = 64
"""Whatever the reasons, and they may all be a bad network, this is enough: with the pauses between
them, about a minute of links that break as soon as they are up."""
MAX_PAUSE_SECONDS = 1.0

Fate = Literal["alive", "dead", "unknown", "awaited", "other", "guilty"]
"""Of an engine whose link broke: back with the same boot, gone for good, not known yet, or known
soon enough to wait for; dead of another request, or of this one and no other."""

Life = tuple[str, int]
"""(endpoint, boot) of an engine."""

INCOMPATIBLE = {
    "version_mismatch": "version_mismatch (incompatible: another version of the protocol; start "
    "frontends and engines again, from one image)",
    "ns_mismatch": "ns_mismatch (incompatible: the files of the model are not those that this "
    "frontend has read; start frontends and engines again, with the same files)",
}
"""Ends of a session that no time mends, in words for the log."""


class EngineRun:
    """One sequence over all its attempts."""

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request
        self.attempt = 0
        self.num_losses = 0
        self.num_deaths = 0
        self.suspects: dict[Life, float] = {}  # when each was lost
        self.awaiting: set[Life] = set()  # those of which it was to hear what they died of
        self.life: Life | None = None  # where it was sent last
        self.is_suspect = False
        self.num_proofs = 0
        self.rejections = 0
        self.emitted: list[int] = []
        self.has_first = False
        self.began = time.monotonic()
        self.avoid: set[str] = set()
        self.affinity = affinity_keys(
            request.token_ids, [item.mm_hash for item in request.items], request.cache_salt,
            b"" if request.lora is None else request.lora.digest,
        )  # fmt: skip

    @functools.cached_property
    def key(self) -> bytes:
        """What the request is: its tokens, media, adapter and options, but not its seed."""
        request = self.request
        found = hashlib.blake2b(digest_size=16)
        found.update(codec.pack_tokens(request.token_ids, wide=True)[0])
        for item in request.items:
            found.update(item.mm_hash)
        if request.lora is not None:
            found.update(request.lora.digest)
        found.update(msgspec.msgpack.encode(msgspec.structs.replace(request.sampling, seed=0)))
        return found.digest()

    @property
    def shape(self) -> str:
        """What an administrator may see of it: sizes, no content."""
        request = self.request
        counts = Counter(MODALITIES[item.modality] for item in request.items)
        items = "".join(f", {count} {name}" for name, count in sorted(counts.items()))
        return (
            f"{len(request.token_ids)} prompt tokens{items}, "
            f"max_tokens {request.sampling.max_tokens}"
        )

    def home(self, senders: Sequence[Sender]) -> bytes:
        """Hash of the largest item that none of the engines holds; empty when they hold all."""
        items = self.request.items
        new = [i for i in items if not any(s.believes(i.mm_hash) for s in senders)]
        return max(new, key=lambda i: (i.size_bytes, i.mm_hash)).mm_hash if new else b""

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
            key=self.key,
            on_trial=self.is_suspect,
            lora=request.lora,
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

    def count(self, stats: FrontendStats) -> None:
        """One query per item and request, whatever its number of sequences; a hit is an item that
        cost neither processor nor wire."""
        if self.request.tally.is_counted:
            return
        self.request.tally.is_counted = True
        for item in self.request.items:
            stats.mm_queries[item.modality] += 1
            if item.size_bytes:
                stats.value_bytes[item.modality].observe(item.size_bytes)
            if self.attempt and not (item.cost.was_processed or item.cost.was_sent):
                stats.mm_hits[item.modality] += 1

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

    def settle(self, fate_of: Callable[[EngineRun, Life, float], Fate]) -> bool:
        """Learns what became of the engines this request was lost on; True when it may go on.

        False: those it saw die and those it may have killed are as many as it may see die; ask
        again when more is known. Only deaths count, once each, however often a link breaks.
        Raises EngineFailure when too many died, or one of it alone, or after too many
        attempts for whatever reason.
        """
        is_awaited = False
        for life, lost_at in list(self.suspects.items()):
            fate = fate_of(self, life, lost_at)
            if fate == "guilty":
                raise EngineFailure(
                    "an engine died while this request was the only one that was new to it"
                )
            if fate not in ("unknown", "awaited"):
                del self.suspects[life]
                self.num_deaths += fate == "dead"
            is_awaited |= fate == "awaited"
        if not self.suspects and not self.num_deaths:
            self.is_suspect = False
        if self.num_deaths >= MAX_LOSSES:
            raise EngineFailure(f"{self.num_deaths} engines died while running this request")
        if self.attempt >= MAX_ATTEMPTS:
            raise EngineFailure(f"the request was interrupted {self.attempt} times")
        return not is_awaited and self.num_deaths + len(self.suspects) < MAX_LOSSES

    @property
    def pause_seconds(self) -> float:
        """Before the next attempt: none after one loss, then more and more."""
        if self.num_losses < 2:
            return 0.0
        return min(0.05 * 2.0 ** min(self.num_losses - 2, 10), MAX_PAUSE_SECONDS)


MAX_UNREAD = 1024
"""Outputs with log probabilities that may wait for a client that does not read them."""
MAX_UNREAD_PLAIN = 8192
"""The same without log probabilities, which are small: a client may pause for a minute."""


class Lost(NamedTuple):
    """The session of a request ended before the request did."""

    reason: str


class Rejected(NamedTuple):
    """The engine refused the request; `error`: why no value could be made, when that was it."""

    code: str
    error: FovealError | None


Event = EngineOutput | Lost | Rejected


def _ends(event: Event) -> bool:
    return not isinstance(event, EngineOutput) or bool(event.finish)


class Stream:
    """What comes back for one attempt of one request, in order."""

    __slots__ = ("_events", "_news", "request", "rid", "value_error")

    def __init__(self, rid: RequestId, request: PreparedRequest) -> None:
        self.rid = rid
        self.request = request
        self.value_error: FovealError | None = None
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()

    def push(self, event: Event) -> None:
        is_plain = self.request.sampling.logprobs < 0
        most = MAX_UNREAD_PLAIN if is_plain else MAX_UNREAD
        if len(self._events) >= most and not _ends(event):
            if len(self._events) > most:
                return
            what = "outputs" if is_plain else "outputs with log probabilities"
            why = f"{most} {what} were not read: the client is slow"
            event = EngineOutput(self.rid, finish="error", error=(RateLimited.code, why))
        self._events.append(event)
        self._news.set()

    async def next(self) -> Event:
        while not self._events:
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()
