"""The scheduler: decides what each step computes, and processes its results.

Used by `core`: `add`, `schedule`, `update`, `take_outputs`. There are no phases: each step lets a
request's num_computed catch up with its num_tokens, whether those are prompt, recomputed or new;
chunked prefill, prefix hits and preemption are that one rule. `planner` makes the plans, `book` is
the request table; here is what a step's result does to them. Pure Python over counts and ids: never
touches tensors, sockets or threads; the clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.caches.encoder_cache import EncoderCacheManager
from foveal_runtime.engine.caches.observer import CacheObserver
from foveal_runtime.engine.scheduler.ahead import Ahead
from foveal_runtime.engine.scheduler.book import Roster
from foveal_runtime.engine.scheduler.planner import Planner
from foveal_runtime.engine.scheduler.queue import WaitingQueue
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request, Status
from foveal_runtime.engine.types.stats import EngineStats
from foveal_runtime.engine.types.step import ModelTraits, Sampled, StepPlan, StepResult
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.messages import EngineOutput


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
        self.roster = Roster(limits, traits, clock=clock, stats=stats, observer=observer)
        self.limits = limits
        self.stats = self.roster.stats
        self._planner = Planner(self.roster)
        self._ahead = Ahead(self.roster, self._planner)
        self._eos = frozenset(traits.eos_token_ids)

    # ---- questions ------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return self.roster.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.roster.waiting

    @property
    def pool(self) -> BlockPool:
        return self.roster.pool

    @property
    def encoder(self) -> EncoderCacheManager:
        return self.roster.encoder

    @property
    def has_work(self) -> bool:
        """A request is unfinished, or the runner has something to be told."""
        roster = self.roster
        return bool(roster.requests) or bool(roster.gone) or roster.encoder.has_moves

    @property
    def num_requests(self) -> int:
        """Those that are away included."""
        return len(self.roster.requests) + len(self.roster.away)

    def get(self, request_id: str) -> Request | None:
        return self.roster.requests.get(request_id)

    # ---- requests and steps ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request in. Raises a FovealError, having changed nothing, when it can never run
        here or not now."""
        self.roster.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request without an output; None when it is unknown or already over."""
        return self.roster.abort(request_id)

    def release_secured(self, request: Request) -> list[MMHash]:
        """Gives up the values of items that are encoded or computed: nothing but a preemption can
        make them needed again. Returns the keys of which no value is left with the request."""
        held = self.roster.encoder.get_cached_input_ids(request)
        wanted = {
            entry.mm_hash
            for index, entry in enumerate(request.mm_inputs)
            if index >= request.next_mm and index not in held
        }
        released: dict[MMHash, None] = {}
        for index, entry in enumerate(request.mm_inputs):
            if entry.mm_hash not in wanted and request.values[index]:
                request.release_value(index)
                released[entry.mm_hash] = None
        return list(released)

    def take_recalled(self) -> list[Request]:
        """Requests that were preempted after their values were released: each is away until
        `resume` brings the values back (or `abort` ends it)."""
        return self.roster.take_recalled()

    def resume(self, request_id: str, values: Mapping[MMHash, memoryview]) -> None:
        """The values of a request that is away are here again."""
        self.roster.resume(request_id, values)

    def schedule(self) -> StepPlan:
        """The next step's plan; empty (`num_tokens` 0, nothing to move) when nobody wants one."""
        return self._planner.schedule()

    def plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """The step after `running`, before that one's `update`; None when it must come first. A
        plan that was given must be executed, `adopt`ed after that update, and updated in turn."""
        return self._ahead.plan(running)

    def adopt(self, plan: StepPlan) -> None:
        """The step before is taken in: `plan` is now the running one."""
        self._ahead.adopt(plan)

    def take_outputs(self) -> Sequence[tuple[Request, EngineOutput]]:
        """What happened to requests since the last call, in order."""
        return self.roster.outbox.take()

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in a step's result. Requests that ended meanwhile are ignored."""
        now = self.roster.clock()
        requests, size, caching = (
            self.roster.requests,
            self.limits.block_size,
            self.roster.is_caching,
        )
        ended, num_taken = False, 0
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
            if entry.snapshot and self.roster.snapshots is not None:
                self.roster.snapshots.keep(request, entry.snapshot)
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
            num_taken += 1
            if self._append(request, sampled, now):
                ended = True
        for pooled in result.pooled:
            request = requests.get(pooled.request_id)
            if request is None or request.step != plan.step:
                continue
            self.roster.outbox.embedding(request, pooled.values, now)
            self.roster.drop(request)
            ended = True
        if ended:
            self.roster.running = [
                entry for entry in self.roster.running if entry.status is Status.RUNNING
            ]
        self.roster.stats.num_generation_tokens += num_taken
        self._count_step(plan, result)

    def _take_failures(self, result: StepResult) -> None:
        """Ends the requests that the runner could not serve. What was to be encoded for them is
        not there; another request that counts on it starts over and encodes it itself."""
        lost = dict.fromkeys(result.failed_encodes)
        for mm_hash, owner in self._planner.encoding.items():
            if owner in result.failed:
                lost[mm_hash] = None
        suspect: dict[MMHash, None] = {}
        for request_id, reason in result.failed.items():
            request = self.roster.requests.get(request_id)
            if request is not None:
                for index in self.roster.encoder.get_cached_input_ids(request):
                    suspect[request.mm_inputs[index].mm_hash] = None
                self.roster.fail(request, EngineFailure(reason))
        for mm_hash in lost:
            for user in self.roster.encoder.users(mm_hash):
                self.roster.preempt(self.roster.requests[user])
        for mm_hash in lost | suspect:  # what a failed request used is encoded anew next time
            if self.roster.encoder.is_idle(mm_hash):
                self.roster.encoder.forget(mm_hash)

    def _publish(self, request: Request, num_full: int) -> None:
        if len(request.block_hashes) < num_full:
            self.roster.hasher.extend(request, num_full * self.limits.block_size)
        for index in range(request.num_published, num_full):
            block_hash = request.block_hashes[index]
            new = self.roster.pool.publish(request.block_ids[index], block_hash)
            self.roster.block_ghosts.insert(block_hash, 1)
            if new and self.roster.observer is not None:
                self.roster.observer.block_stored(request, index, self.roster.hasher)
        request.num_published = num_full

    def _release_consumed(self, request: Request) -> None:
        inputs, computed = request.mm_inputs, request.num_computed
        while request.next_mm < len(inputs):
            if inputs[request.next_mm].placeholder.end > computed:
                break
            self.roster.encoder.free_encoder_input(request, request.next_mm)
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
        self.roster.outbox.token(request, sampled, finish, stop_token, now)
        if finish:
            self.roster.drop(request)
        return bool(finish)

    def _count_step(self, plan: StepPlan, result: StepResult) -> None:
        stats = self.roster.stats
        if self._planner.pace is not None:
            self._planner.pace.observe(plan, result)
        stats.num_steps += 1
        if plan.scheduled:
            num_tokens = plan.num_tokens
            stats.observed.iteration_tokens.observe(num_tokens)
            if num_tokens > 4 * len(plan.scheduled):
                stats.num_prefill_tokens += num_tokens
                stats.prefill_seconds += result.forward_seconds
        if plan.encode:
            total = sum(entry.num_embeds for entry in plan.encode)
            for entry in plan.encode:
                share = result.encode_seconds * entry.num_embeds / max(total, 1)
                stats.count_encoded(entry.modality, entry.num_embeds, share)
                self.roster.encoder.note_cost(entry.mm_hash, share)

    # ---- administration -------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forgets all blocks nobody uses; returns how many."""
        count = self.roster.pool.reset()
        if self.roster.snapshots is not None:
            self.roster.snapshots.pool.reset()
        self.roster.block_ghosts.reset()
        if self.roster.observer is not None:
            self.roster.observer.blocks_cleared()
        return count

    def reset_encoder_cache(self) -> int:
        """Frees all encoder outputs nobody holds; returns how many. Done by the next plan."""
        return self.roster.encoder.reset()

    def forget_media(self, mm_hashes: Iterable[MMHash]) -> None:
        """Between steps: the values under these keys were wrong, so nothing made from them is used
        again. Who still needs an output of one starts over; blocks in use are no longer found."""
        wrong = set(mm_hashes)
        for mm_hash in wrong:
            for user in self.roster.encoder.users(
                mm_hash
            ):  # a copy: others could join what it holds
                self.roster.preempt(self.roster.requests[user])
            self.roster.encoder.discard(mm_hash)
        for request in self.roster.running:
            if wrong.intersection(entry.mm_hash for entry in request.mm_inputs):
                self.roster.pool.withdraw(request.block_ids)
                request.is_withdrawn = True
                request.num_published = self.roster.limits.max_model_len  # no more of its blocks
        self.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Asserts that all books agree with each other, between two steps."""
        self.roster.check_integrity()
