"""The request table: requests in the engine, the queue they wait in, KV blocks, encoder outputs.

The base of `scheduler`; `planner` and `ahead` are handed it. The only place where a request enters,
leaves or loses everything, so that nothing it holds can be forgotten. Decides nothing about steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.caches.encoder_cache import EncoderCacheManager
from foveal_runtime.engine.caches.host_tier import HostTier
from foveal_runtime.engine.caches.prefix_cache import BlockHasher, CacheObserver
from foveal_runtime.engine.scheduler.outputs import Outbox
from foveal_runtime.engine.scheduler.snapshots import Snapshots
from foveal_runtime.engine.scheduler.window_blocks import WindowBlocks
from foveal_runtime.engine.types.drafts import Drafts
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request, Status
from foveal_runtime.engine.types.stats import EngineStats
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    EngineFailure,
    FovealError,
    InvalidRequest,
    MediaTooLarge,
    Overloaded,
    Unsupported,
)
from foveal_runtime.plan.media import MODALITIES, MMHash
from foveal_runtime.telemetry.ages import EvictionAges
from foveal_runtime.telemetry.ghosts import GhostLists

MAX_EVICTED = 8192
"""Encoder outputs of which it is remembered that they were evicted."""


class RequestTable:
    """Requests and what they hold, whether running, waiting or away.

    Args:
        clock: monotonic seconds.
        observer: hears of stored and removed blocks, for the event stream.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        traits: ModelTraits,
        *,
        clock: Callable[[], float],
        observer: CacheObserver | None = None,
    ) -> None:
        self.limits = limits
        self.traits = traits
        self.clock = clock
        self.stats = EngineStats()
        self.observer = observer
        self.outbox = Outbox(self.stats)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = PriorityQueue() if limits.policy == "priority" else WaitingQueue()
        removed = observer.block_removed if observer is not None else None
        self.pool = BlockPool(
            limits.num_blocks - 1,
            num_reserved=limits.num_reserved_blocks,
            on_removed=removed,
            ages=EvictionAges(clock),
        )
        self.windows: WindowBlocks | None = None
        if limits.num_window_blocks:
            sees_items = traits.bidirectional == "item"
            self.windows = WindowBlocks(limits, sees_items=sees_items, clock=clock)
        self.block_ghosts = GhostLists(self.pool.num_blocks, window=1 << 18)
        self.hasher = BlockHasher(limits.block_size, limits.namespace)
        self.encoder = EncoderCacheManager(
            limits.encoder_cache_embeds,
            host=HostTier(limits.encoder_host_bytes, traits.embed_bytes),
            eviction=limits.encoder_eviction,
            ages=EvictionAges(clock, remembered=MAX_EVICTED),
        )
        self.is_caching = (
            limits.prefix_caching
            and traits.bidirectional != "prompt"
            and (not traits.state_bytes or limits.num_snapshots > 0)
        )
        self.is_indivisible = limits.disable_chunked_mm_input or traits.bidirectional == "item"
        self.snapshots: Snapshots | None = None
        if self.is_caching and traits.state_bytes:
            self.snapshots = Snapshots(
                limits, is_indivisible=self.is_indivisible, clock=clock, observer=observer
            )
        self.away: dict[str, Request] = {}  # preempted, their values must come back first
        self.recalled: list[Request] = []  # those of them that nobody was asked for yet
        self.in_runner: set[str] = set()
        self.gone: list[str] = []  # requests the runner may forget
        self._sequence = 0

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            ContextLengthExceeded, MediaTooLarge, InvalidRequest, EngineFailure, Overloaded: it
                can never run here, or not now; nothing was changed.
        """
        assert request.request_id not in self.requests
        _check_request(request, self.limits, self.traits, len(self.waiting))
        self._sequence += 1
        request.sequence = self._sequence
        sampling = request.sampling
        room = self.limits.max_model_len - request.num_prompt_tokens
        request.output_limit_tokens = 1 if sampling.pooling else min(sampling.max_tokens, room)
        if self.limits.num_speculative_tokens:
            ends = self.traits.eos_token_ids
            request.drafts = Drafts(self.traits.vocab_size, ends, *self.limits.draft_match)
        if self.is_caching:
            self.hasher.extend(request, request.num_tokens)
        there = itertools.chain(self.running, self.waiting)
        if self.snapshots is not None:
            self.snapshots.meet(request, there)
        if self.windows is not None:
            self.windows.meet(request, there)
        self.requests[request.request_id] = request
        if request.num_output_tokens >= request.output_limit_tokens:
            # An earlier attempt had already made all its tokens.
            self.drop(request)
            self.outbox.finish(request, "length", self.clock())
            return
        self.waiting.push(request)

    def count_admission(self, request: Request, num_cached: int, num_known: int) -> None:
        """What it takes from the prefix cache, of the KV that was there."""
        if request.num_preemptions:
            return
        request.num_cached_tokens = num_cached
        request.admit_seconds = self.clock()
        if self.is_caching and request.read_prefix_cache:
            self.stats.num_prefix_query_tokens += request.num_prompt_tokens
            self.stats.num_prefix_hit_tokens += min(num_cached, request.num_prompt_tokens)
            self.stats.num_stateless_tokens += num_known - num_cached
            for entry in request.mm_inputs:
                place = entry.placeholder
                found = min(max(num_cached - place.offset, 0), place.length)
                self.stats.prefix_media_query_tokens[entry.modality] += place.length
                self.stats.prefix_media_hit_tokens[entry.modality] += found
            # Last blocks first, as they are evicted: a block is of no use without those before it.
            for block_hash in reversed(request.block_hashes):
                self.block_ghosts.query(block_hash, 1)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request without an output; None when it is unknown or already over."""
        request = self.requests.get(request_id)
        if request is None:
            request = self.away.pop(request_id, None)
            if request is None:
                return None
            self.requests[request_id] = request
        elif request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.drop(request)
        self.stats.finished["abort"] += 1
        return request

    def drop(self, request: Request) -> None:
        """Gives back everything a request holds. It must be in no queue any more."""
        self._release_blocks(request)
        self.encoder.free(request)
        if self.snapshots is not None:
            self.snapshots.close(request)
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        self._forget(request.request_id)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Of each pool."""
        if self.windows is None:
            return (self.pool.num_free_blocks,)
        return self.pool.num_free_blocks, self.windows.pool.num_free_blocks

    @property
    def kv_usage(self) -> float:
        """Part of the KV blocks that requests hold, of the pool that is fuller."""
        pools = [self.pool] if self.windows is None else [self.pool, self.windows.pool]
        return max(pool.num_used_blocks / pool.num_blocks for pool in pools)

    @property
    def prompts_are_short(self) -> bool:
        """Whether each prompt that is being computed, and the next to come, is text that one step
        beside streams may hold."""
        prompts = [request for request in self.running if not request.lacks_one_token]
        prompts += [self.waiting.head()] if len(self.waiting) else []
        most = self.limits.max_num_mixed_tokens
        return all(not one.mm_inputs and one.num_tokens <= most for one in prompts)

    def take_blocks(self, request: Request, count: int) -> None:
        """So many more of each pool, which has them."""
        request.block_ids.extend(self.pool.allocate(count))
        if self.windows is not None:
            self.windows.extend(request, count)

    def kv_too_small(self, request: Request) -> EngineFailure:
        return EngineFailure(
            f"the request has reached {request.num_tokens} tokens and needs more KV blocks than "
            f"this engine has ({self.pool.num_blocks} of {self.limits.block_size} tokens): "
            "give the engine more KV memory or lower max_model_len"
        )

    def _release_blocks(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        if self.windows is not None:
            self.windows.close(request)

    def _forget(self, request_id: str) -> None:
        """The runner keeps nothing of it, from the next plan on."""
        if request_id in self.in_runner:
            self.in_runner.remove(request_id)
            self.gone.append(request_id)

    def fail(self, request: Request, error: FovealError) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        if self.snapshots is not None:
            self.snapshots.close(request, is_valid=False)
        self.drop(request)
        self.outbox.error(request, error)

    def preempt(self, victim: Request) -> None:
        """Takes everything from a running request; it will be recomputed later."""
        self.running.remove(victim)
        self._release_blocks(victim)
        self.encoder.free(victim)
        if self.snapshots is not None:
            self.snapshots.close(victim)
        victim.num_computed = 0
        victim.step = -1
        victim.num_published = 0
        victim.is_withdrawn = False
        victim.next_mm = 0
        victim.known_to_runner = False
        self._forget(victim.request_id)
        victim.prompt_logprobs.clear()
        victim.status = Status.WAITING
        victim.num_preemptions += 1
        self.stats.num_preemptions += 1
        if victim.num_released:
            self.send_away(victim)
        else:
            self.waiting.push_back(victim)

    def send_away(self, request: Request) -> None:
        """It lacks values, and is in no queue until it has them."""
        del self.requests[request.request_id]
        self.away[request.request_id] = request
        self.recalled.append(request)

    def resume(self, request_id: str, values: Mapping[MMHash, memoryview]) -> None:
        """The values of a request that is away are here again: it waits for its turn."""
        request = self.away.pop(request_id)
        request.restore_values(values)
        self.requests[request_id] = request
        self.waiting.push_back(request)

    def take_recalled(self) -> list[Request]:
        """Requests that were preempted after their values were released, since the last call: each
        is away until `resume` brings the values back, or `abort` ends it."""
        recalled, self.recalled = self.recalled, []
        return [request for request in recalled if request.request_id in self.away]

    def check_integrity(self) -> None:
        """Asserts that all books agree with each other, between two steps."""
        waiting = list(self.waiting)
        live = [*self.running, *waiting]
        assert {entry.request_id for entry in live} == self.requests.keys()
        assert len(live) == len(self.requests)
        assert len(self.running) <= self.limits.max_num_seqs
        assert not self.away.keys() & self.requests.keys()
        for request in self.away.values():
            assert request.status is Status.WAITING
            assert request.num_released
            assert not request.block_ids
        for request in live:
            assert request.num_released == sum(not value for value in request.values)
            assert request.num_tokens == len(request.token_ids)
            assert request.num_computed <= request.num_tokens <= self.limits.max_model_len
            held = self.encoder.get_cached_input_ids(request)
            assert all(index >= request.next_mm for index in held)
        for request in self.running:
            assert request.status is Status.RUNNING
            blocks = -(-request.num_computed // self.limits.block_size)
            assert len(request.block_ids) >= blocks
            assert len(set(request.block_ids)) == len(request.block_ids)
        for request in waiting:
            assert request.status is Status.WAITING
            assert not request.num_released
            assert not request.block_ids
            assert not request.window_ids
            assert not request.pending
            assert not request.rolling
            assert not self.encoder.get_cached_input_ids(request)
        self.pool.check_integrity([request.block_ids for request in self.running])
        self.encoder.check_integrity(self.running)
        if self.windows is not None:
            self.windows.check_integrity(self.running)
        if self.snapshots is not None:
            self.snapshots.check_integrity(self.running)


def _check_request(
    request: Request, limits: SchedulerLimits, traits: ModelTraits, num_waiting: int
) -> None:
    """Raises the error of a request that can never run here, or not now; changes nothing."""
    prompt = request.num_prompt_tokens
    indivisible = limits.disable_chunked_mm_input or traits.bidirectional == "item"
    if request.sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if not traits.generates and not request.sampling.pooling:
        raise Unsupported("this model is an encoder: it embeds texts and generates none")
    if prompt < 1:
        raise InvalidRequest("the prompt is empty", param="messages")
    if prompt + request.sampling.least_outputs > limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {prompt} tokens after its media items are expanded; "
            f"this model's maximum context length is {limits.max_model_len} tokens, prompt and "
            "output together: shorten the prompt or send fewer or smaller media items",
            param="messages",
        )
    if request.num_tokens > limits.kv_tokens:
        raise EngineFailure(
            f"the request has {request.num_tokens} tokens and this engine's KV cache holds "
            f"{limits.kv_tokens}: give the engine more KV memory or lower max_model_len"
        )
    if traits.bidirectional == "prompt":
        _check_whole_prompt(request, limits)
    for entry, embeds in zip(request.mm_inputs, request.mm_embeds, strict=True):
        what = MODALITIES[entry.modality]
        if embeds > min(limits.encoder_cache_embeds, limits.encoder_compute_embeds):
            raise MediaTooLarge(
                f"this {what} needs {embeds} encoder outputs; the encoder cache holds "
                f"{limits.encoder_cache_embeds} and a step computes "
                f"{limits.encoder_compute_embeds}: send a smaller {what} or raise both",
                param="messages",
            )
        length = entry.placeholder.length
        if indivisible and length > limits.max_num_batched_tokens:
            raise MediaTooLarge(
                f"this {what} takes {length} tokens that are computed in one step; "
                f"max_num_batched_tokens is {limits.max_num_batched_tokens}: send a smaller "
                f"{what} or raise it",
                param="messages",
            )
    if num_waiting >= limits.max_waiting:
        raise Overloaded(f"{num_waiting} requests are waiting in this engine already")


def _check_whole_prompt(request: Request, limits: SchedulerLimits) -> None:
    prompt = request.num_prompt_tokens
    if prompt > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"this model computes a prompt in one step: {prompt} tokens are more than "
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}): shorten the prompt or "
            "raise it",
            param="messages",
        )
    pairs = zip(request.mm_inputs, request.mm_embeds, strict=True)
    embeds = sum({entry.mm_hash: count for entry, count in pairs}.values())
    most = min(limits.encoder_cache_embeds, limits.encoder_compute_embeds)
    if embeds > most:
        raise MediaTooLarge(
            f"this model computes a prompt in one step: its media need {embeds} encoder "
            f"outputs together and a step has {most}: send fewer or smaller items, or raise "
            "engine.maxNumEncoderInputTokens and caches.encoder.tokens",
            param="messages",
        )


class WaitingQueue:
    """First come, first served; a preempted request returns to its old place."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_back(self, request: Request) -> None:
        """Returns a preempted request to its place before all that arrived later."""
        # Victims are taken from the youngest to the oldest, so the front is the right place.
        self.push(request)
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]


class PriorityQueue(WaitingQueue):
    """Smaller priority first, then first come."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, str]] = []

    def push(self, request: Request) -> None:
        super().push(request)
        key = (request.priority, request.sequence, request.request_id)
        heapq.heappush(self._heap, key)

    def push_back(self, request: Request) -> None:
        self.push(request)  # its sequence has not changed

    def head(self) -> Request:
        while True:
            request = self._requests.get(self._heap[0][2])
            if request is not None:
                return request
            heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if len(self._heap) > 4 * len(self._requests) + 64:
            self._heap = [item for item in self._heap if item[2] in self._requests]
            heapq.heapify(self._heap)
        elif self._heap[0][2] == request.request_id:
            heapq.heappop(self._heap)
