"""Decides what each step computes, and takes in what it brought.

Used by `core`: `add`, `schedule`, `update`, `take_outputs`. There are no phases: each step lets a
request's num_computed catch up with its num_tokens, whether those are prompt, recomputed or new;
chunked prefill, prefix hits and preemption are that one rule. Pure Python over counts and ids:
never touches tensors, sockets or threads; the clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveal_runtime.engine.block_pool import BlockPool
from foveal_runtime.engine.encoder_cache import EncoderCacheManager
from foveal_runtime.engine.encoder_window import Window, plan_window
from foveal_runtime.engine.host_tier import HostTier
from foveal_runtime.engine.limits import SchedulerLimits
from foveal_runtime.engine.observer import CacheObserver
from foveal_runtime.engine.outputs import Outbox
from foveal_runtime.engine.prefix_cache import BlockHasher, cut_to_groups, max_hit_blocks
from foveal_runtime.engine.request import Request, Status
from foveal_runtime.engine.stats import EngineStats
from foveal_runtime.engine.step import (
    EncoderInput,
    ModelTraits,
    NewRequest,
    Sampled,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from foveal_runtime.engine.waiting import make_queue
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    EngineFailure,
    FovealError,
    InvalidRequest,
    MediaTooLarge,
    Overloaded,
)
from foveal_runtime.plan.media import MODALITIES, MMHash
from foveal_runtime.wire.messages import EngineOutput

_MAX_IDLE_PASSES = 2


class _Pass:
    """One schedule() in the making."""

    __slots__ = ("blocked", "compute_left", "encode", "new", "num_preempted", "scheduled",
                 "step", "tokens_left")  # fmt: skip

    def __init__(self, step: int, tokens: int, compute: int) -> None:
        self.step = step
        self.tokens_left = tokens
        self.compute_left = compute
        self.scheduled: dict[str, ScheduledRequest] = {}
        self.new: dict[str, NewRequest] = {}
        self.encode: dict[MMHash, EncoderInput] = {}
        self.blocked: Request | None = None
        self.num_preempted = 0


class Scheduler:
    """State of all requests of one engine.

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
        stats: EngineStats | None = None,
        observer: CacheObserver | None = None,
    ) -> None:
        self.limits = limits
        self.traits = traits
        self.stats = stats or EngineStats()
        self.step = 0
        self.running: list[Request] = []
        self.waiting = make_queue(limits.policy)
        self._requests: dict[str, Request] = {}
        self._clock = clock
        self._observer = observer
        removed = observer.block_removed if observer is not None else None
        self.pool = BlockPool(limits.num_blocks - 1, on_removed=removed)
        self.hasher = BlockHasher(limits.block_size, limits.namespace)
        host = HostTier(limits.encoder_host_bytes, traits.embed_bytes)
        self.encoder = EncoderCacheManager(
            limits.encoder_cache_embeds, host=host, eviction=limits.encoder_eviction
        )
        self._outbox = Outbox(self.stats)
        self._caching = limits.prefix_caching and traits.bidirectional != "prompt"
        self._indivisible = limits.disable_chunked_mm_input or traits.bidirectional == "item"
        self._whole_prompt = traits.bidirectional == "prompt"
        self._eos = frozenset(traits.eos_token_ids)
        self._in_runner: set[str] = set()
        self._gone: list[str] = []  # requests the runner may forget
        self._sequence = 0
        self._first: Request | None = None  # got nothing in the last pass: goes first in this one
        self._idle_passes = 0
        # The head could not get blocks while so many were free; more must come free first.
        self._stuck_head: tuple[str, int] = ("", 0)
        self._encoding: dict[MMHash, str] = {}  # of the step in flight: for whom

    # ---- requests come and go -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A request is unfinished, or the runner has something to be told."""
        return bool(self._requests) or bool(self._gone) or self.encoder.has_moves

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            ContextLengthExceeded, MediaTooLarge, InvalidRequest, EngineFailure, Overloaded: it
                can never run here, or not now; nothing was changed.
        """
        assert request.request_id not in self._requests
        self._check(request)
        self._sequence += 1
        request.sequence = self._sequence
        sampling = request.sampling
        room = self.limits.max_model_len - request.num_prompt_tokens
        request.output_limit_tokens = min(sampling.max_tokens, room)
        if self._caching:
            self.hasher.extend(request, request.num_tokens)
        self._requests[request.request_id] = request
        if request.num_output_tokens >= request.output_limit_tokens:
            # An earlier attempt had already made all its tokens.
            self._drop(request)
            self._outbox.finish(request, "length", self._clock())
            return
        self.waiting.push(request)

    def _check(self, request: Request) -> None:
        limits, prompt = self.limits, request.num_prompt_tokens
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if prompt < 1:
            raise InvalidRequest("the prompt is empty", param="messages")
        if prompt >= limits.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens after its media items are expanded; this model "
                f"takes at most {limits.max_model_len} tokens, prompt and output together: "
                "shorten the prompt or send fewer or smaller media items",
                param="messages",
            )
        if request.num_tokens > limits.kv_tokens:
            raise EngineFailure(
                f"the request has {request.num_tokens} tokens and this engine's KV cache holds "
                f"{limits.kv_tokens}: give the engine more KV memory or lower max_model_len"
            )
        if self._whole_prompt:
            self._check_whole_prompt(request)
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
            if self._indivisible and length > limits.max_num_batched_tokens:
                raise MediaTooLarge(
                    f"this {what} takes {length} tokens that are computed in one step; "
                    f"max_num_batched_tokens is {limits.max_num_batched_tokens}",
                    param="messages",
                )
        if len(self.waiting) >= limits.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting in this engine already")

    def _check_whole_prompt(self, request: Request) -> None:
        limits, prompt = self.limits, request.num_prompt_tokens
        if prompt > limits.max_num_batched_tokens:
            raise InvalidRequest(
                f"this model computes a prompt in one step: {prompt} tokens are more than "
                f"max_num_batched_tokens ({limits.max_num_batched_tokens})",
                param="messages",
            )
        pairs = zip(request.mm_inputs, request.mm_embeds, strict=True)
        embeds = sum({entry.mm_hash: count for entry, count in pairs}.values())
        most = min(limits.encoder_cache_embeds, limits.encoder_compute_embeds)
        if embeds > most:
            raise MediaTooLarge(
                f"this model computes a prompt in one step: its media need {embeds} encoder "
                f"outputs together and a step has {most}",
                param="messages",
            )

    def abort(self, request_id: str) -> Request | None:
        """Ends a request without an output; None when it is unknown or already over."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._drop(request)
        self.stats.count_finished("abort")
        return request

    def _drop(self, request: Request) -> None:
        """Gives back everything a request holds. It must be in no queue any more."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        self.encoder.free(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]
        if request.request_id in self._in_runner:
            self._in_runner.remove(request.request_id)
            self._gone.append(request.request_id)
        if self._first is request:
            self._first = None

    def _fail(self, request: Request, error: FovealError) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        self._drop(request)
        self._outbox.error(request, error)

    # ---- one pass -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's plan; empty (`num_tokens` 0, nothing to move) when nobody wants one."""
        self.step += 1
        limits = self.limits
        now = _Pass(self.step, limits.max_num_batched_tokens, limits.encoder_compute_embeds)
        first, self._first = self._first, None
        if first is not None and first.status is Status.RUNNING:
            self._continue(first, now)
        elif first is not None and len(self.waiting) and self.waiting.head() is first:
            self._admit_waiting(now, limit=1)
        self._continue_running(now)
        if not now.num_preempted:
            self._admit_waiting(now)
        self._first = now.blocked
        self._watch_progress(now)
        return self._finish_pass(now)

    def _continue_running(self, now: _Pass) -> None:
        """Gives each running request its tokens, in order. The common case, one more token and a
        block that has room, is inlined: it is most of the work of most steps."""
        size, step, scheduled = self.limits.block_size, now.step, now.scheduled
        at = 0
        while at < len(self.running) and now.tokens_left > 0:
            request = self.running[at]
            if request.step == step:
                at += 1
                continue
            computed = request.num_computed
            if (
                request.num_tokens - computed == 1
                and computed < len(request.block_ids) * size
                and request.next_mm == len(request.mm_inputs)
            ):
                request.step = step
                now.tokens_left -= 1
                scheduled[request.request_id] = ScheduledRequest(
                    request.request_id, computed, 1, request.block_ids, True
                )
                at += 1
                continue
            self._continue(request, now)
            # Preemption may have shortened the list before this place or removed the request.
            if at < len(self.running) and self.running[at] is request:
                at += 1
            elif request.status is Status.RUNNING:
                at = self.running.index(request) + 1

    def _continue(self, request: Request, now: _Pass) -> None:
        """Schedules more of a running request; preempts others, or itself, for blocks."""
        window = self._window(request, request.num_computed, now)
        if window is None:
            return
        if window.num_tokens == 0:
            now.blocked = now.blocked or request
            return
        while True:
            need = self._blocks_to_add(request, request.num_computed + window.num_tokens)
            if need <= self.pool.num_free_blocks:
                break
            victim = self._victim()
            if victim is request and len(self.running) == 1:
                self._fail(request, self._kv_too_small(request))
                return
            self._preempt(victim, now)
            if victim is request:
                return
        self._commit(request, request.num_computed, window, need, now)

    def _window(self, request: Request, start: int, now: _Pass) -> Window | None:
        """How far the request may go from `start`; None when it had to be failed."""
        num_tokens = min(request.num_tokens - start, now.tokens_left)
        if self._whole_prompt and start + num_tokens < request.num_prompt_tokens:
            return Window(0)
        if request.next_mm == len(request.mm_inputs):
            return Window(num_tokens)
        window = plan_window(
            request, start, num_tokens, self.encoder, now.compute_left,
            indivisible=self._indivisible,
        )  # fmt: skip
        if window.bad_item is not None:
            known = self.encoder.known_embeds(request.mm_inputs[window.bad_item].mm_hash)
            text = (
                f"media item {window.bad_item} stands for {request.mm_embeds[window.bad_item]} "
                f"encoder outputs here and for {known} under the same key elsewhere"
            )
            self._fail(request, EngineFailure(text))
            return None
        if self._whole_prompt and start + window.num_tokens < request.num_prompt_tokens:
            return Window(0)
        return window

    def _blocks_to_add(self, request: Request, num_tokens: int) -> int:
        have = len(request.block_ids)
        return max(-(-num_tokens // self.limits.block_size) - have, 0)

    def _victim(self) -> Request:
        """Who gives way: the last to come, or the last of the least important."""
        if self.limits.policy == "priority":
            return max(self.running, key=lambda entry: (entry.priority, entry.sequence))
        return self.running[-1]  # nobody overtakes, so this is the youngest

    def _preempt(self, victim: Request, now: _Pass | None) -> None:
        """Takes everything from a running request; it will be recomputed later."""
        self.running.remove(victim)
        self.pool.release(victim.block_ids)
        self.encoder.free(victim)
        if now is not None:
            undone = now.scheduled.pop(victim.request_id, None)
            if undone is not None:
                now.tokens_left += undone.num_scheduled_tokens
            now.new.pop(victim.request_id, None)
            now.num_preempted += 1
        victim.block_ids = []
        victim.num_computed = 0
        victim.step = -1
        victim.num_published = 0
        victim.next_mm = 0
        victim.known_to_runner = False
        victim.prompt_logprobs.clear()
        victim.status = Status.WAITING
        victim.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push_back(victim)

    def _admit_waiting(self, now: _Pass, limit: int | None = None) -> None:
        while (
            len(self.waiting)
            and now.tokens_left > 0
            and len(self.running) < self.limits.max_num_seqs
            and (limit is None or limit > 0)
        ):
            if not self._admit(self.waiting.head(), now):
                break
            limit = None if limit is None else limit - 1

    def _admit(self, request: Request, now: _Pass) -> bool:
        """Starts (or starts again) the head of the queue; False when it has to wait. Nobody
        overtakes it then."""
        pool, size = self.pool, self.limits.block_size
        stuck, num_free = self._stuck_head
        if stuck == request.request_id and self.running and pool.num_free_blocks <= num_free:
            return False
        hit = self._lookup_prefix(request)
        start = len(hit) * size
        window = self._window(request, start, now)
        if window is None:
            return True
        if window.num_tokens == 0:
            now.blocked = now.blocked or request
            return False
        # Room for the whole sequence must be free, not only for this chunk: a prompt that is
        # admitted piecemeal would soon preempt others or itself.
        whole = -(-request.num_tokens // size) - len(hit) + pool.num_unused(hit)
        if whole > pool.num_free_blocks:
            if self.running:
                self._stuck_head = (request.request_id, pool.num_free_blocks)
                return False
            self._fail(request, self._kv_too_small(request))
            return True
        self._stuck_head = ("", 0)
        self.waiting.remove(request)
        pool.share(hit)
        request.block_ids = hit
        request.num_published = len(hit)
        request.status = Status.RUNNING
        self.running.append(request)
        self._count_admission(request, start)
        need = self._blocks_to_add(request, start + window.num_tokens)
        self._commit(request, start, window, need, now)
        return True

    def _lookup_prefix(self, request: Request) -> list[int]:
        if not self._caching:
            return []
        size = self.limits.block_size
        most = max_hit_blocks(request, size, self.traits.bidirectional)
        hit = self.pool.lookup(request.block_hashes, most)
        if self.traits.bidirectional == "item" and hit:
            del hit[cut_to_groups(request.mm_inputs, len(hit), size) :]
        return hit

    def _count_admission(self, request: Request, num_cached: int) -> None:
        if request.num_preemptions:
            return
        request.num_cached_tokens = num_cached
        request.admit_seconds = self._clock()
        if self._caching and request.read_prefix_cache:
            self.stats.num_prefix_query_tokens += request.num_prompt_tokens
            self.stats.num_prefix_hit_tokens += min(num_cached, request.num_prompt_tokens)

    def _commit(
        self, request: Request, start: int, window: Window, num_new_blocks: int, now: _Pass
    ) -> None:
        """Takes blocks and encoder outputs and writes the request into the plan."""
        if num_new_blocks:
            request.block_ids.extend(self.pool.allocate(num_new_blocks))
        request.num_computed = start
        for index in window.take:
            where, _ = self.encoder.allocate(request, index, window.keep_host)
            entry = request.mm_inputs[index]
            if where == "absent":
                embeds = request.mm_embeds[index]
                now.encode[entry.mm_hash] = EncoderInput(
                    entry.mm_hash, entry.modality, embeds, request.values[index]
                )
                self._encoding[entry.mm_hash] = request.request_id
            elif not request.num_preemptions:
                request.num_encoder_hits += 1
        now.compute_left -= window.compute_embeds
        if not request.known_to_runner:
            request.known_to_runner = True
            now.new[request.request_id] = NewRequest(
                request.request_id, request.token_ids.copy(), request.num_prompt_tokens,
                request.mm_inputs, request.values, request.sampling,
            )  # fmt: skip
        request.step = now.step
        now.tokens_left -= window.num_tokens
        last = start + window.num_tokens == request.num_tokens
        now.scheduled[request.request_id] = ScheduledRequest(
            request.request_id, start, window.num_tokens, request.block_ids, last
        )

    def _watch_progress(self, now: _Pass) -> None:
        """A pass that computes nothing although somebody waits must not repeat itself: the state
        it saw will be the same next time. The request that blocks is failed by name."""
        if now.scheduled or not self._requests:
            self._idle_passes = 0
            return
        self._idle_passes += 1
        self.stats.num_empty_passes += 1
        if self._idle_passes < _MAX_IDLE_PASSES:
            return
        self._idle_passes = 0
        self.stats.num_no_progress += 1
        culprit = now.blocked or (self.running[0] if self.running else self.waiting.head())
        self._fail(culprit, EngineFailure(
            f"no step can compute a token of this request: {culprit.num_computed} of "
            f"{culprit.num_tokens} tokens computed, {self.pool.num_free_blocks} KV blocks and "
            f"{self.encoder.num_free_embeds + self.encoder.num_idle_embeds} encoder outputs free"
        ))  # fmt: skip

    def _finish_pass(self, now: _Pass) -> StepPlan:
        self._in_runner.update(now.new)
        moves = self.encoder.take_moves()
        gone, self._gone = self._gone, []
        encode = [now.encode[mm_hash] for mm_hash in moves.encode]
        return StepPlan(
            now.step, list(now.new.values()), list(now.scheduled.values()), encode,
            moves.free, moves.store, moves.load, moves.drop_host, gone,
        )  # fmt: skip

    def _kv_too_small(self, request: Request) -> EngineFailure:
        return EngineFailure(
            f"the request has reached {request.num_tokens} tokens and needs more KV blocks than "
            f"this engine has ({self.pool.num_blocks} of {self.limits.block_size} tokens): give "
            "the engine more KV memory or lower max_model_len"
        )

    # ---- what a step brought --------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in a step's result. Requests that ended meanwhile are ignored."""
        now = self._clock()
        requests, size, caching = self._requests, self.limits.block_size, self._caching
        ended = False
        if result.failed or result.failed_encodes:
            self._take_failures(result)
        for entry in plan.scheduled:
            request = requests.get(entry.request_id)
            if request is None or request.step != plan.step:
                continue
            computed = request.num_computed + entry.num_scheduled_tokens
            request.num_computed = computed
            if caching and computed // size > request.num_published:
                self._publish(request, computed // size)
            if request.next_mm < len(request.mm_inputs):
                self._release_consumed(request)
        for logprobs in result.prompt_logprobs:
            request = requests.get(logprobs.request_id)
            if request is not None:
                request.prompt_logprobs.append(logprobs)
        for sampled in result.sampled:
            request = requests.get(sampled.request_id)
            if request is None or request.step != plan.step:
                continue  # ended, or starts over because of another's failure
            if self._append(request, sampled, now):
                ended = True
        if ended:
            self.running = [entry for entry in self.running if entry.status is Status.RUNNING]
        self._count_step(plan, result)

    def _take_failures(self, result: StepResult) -> None:
        """Ends the requests that the runner could not serve. What was to be encoded for them is
        not there; another request that counts on it starts over and encodes it itself."""
        lost = dict.fromkeys(result.failed_encodes)
        for mm_hash, owner in self._encoding.items():
            if owner in result.failed:
                lost[mm_hash] = None
        suspect: dict[MMHash, None] = {}
        for request_id, reason in result.failed.items():
            request = self._requests.get(request_id)
            if request is not None:
                for index in self.encoder.get_cached_input_ids(request):
                    suspect[request.mm_inputs[index].mm_hash] = None
                self._fail(request, EngineFailure(reason))
        for mm_hash in lost:
            for user in self.encoder.users(mm_hash):
                self._preempt(self._requests[user], None)
        for mm_hash in lost | suspect:  # what a failed request used is encoded anew next time
            if self.encoder.is_idle(mm_hash):
                self.encoder.forget(mm_hash)

    def _publish(self, request: Request, num_full: int) -> None:
        if len(request.block_hashes) < num_full:
            self.hasher.extend(request, num_full * self.limits.block_size)
        for index in range(request.num_published, num_full):
            block_hash = request.block_hashes[index]
            new = self.pool.publish(request.block_ids[index], block_hash)
            if new and self._observer is not None:
                self._observer.block_stored(request, index, self.hasher)
        request.num_published = num_full

    def _release_consumed(self, request: Request) -> None:
        inputs, computed = request.mm_inputs, request.num_computed
        while request.next_mm < len(inputs):
            if inputs[request.next_mm].placeholder.end > computed:
                break
            self.encoder.free_encoder_input(request, request.next_mm)
            request.next_mm += 1

    def _append(self, request: Request, sampled: Sampled, now: float) -> bool:
        """Adds a new token; True when it was the last one."""
        token = sampled.token_id
        request.token_ids.append(token)
        request.num_tokens += 1
        count = request.num_tokens - request.num_prompt_tokens
        finish, stop_token = "", None
        sampling = request.sampling
        if count > sampling.min_tokens:
            if token in self._eos and not sampling.ignore_eos:
                finish = "stop"
            elif token in request.stop_ids:
                finish, stop_token = "stop", token
        if not finish and count >= request.output_limit_tokens:
            finish = "length"
        self._outbox.token(request, sampled, finish, stop_token, now)
        if finish:
            self._drop(request)
        return bool(finish)

    def _count_step(self, plan: StepPlan, result: StepResult) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_generation_tokens += len(result.sampled)
        if plan.scheduled:
            num_tokens = plan.num_tokens
            stats.observed.iteration_tokens.append(num_tokens)
            if num_tokens > 4 * len(plan.scheduled):
                stats.num_prefill_tokens += num_tokens
                stats.prefill_seconds += result.forward_seconds
        if plan.encode:
            total = sum(entry.num_embeds for entry in plan.encode)
            for entry in plan.encode:
                share = result.encode_seconds * entry.num_embeds / max(total, 1)
                stats.count_encoded(entry.modality, entry.num_embeds, share)
                self.encoder.note_cost(entry.mm_hash, share)
        self._encoding.clear()

    # ---- the outside ----------------------------------------------------------------------------

    def take_outputs(self) -> Sequence[tuple[Request, EngineOutput]]:
        """What happened to requests since the last call, in order."""
        return self._outbox.take()

    def reset_prefix_cache(self) -> int:
        """Forgets all blocks nobody uses; returns how many."""
        count = self.pool.reset()
        if self._observer is not None:
            self._observer.blocks_cleared()
        return count

    def reset_encoder_cache(self) -> int:
        """Frees all encoder outputs nobody holds; returns how many. Done by the next plan."""
        return self.encoder.reset()

    def check_integrity(self) -> None:
        """Asserts that all books agree with each other, between two steps."""
        waiting = list(self.waiting)
        live = [*self.running, *waiting]
        assert {entry.request_id for entry in live} == self._requests.keys()
        assert len(live) == len(self._requests)
        assert self.waiting.num_tokens == sum(entry.num_tokens for entry in waiting)
        assert len(self.running) <= self.limits.max_num_seqs
        for request in live:
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
            assert not request.block_ids
            assert not self.encoder.get_cached_input_ids(request)
        self.pool.check_integrity([request.block_ids for request in self.running])
        self.encoder.check_integrity(self.running)
