"""One pass: what the next step computes, for whom, with which blocks and encoder outputs.

Used by `scheduler`. Running requests first, then waiting ones in the order of the policy; asks
`encoder_window` how far a request may go, takes KV blocks, and commits encoder outputs last, so
that a refusal leaves nothing behind. Knows nothing of results.
"""

from __future__ import annotations

import functools

from foveal_runtime.engine.caches.prefix_cache import cut_to_groups, max_hit_blocks
from foveal_runtime.engine.scheduler.encoder_window import Window, next_item, plan_window
from foveal_runtime.engine.scheduler.pace import Pace
from foveal_runtime.engine.scheduler.request_table import RequestTable
from foveal_runtime.engine.types.request import Request, Status
from foveal_runtime.engine.types.step import EncoderInput, NewRequest, ScheduledRequest, StepPlan
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.media import MMHash

_MAX_IDLE_PASSES = 2
_MAX_ASIDE = 32
"""Requests that one pass leaves waiting for blocks that others compute; each costs a look."""


class _Pass:
    """One schedule() in the making."""

    __slots__ = ("aside", "blocked", "compute_left", "computing", "encode", "has_prompt",
                 "is_mixed", "new", "num_preempted", "reserved", "scheduled", "starved", "step",
                 "tokens_left")  # fmt: skip

    def __init__(self, step: int, tokens: int, compute: int, is_mixed: bool) -> None:
        self.step = step
        self.is_mixed = is_mixed
        self.tokens_left = tokens
        self.reserved = 0  # tokens besides, of streams that had not their turn yet
        self.compute_left = compute
        self.has_prompt = False  # it computes or encodes something of a prompt
        self.scheduled: dict[str, ScheduledRequest] = {}
        self.new: dict[str, NewRequest] = {}
        self.encode: dict[MMHash, EncoderInput] = {}
        self.blocked: Request | None = None
        self.starved = False  # a running request went first and still had no room for its item
        self.aside: list[Request] = []  # waiting, and passed over: what they lack is coming
        self.computing: list[Request] | None = None  # running, with blocks of a prompt to come
        self.num_preempted = 0


