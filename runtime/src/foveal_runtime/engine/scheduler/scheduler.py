"""The scheduler: decides what each step computes, and processes its results.

Used by `core`: `add`, `schedule`, `update`, `take_outputs`. There are no phases: each step lets a
request's num_computed catch up with its num_tokens, whether those are prompt, recomputed or new;
chunked prefill, prefix hits and preemption are that one rule. A scheduler is the request table with
steps: `planner` makes the plans; here is what a step's result does to the requests. Pure Python
over counts and ids: never touches tensors, sockets or threads; the clock is handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from foveal_runtime.engine.caches.prefix_cache import CacheObserver
from foveal_runtime.engine.scheduler.planner import Planner
from foveal_runtime.engine.scheduler.request_table import RequestTable
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request, Status
from foveal_runtime.engine.types.step import (
    ModelTraits,
    Sampled,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from foveal_runtime.plan.errors import EngineFailure, InvalidRequest
from foveal_runtime.plan.media import MMHash
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.messages import EngineOutput

_MOST_ROWS = 16
"""Streams and guesses in one step: products of so few rows take the time of reading the weights."""


class Scheduler(RequestTable):
    """State of all requests of one engine, and its steps."""

    def __init__(
        self,
        limits: SchedulerLimits,
        traits: ModelTraits,
        *,
        clock: Callable[[], float],
        observer: CacheObserver | None = None,
    ) -> None:
        super().__init__(limits, traits, clock=clock, observer=observer)
        self._planner = Planner(self)
        self._eos = frozenset(traits.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """A request is unfinished, or the runner has something to be told."""
        return bool(self.requests) or bool(self.gone) or self.encoder.has_moves

    @property
    def num_requests(self) -> int:
        """Those that are away included."""
        return len(self.requests) + len(self.away)

    def get(self, request_id: str) -> Request | None:
        return self.requests.get(request_id)

    # ---- steps ----------------------------------------------------------------------------------

    def release_secured(self, request: Request) -> list[MMHash]:
        """Gives up the values of items that are encoded or computed: nothing but a preemption can
        make them needed again. Returns the keys of which no value is left with the request."""
        held = self.encoder.get_cached_input_ids(request)
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

    def schedule(self) -> StepPlan:
        """The next step's plan; empty (`num_tokens` 0, nothing to move) when nobody wants one."""
        plan = self._planner.schedule()
        if self.limits.num_speculative_tokens and plan.num_tokens == len(plan.scheduled):
            self._add_drafts(plan)
        return plan

    def _add_drafts(self, plan: StepPlan) -> None:
        """Guesses behind the tokens of few streams that have a step to themselves. Nobody gives way
        for them."""
        size, most = self.limits.block_size, self.limits.num_speculative_tokens
        tokens_left = min(_MOST_ROWS, self.limits.max_num_batched_tokens) - plan.num_tokens
        for entry in plan.scheduled:
            request = self.requests[entry.request_id]
            if request.drafts is None or not request.is_decoding or plan.encode:
                continue
            count = request.output_limit_tokens - request.num_output_tokens - 1
            count = min(count, most, tokens_left)
            draft = request.drafts.propose(request.token_ids, count) if count > 0 else []
            missing = -(-(request.num_tokens + len(draft)) // size) - len(request.block_ids)
            if missing > min(self.free_blocks):
                del draft[len(request.block_ids) * size - request.num_tokens :]
            elif missing > 0:
                self.take_blocks(request, missing)
            entry.draft = draft
            entry.num_scheduled_tokens += len(draft)
            tokens_left -= len(draft)

    def split(self, plan: StepPlan) -> tuple[StepPlan | None, StepPlan]:
        """A new plan as the part of streams, to be executed first, and the rest, in the middle of
        which `plan_streams` is asked; None where nothing keeps them waiting."""
        pace = self._planner.pace
        if pace is None or not self.limits.slices_encoding or not plan.encode:
            return None, plan
        streams: list[ScheduledRequest] = []
        others: list[ScheduledRequest] = []
        new = {entry.request_id for entry in plan.new}
        for entry in plan.scheduled:
            request = self.requests[entry.request_id]
            is_stream = request.request_id not in new and request.is_decoding
            (streams if is_stream else others).append(entry)
        num_prompt = sum(entry.num_scheduled_tokens for entry in others)
        seconds = pace.slice_seconds(plan.encode, num_prompt)
        if not seconds or not streams:
            return None, plan
        start_from = {entry.snapshot for entry in plan.new if entry.snapshot}
        if start_from.intersection(entry.snapshot for entry in streams):
            return None, plan  # a stream's state may take a slot only after a newcomer read it
        plan.scheduled, plan.slice_seconds = others, seconds
        return StepPlan(plan.step, scheduled=streams), plan

    def plan_streams(self, under_way: StepPlan) -> StepPlan | None:
        """One more token for each stream while `under_way`, the rest of a split plan, is encoded,
        and after it, before the next prompts. Nobody gives way for it: a stream that lacks a block
        waits for the next pass."""
        busy = {entry.request_id for entry in under_way.scheduled}
        going_on = [
            request for request in self.running
            if request.request_id not in busy and request.is_decoding
            and self._take_blocks([request], 0)
        ]  # fmt: skip
        return self._plan_one_more(going_on, 0) if going_on else None

    def plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """The step after `running`, before that one's `update`; None when it must come first. A
        plan that was given must be executed, `adopt`ed after that update, and updated in turn.

        For a loop that keeps the device busy: while it computes step n, step n + 1 is planned and
        submitted, and the runner reads the missing tokens on the device. Only what is certain is
        planned: every running request goes on by one token, unless it is about to reach its length.
        Anything else (prompts, encoders, a queue that could move, no free blocks, options that need
        the text so far) is left to a usual pass, after the result. A request that ends by what step
        n says has then been computed one token too far: that token is dropped, and its blocks are
        written by the device before any request that gets them next.
        """
        if running.encode or self.encoder.has_moves or self.recalled:
            return None
        if self.limits.num_speculative_tokens:
            return None  # guesses need the last token
        if not all(entry.sample for entry in running.scheduled):
            return None
        going_on = []
        for request in self.running:
            if request.step != running.step or _needs_text(request.sampling):
                return None
            if request.num_output_tokens + 1 < request.output_limit_tokens:
                going_on.append(request)
        if (
            not going_on
            or self._planner.may_admit(len(going_on))
            or not self._take_blocks(going_on, 1)
        ):
            return None
        return self._plan_one_more(going_on, 1)

    def _plan_one_more(self, requests: Sequence[Request], ahead: int) -> StepPlan:
        """One token for each, so many positions behind the last one that is known."""
        self._planner.step += 1
        take = self.snapshots.take if self.snapshots is not None else lambda *_: 0
        scheduled = []
        for request in requests:
            at = request.num_tokens - 1 + ahead
            request.step = request.step if ahead else self._planner.step
            scheduled.append(ScheduledRequest(
                request.request_id, at, 1, request.block_ids, True, take(request, at + 1),
                request.window_ids, request.window_first,
            ))  # fmt: skip
        gone, self.gone = self.gone, []
        return StepPlan(self._planner.step, scheduled=scheduled, finished=gone)

    def adopt(self, plan: StepPlan) -> None:
        """The step before is taken in: who is still running takes part in `plan`."""
        self._planner.encoding.clear()  # what the step before encoded
        for entry in plan.scheduled:
            request = self.requests.get(entry.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # ended, or lost its blocks to another's failure
            assert request.num_computed == entry.num_computed_tokens == request.num_tokens - 1
            request.step = plan.step

    def _take_blocks(self, requests: list[Request], ahead: int) -> bool:
        """A block for each who needs one for its last token, or one so far ahead of it; nothing
        when there are too few."""
        size = self.limits.block_size
        short = [r for r in requests if r.num_tokens + ahead > len(r.block_ids) * size]
        if len(short) > min(self.free_blocks):
            return False
        for request in short:
            self.take_blocks(request, 1)
        return True

    def take_outputs(self) -> Sequence[tuple[Request, EngineOutput]]:
        """What happened to requests since the last call, in order."""
        return self.outbox.take()

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in a step's result. Requests that ended meanwhile are ignored."""
        now = self.clock()
        requests, size, caching = self.requests, self.limits.block_size, self.is_caching
        ended, num_taken = False, 0
        if result.failed or result.failed_encodes:
            self._take_failures(result)
        for entry in plan.scheduled:
            request = requests.get(entry.request_id)
            if request is None or request.step != plan.step:
                continue
            computed = request.num_computed + entry.num_scheduled_tokens - len(entry.draft)
            request.num_computed = computed
            if caching and computed // size > request.num_published:
                self._publish(request, computed // size)
            if self.windows is not None:
                self.windows.leave_behind(request)
            if entry.snapshot and self.snapshots is not None:
                self.snapshots.keep(request, entry.snapshot)
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
        if self.limits.num_speculative_tokens:
            self._take_guesses(plan, result)
        for pooled in result.pooled:
            request = requests.get(pooled.request_id)
            if request is None or request.step != plan.step:
                continue
            self.outbox.embedding(request, pooled.values, now)
            self.drop(request)
            ended = True
        if ended:
            self.running = [entry for entry in self.running if entry.status is Status.RUNNING]
        self.stats.num_generation_tokens += num_taken
        self._count_step(plan, result)

    def _take_guesses(self, plan: StepPlan, result: StepResult) -> None:
        """After the drawn tokens: all but the last of a stream had been guessed, so their keys and
        values are there."""
        drawn = Counter(sampled.request_id for sampled in result.sampled)
        for entry in plan.scheduled:
            if not entry.draft:
                continue
            num_right = max(drawn[entry.request_id] - 1, 0)
            self.stats.num_drafts += 1
            self.stats.num_draft_tokens += len(entry.draft)
            self.stats.num_accepted_tokens += num_right
            request = self.requests.get(entry.request_id)
            if request is None or request.drafts is None or request.step != plan.step:
                continue
            request.drafts.count(num_right)
            request.num_computed += num_right
            num_full = request.num_computed // self.limits.block_size
            if self.is_caching and num_full > request.num_published:
                self._publish(request, num_full)

    def _take_failures(self, result: StepResult) -> None:
        """Ends the requests that the runner could not serve. What was to be encoded for them is
        not there; another request that counts on it starts over and encodes it itself."""
        lost = dict.fromkeys(result.failed_encodes)
        for mm_hash, owner in self._planner.encoding.items():
            if owner in result.failed:
                lost[mm_hash] = None
        suspect: dict[MMHash, None] = {}
        for request_id, reason in result.failed.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request_id in result.impossible:
                self.fail(request, InvalidRequest(reason))
                continue
            for index in self.encoder.get_cached_input_ids(request):
                suspect[request.mm_inputs[index].mm_hash] = None
            self.fail(request, EngineFailure(reason))
        for mm_hash in lost:
            for user in self.encoder.users(mm_hash):
                self.preempt(self.requests[user])
        for mm_hash in lost | suspect:  # what a failed request used is encoded anew next time
            if self.encoder.is_idle(mm_hash):
                self.encoder.forget(mm_hash)

    def _publish(self, request: Request, num_full: int) -> None:
        if len(request.block_hashes) < num_full:
            self.hasher.extend(request, num_full * self.limits.block_size)
        for index in range(request.num_published, num_full):
            block_hash = request.block_hashes[index]
            new = self.pool.publish(request.block_ids[index], block_hash)
            self.block_ghosts.insert(block_hash, 1)
            if new and self.observer is not None:
                self.observer.block_stored(request, index, self.hasher)
            if self.windows is not None:
                self.windows.publish(request, index)
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
        is_free = count > sampling.min_tokens
        # A grammar gives the end before min_tokens only where it allows nothing else.
        if token in self._eos and not sampling.ignore_eos and (is_free or sampling.grammar):
            finish = "stop"
        elif token in request.stop_ids and is_free:
            finish, stop_token = "stop", token
        if not finish and count >= request.output_limit_tokens:
            finish = "length"
        self.outbox.token(request, sampled, finish, stop_token, now)
        if finish:
            self.drop(request)
        return bool(finish)

    def _count_step(self, plan: StepPlan, result: StepResult) -> None:
        stats = self.stats
        if self._planner.pace is not None:
            self._planner.pace.observe(plan, result)
        stats.num_steps += 1
        if plan.scheduled:
            num_tokens = plan.num_tokens
            stats.observed.iteration_tokens.observe(num_tokens)
            if self.limits.num_speculative_tokens:
                num_tokens -= plan.num_draft_tokens
            if num_tokens > 4 * len(plan.scheduled):
                stats.num_prefill_tokens += num_tokens
                stats.prefill_seconds += result.forward_seconds
        if plan.encode:
            total = sum(entry.num_embeds for entry in plan.encode)
            for entry in plan.encode:
                share = result.encode_seconds * entry.num_embeds / max(total, 1)
                stats.count_encoded(entry.modality, entry.num_embeds, share)
                self.encoder.note_cost(entry.mm_hash, share)

    # ---- administration -------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forgets all blocks nobody uses; returns how many."""
        count = self.pool.reset()
        if self.snapshots is not None:
            self.snapshots.pool.reset()
        if self.windows is not None:
            self.windows.pool.reset()
        self.block_ghosts.reset()
        if self.observer is not None:
            self.observer.blocks_cleared()
        return count

    def reset_encoder_cache(self) -> int:
        """Frees all encoder outputs nobody holds; returns how many. Done by the next plan."""
        return self.encoder.reset()

    def forget_media(self, mm_hashes: Iterable[MMHash]) -> None:
        """Between steps: the values under these keys were wrong, so nothing made from them is used
        again. Who still needs an output of one starts over; blocks in use are no longer found."""
        wrong = set(mm_hashes)
        for mm_hash in wrong:
            for user in self.encoder.users(mm_hash):  # a copy: others could join what it holds
                self.preempt(self.requests[user])
            self.encoder.discard(mm_hash)
        for request in self.running:
            if wrong.intersection(entry.mm_hash for entry in request.mm_inputs):
                self.pool.withdraw(request.block_ids)
                if self.windows is not None:
                    self.windows.pool.withdraw(request.window_ids)
                request.is_withdrawn = True
                request.num_published = self.limits.max_model_len  # no more of its blocks
        self.reset_prefix_cache()

    def part_with(self, mm_hashes: Iterable[MMHash]) -> list[tuple[Request, MMHash]]:
        """After `forget_media`: takes the values themselves from whoever has them. Requests that
        still need one are recalled; returns who gave one up and goes on without."""
        wrong = set(mm_hashes)
        requests = list(self.requests.values())
        return [pair for request in requests for pair in self._part(request, wrong)]

    def _part(self, request: Request, wrong: set[MMHash]) -> list[tuple[Request, MMHash]]:
        """Takes wrong values from a request."""
        pairs = zip(request.mm_inputs, request.values, strict=True)
        taken = [i for i, (entry, value) in enumerate(pairs) if value and entry.mm_hash in wrong]
        for index in taken:
            request.release_value(index)
        if not taken:
            return []
        if request.status is Status.RUNNING and taken[-1] < request.next_mm:  # all are computed
            return [(request, mm_hash) for mm_hash in {request.mm_inputs[i].mm_hash for i in taken}]
        if request.status is Status.RUNNING:
            self.preempt(request)
        else:
            self.waiting.remove(request)
            self.send_away(request)
        return []


def _needs_text(sampling: SamplingParams) -> bool:
    """Whether a token depends on which tokens came before, not only on how many."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.grammar)
        or any(len(word) > 1 for word in sampling.bad_words)
    )