class Planner:
    """Plans steps over a request table.

    Attributes:
        step: number of the last pass.
        encoding: keys to encode in it, and for which request.
        pace: None without a target for the gap between tokens.
    """

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.limits = table.limits
        self.traits = table.traits
        self.step = 0
        self.encoding: dict[MMHash, str] = {}
        self._snapshots = table.snapshots
        self._indivisible = table.is_indivisible
        self._whole_prompt = table.traits.bidirectional == "prompt"
        self.pace = Pace.of(table.limits)
        is_whole = self._indivisible or self._whole_prompt
        self._may_divide = not is_whole and bool(self.pace or table.limits.max_num_mixed_tokens)
        self._first: Request | None = None  # got nothing in the last pass: goes first in this one
        self._idle_passes = 0
        # The head could not get blocks while so many were free; more must come free first.
        self._stuck_head: tuple[str, tuple[int, ...]] = ("", ())

    def schedule(self) -> StepPlan:
        """The next step's plan; empty (`num_tokens` 0, nothing to move) when nobody wants one."""
        self.step += 1
        self.encoding.clear()
        tokens = self.limits.max_num_batched_tokens
        streams = sum(r.lacks_one_token for r in self.table.running) if self._may_divide else 0
        now = _Pass(self.step, tokens, self.limits.encoder_compute_embeds, streams > 0)
        if streams:  # each gets its token, whatever the limit and whoever goes first
            now.reserved = min(streams, tokens - 1)
            now.tokens_left = min(tokens - now.reserved, self._mixed_tokens(streams))
        first, self._first = self._first, None
        if not now.tokens_left:
            now.blocked = first  # streams alone have this step
        elif first is not None and first.status is Status.RUNNING:
            self._continue(first, now)
            now.starved = now.blocked is first
        elif first is not None and len(self.table.waiting) and self.table.waiting.head() is first:
            self._admit_waiting(now, limit=1)
        self._continue_running(now)
        if not now.num_preempted:
            self._admit_waiting(now)
        for request in reversed(now.aside):
            self.table.waiting.push_back(request)
        self._first = now.blocked
        self._watch_progress(now)
        return self._finish_pass(now)

    def _mixed_tokens(self, num_streams: int) -> int:
        """Tokens of a step beside streams, without theirs; 0: what streams alone take is due."""
        if self.pace is None:
            return max(self.limits.max_num_mixed_tokens, 2 * len(self.table.running)) - num_streams
        waiting = len(self.table.waiting) + len(self.table.running) - num_streams
        tokens = self.pace.tokens(are_short=self.table.prompts_are_short, num_waiting=waiting)
        return 0 if self.pace.is_look_due else max(tokens, self.limits.block_size)

    def may_admit(self, num_running: int) -> bool:
        """Whether a pass might admit the head of the queue beside so many running requests."""
        if not len(self.table.waiting) or num_running >= self.limits.max_num_seqs:
            return False
        return num_running < len(self.table.running) or not self._is_stuck()

    def _is_stuck(self) -> bool:
        """Whether the head of the queue would still get no blocks."""
        stuck, free = self._stuck_head
        if self.table.waiting.head().request_id != stuck:
            return False
        return all(now <= then for now, then in zip(self.table.free_blocks, free, strict=True))

    def _continue_running(self, now: _Pass) -> None:
        """Gives running requests their tokens, in order; one in a block with room, inlined."""
        size, step, scheduled = self.limits.block_size, now.step, now.scheduled
        at = 0
        while at < len(self.table.running) and now.tokens_left + now.reserved > 0:
            request = self.table.running[at]
            if request.step == step:
                at += 1
                continue
            computed = request.num_computed
            if (is_stream := request.lacks_one_token) and now.reserved:
                now.reserved -= 1
                now.tokens_left += 1
            elif not now.tokens_left:
                at += 1
                continue
            if (
                is_stream
                and computed < len(request.block_ids) * size
                and (self._snapshots is None or (computed + 1) % size)
            ):
                request.step = step
                now.tokens_left -= 1
                scheduled[request.request_id] = ScheduledRequest(
                    request.request_id, computed, 1, request.block_ids, True, 0,
                    request.window_ids, request.window_first,
                )  # fmt: skip
                at += 1
                continue
            self._continue(request, now)
            # Preemption may have shortened the list before this place or removed the request.
            if at < len(self.table.running) and self.table.running[at] is request:
                at += 1
            elif request.status is Status.RUNNING:
                at = self.table.running.index(request) + 1

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
            if need <= min(self.table.free_blocks):
                break
            victim = self._victim()
            if victim is request and len(self.table.running) == 1:
                self.table.fail(request, self.table.kv_too_small(request))
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
        if self._snapshots is not None:
            num_tokens = self._snapshots.clip(request, start, num_tokens)
        if request.next_mm == len(request.mm_inputs):
            return Window(num_tokens)
        compute_left = self._compute_left(request, start, now)
        plan = functools.partial(
            plan_window, request, start, cache=self.table.encoder,
            compute_left_embeds=compute_left, indivisible=self._indivisible,
        )  # fmt: skip
        window = plan(num_tokens)
        beside = self._tokens_beside(request, window, now)
        if window.num_tokens > beside:  # what is encoded takes time that tokens cannot have
            window = plan(num_tokens := beside)
        if window.bad_item is not None:
            known = self.table.encoder.known_embeds(request.mm_inputs[window.bad_item].mm_hash)
            text = (
                f"media item {window.bad_item} stands for {request.mm_embeds[window.bad_item]} "
                f"encoder outputs here and for {known} under the same key elsewhere"
            )
            self.table.fail(request, EngineFailure(text))
            return None
        if self._whole_prompt and start + window.num_tokens < request.num_prompt_tokens:
            window = Window(0)
        if window.num_tokens < num_tokens and not request.encoder_since:
            request.encoder_since = self.table.clock()
        return window

    def _compute_left(self, request: Request, start: int, now: _Pass) -> int:
        """Embeddings that this pass may still encode for a window from `start`. Beside streams: as
        many as tokens, or one item of any size, so that every item has its turn."""
        if not now.is_mixed:
            return now.compute_left
        item = next_item(request, start)
        embeds = request.mm_embeds[item]
        if self.pace is not None:
            modality = request.mm_inputs[item].modality
            fitting = self.pace.embeds_instead(now.tokens_left, modality)
            return min(now.compute_left, max(fitting, 0 if now.has_prompt else embeds))
        if now.encode:
            spent = self.limits.encoder_compute_embeds - now.compute_left
            return min(now.compute_left, max(self.limits.max_num_mixed_tokens - spent, 0))
        return min(now.compute_left, max(self.limits.max_num_mixed_tokens, embeds))

    def _tokens_beside(self, request: Request, window: Window, now: _Pass) -> int:
        """Of prompts, when the pass also encodes what the window needs."""
        if self.pace is None or not (window.compute_embeds and now.is_mixed):
            return now.tokens_left
        modality = request.mm_inputs[window.take[-1]].modality
        left = now.tokens_left - self.pace.tokens_instead(window.compute_embeds, modality)
        if left < 1 and self.limits.slices_encoding:
            return now.tokens_left  # streams go on meanwhile
        return min(now.tokens_left, max(left, 1))  # this prompt goes on

    def _blocks_to_add(self, request: Request, num_tokens: int) -> int:
        return max(-(-num_tokens // self.limits.block_size) - len(request.block_ids), 0)

    def _victim(self) -> Request:
        """Who gives way: the last to come, or the last of the least important."""
        if self.limits.policy == "priority":
            return max(self.table.running, key=lambda entry: (entry.priority, entry.sequence))
        return max(self.table.running, key=lambda entry: entry.sequence)

    def _preempt(self, victim: Request, now: _Pass) -> None:
        """Takes everything from a running request, what this pass gave it included."""
        self.table.preempt(victim)
        if undone := now.scheduled.pop(victim.request_id, None):
            now.tokens_left += undone.num_scheduled_tokens
        now.new.pop(victim.request_id, None)
        now.num_preempted += 1

    def _admit_waiting(self, now: _Pass, limit: int | None = None) -> None:
        while (
            len(self.table.waiting)
            and now.tokens_left > 0
            and len(self.table.running) < self.limits.max_num_seqs
            and (limit is None or limit > 0)
        ):
            if not self._admit(self.table.waiting.head(), now):
                break
            limit = None if limit is None else limit - 1

    def _admit(self, request: Request, now: _Pass) -> bool:
        """Starts (or starts again) the head of the queue; False when it has to wait. Nobody
        overtakes it then, unless it waits for blocks that are being computed."""
        pool, size = self.table.pool, self.limits.block_size
        if self.table.running and self._is_stuck():
            return False
        hit, windows = self._lookup_prefix(request), self.table.windows
        seen: list[int] = []
        num_known, snapshot = len(hit), 0
        if self._snapshots is not None:
            count, snapshot = self._snapshots.find(request, num_known)
            del hit[count:]
        if windows is not None:
            count, seen = windows.lookup(request, num_known)
            del hit[count:]
        if self._is_coming(request, len(hit), now):
            if len(now.aside) == _MAX_ASIDE:
                return False
            self.table.waiting.remove(request)
            now.aside.append(request)
            return True
        start = len(hit) * size
        if now.starved and request.mm_inputs:
            return False  # newcomers' items would take all room that comes free while they come
        if self._snapshots is not None:
            self._snapshots.plan_cuts(request, start, num_known * size)
        window = self._window(request, start, now)
        if window is None:
            return True
        if window.num_tokens == 0:
            now.blocked = now.blocked or request
            return False
        # Room for the whole sequence must be free, not only for this chunk: a prompt that is
        # admitted piecemeal would soon preempt others or itself.
        more = -(-request.num_tokens // size) - len(hit)
        fits = more + pool.num_unused(hit) <= pool.num_free_blocks
        if not fits or (windows is not None and not windows.fits(more, seen)):
            if self.table.running:
                self._stuck_head = (request.request_id, self.table.free_blocks)
                return False
            self.table.fail(request, self.table.kv_too_small(request))
            return True
        self._stuck_head = ("", ())
        self.table.waiting.remove(request)
        pool.share(hit)
        if windows is not None:
            windows.start(request, len(hit), seen, num_known)
        if snapshot and self._snapshots is not None:
            self._snapshots.use(snapshot)
        request.block_ids = hit
        request.num_published = len(hit)
        request.status = Status.RUNNING
        self.table.running.append(request)
        if now.computing is not None:
            now.computing.append(request)
        self.table.count_admission(request, start, num_known * size)
        need = self._blocks_to_add(request, start + window.num_tokens)
        self._commit(request, start, window, need, now, snapshot)
        return True

    def _lookup_prefix(self, request: Request) -> list[int]:
        if not self.table.is_caching:
            return []
        size = self.limits.block_size
        most = max_hit_blocks(request, size)
        hit = self.table.pool.lookup(request.block_hashes, most)
        if self.traits.bidirectional == "item" and hit:
            del hit[cut_to_groups(request.mm_inputs, len(hit), size) :]
        return hit

    def _is_coming(self, request: Request, num_hit: int, now: _Pass) -> bool:
        """Whether a running request is about to compute blocks that this one lacks, and more of
        them than this one would have left to do: computing both at once would be twice the work."""
        size, mine = self.limits.block_size, request.block_hashes
        # Outputs that it made while it was withdrawn have no names.
        most = min(max_hit_blocks(request, size), len(mine))
        if not self.table.is_caching or num_hit >= most:
            return False
        if now.computing is None:
            now.computing = [
                entry for entry in self.table.running
                if entry.num_published * size + size <= entry.num_prompt_tokens
            ]  # fmt: skip
        for entry in now.computing:
            theirs = entry.block_hashes
            if self._snapshots is None and entry.num_published > num_hit:
                continue
            if len(theirs) <= num_hit or theirs[num_hit] != mine[num_hit]:
                continue
            end, last = num_hit + 1, min(most, len(theirs))
            while end < last and theirs[end] == mine[end]:
                end += 1
            if 2 * end < request.num_tokens / size + num_hit:
                continue
            if self._snapshots is not None:
                given = now.scheduled.get(entry.request_id)
                reach = entry.num_computed + (given.num_scheduled_tokens if given else 0)
                if not self._snapshots.promise(entry, reach, end * size):
                    continue
            return True
        return False

    def _commit(
        self, request: Request, start: int, window: Window, num_new_blocks: int, now: _Pass,
        snapshot: int = 0,
    ) -> None:  # fmt: skip
        """Takes blocks and encoder outputs and writes the request into the plan. `snapshot`: where
        a new one's recurrent state comes from."""
        if num_new_blocks:
            self.table.take_blocks(request, num_new_blocks)
        request.num_computed = start
        if window.take:
            self._note_encoder_wait(request)
        for index in window.take:
            where, _ = self.table.encoder.allocate(request, index, window.keep_host)
            entry = request.mm_inputs[index]
            if where == "absent":
                embeds = request.mm_embeds[index]
                now.encode[entry.mm_hash] = EncoderInput(
                    entry.mm_hash, entry.modality, embeds, request.values[index]
                )
                self.encoding[entry.mm_hash] = request.request_id
                request.num_encoded += not request.num_preemptions
            else:
                request.num_encoder_hits += not request.num_preemptions
        now.compute_left -= window.compute_embeds
        now.tokens_left = self._tokens_beside(request, window, now)
        now.has_prompt = now.has_prompt or window.num_tokens > 1
        if not request.known_to_runner:
            request.known_to_runner = True
            now.new[request.request_id] = NewRequest(
                request.request_id, request.token_ids.copy(), request.num_prompt_tokens,
                request.mm_inputs, request.values, request.sampling, snapshot,
                request.lora.digest if request.lora is not None else b"",
            )  # fmt: skip
        request.step = now.step
        now.tokens_left -= window.num_tokens
        end = start + window.num_tokens
        now.scheduled[request.request_id] = ScheduledRequest(
            request.request_id, start, window.num_tokens, request.block_ids,
            end == request.num_tokens,
            0 if self._snapshots is None else self._snapshots.take(request, end),
            request.window_ids, request.window_first,
        )  # fmt: skip

    def _note_encoder_wait(self, request: Request) -> None:
        """Its next items fit: how long they had not; 0 for those that never waited."""
        since, request.encoder_since = request.encoder_since, 0.0
        waited = max(self.table.clock() - since, 0.0) if since else 0.0
        self.table.stats.observed.encoder_wait_seconds.observe(waited)

    def _watch_progress(self, now: _Pass) -> None:
        """A pass that computes nothing although somebody waits must not repeat itself: the state
        it saw will be the same next time. The request that blocks is failed by name."""
        if now.scheduled or not self.table.requests:
            self._idle_passes = 0
            return
        self._idle_passes += 1
        self.table.stats.num_empty_passes += 1
        if self._idle_passes < _MAX_IDLE_PASSES:
            return
        self._idle_passes = 0
        self.table.stats.num_no_progress += 1
        culprit = now.blocked or (
            self.table.running[0] if self.table.running else self.table.waiting.head()
        )
        encoder = self.table.encoder
        text = (
            f"no step can compute a token of this request: {culprit.num_computed} of "
            f"{culprit.num_tokens} tokens computed, {self.table.pool.num_free_blocks} KV blocks "
            f"and {encoder.num_free_embeds + encoder.num_idle_embeds} encoder outputs free"
        )
        self.table.fail(culprit, EngineFailure(text))

    def _finish_pass(self, now: _Pass) -> StepPlan:
        self.table.in_runner.update(now.new)
        moves = self.table.encoder.take_moves()
        gone, self.table.gone = self.table.gone, []
        return StepPlan(
            now.step, list(now.new.values()), list(now.scheduled.values()),
            [now.encode[mm_hash] for mm_hash in moves.encode],
            moves.free, moves.store, moves.load, moves.drop_host, gone,
        )  # fmt: skip
