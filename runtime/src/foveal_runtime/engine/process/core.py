"""The engine's loop body without sockets or threads: messages in, one step, messages out.

Used by `server` (one thread calls everything here) and by tests. Joins the mirror's receiver, the
scheduler and the model runner: restores values, splices prompts, runs steps, answers sessions.
Never blocks except inside the runner's step.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from foveal_runtime.engine.caches.warm import WarmSet
from foveal_runtime.engine.events.log import EventLog
from foveal_runtime.engine.process.controls import Controls
from foveal_runtime.engine.process.evidence import StepRecord, is_new, suspects_of
from foveal_runtime.engine.process.load_reports import LoadReports, LoadSnapshot
from foveal_runtime.engine.process.splice import read_items, read_tokens, splice
from foveal_runtime.engine.process.value_release import ValueRelease
from foveal_runtime.engine.scheduler.outputs import in_messages
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import ModelRunner, RunnerLost, RunningStep, StepPlan
from foveal_runtime.mirror.admission import RequestKey
from foveal_runtime.mirror.messages import (
    Bye,
    Death,
    DownMessage,
    Hello,
    Req,
    RequestId,
    SessionId,
    Up,
)
from foveal_runtime.mirror.receiver import ReadyRequest, Receiver
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.errors import FovealError, InvalidRequest
from foveal_runtime.plan.media import MMHash
from foveal_runtime.telemetry.ages import EvictionAges
from foveal_runtime.telemetry.ghosts import GhostLists
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineOutput, Outputs, RequestBody

_LOG = logging.getLogger(__name__)
NOTE_DELAY_SECONDS = 0.05


class EngineCore:
    """One engine.

    Args:
        send: hands a message for one frontend to whoever owns the socket.
        events: hears of what the caches hold; None = no event stream.
        warm: encoder outputs that outlive the process; None = none do.
        unpin_encoded: values are unpinned as soon as their items are encoded.
        run_ahead: a step that only decodes is submitted before the result of the one before it is
            taken, so that the device never waits for the host.
        record: where the work under way is noted; None: in memory alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        receiver: Receiver,
        *,
        send: Callable[[str, DownMessage], None],
        clock: Callable[[], float],
        events: EventLog | None,
        warm: WarmSet | None,
        unpin_encoded: bool,
        run_ahead: bool,
        record: StepRecord | None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.receiver = receiver
        self.stats = scheduler.stats
        self._vocab_size = runner.traits.vocab_size
        self.is_draining = False
        self._send = send
        self._clock = clock
        self._events = events
        self._warm = warm
        self.on_interlude: Callable[[], None] = lambda: None  # a step ended inside another
        self._run_ahead = run_ahead
        self._under_way: tuple[StepPlan, RunningStep] | None = None  # submitted ahead
        self.record = record or StepRecord(receiver.boot)
        self._trial = ""  # the request on trial that came last
        self._held: deque[Request] = deque()  # to be tried next, one after the other
        self._values = ValueRelease(scheduler, receiver, is_on=unpin_encoded)
        self.value_ghosts = GhostLists(receiver.store.capacity_bytes)
        self._controls = Controls(scheduler, receiver, runner.loras, self.value_ghosts)
        self.value_ages = EvictionAges(clock)
        receiver.store.watch = self.value_ages
        self._ids: dict[RequestKey, str] = {}  # of requests the scheduler has
        self._serial = itertools.count(1)
        self._outputs: dict[str, list[EngineOutput]] = {}
        self._note_at: float | None = None
        self.reports = LoadReports(lambda: self._controls.loras, NOTE_DELAY_SECONDS)
        self._warned_bypass = False
        # When requests with items arrived that still wait for values; the oldest is first.
        self._arrived: dict[RequestKey, float] = {}

    # ---- messages in ----------------------------------------------------------------------------

    def on_message(
        self, fid: str, message: Up, values: Mapping[MMHash, Value] | None = None
    ) -> None:
        """Takes in one decoded message of frontend `fid`, with the values it carries."""
        if isinstance(message, Hello):
            if self.is_draining:
                self._send(fid, Bye(message.sid, "draining"))
                return
            self.reports.forget(fid)
        if isinstance(message, Req) and message.items:
            self._arrived[fid, message.rid] = self._clock()
        for answer in self.receiver.on_message(fid, message, values):
            self._send(fid, answer)
        self._after_receiver()

    def on_session_lost(self, fid: str, sid: SessionId, reason: str) -> None:
        """The link of `fid` is dead: its requests end here; it will issue them again. Ignored
        when a newer session has taken the place of `sid` meanwhile."""
        session = self.receiver.sessions.get(fid)
        if session is None or session.sid != sid:
            return
        self.receiver.on_session_lost(fid, reason)
        self.reports.forget(fid)
        self._after_receiver()

    def end_session(self, fid: str, reason: str, death: Death | None = None) -> None:
        """Ends the session of a frontend that breaks the rules, and tells it."""
        session = self.receiver.sessions.get(fid)
        if session is not None:
            self._send(fid, Bye(session.sid, reason, death))
            self.on_session_lost(fid, session.sid, reason)

    def load_warm_set(self) -> None:
        """Takes over what the last process saved; before the first message."""
        if self._warm is not None:
            began = self._clock()
            try:
                loaded = self._warm.load(self.scheduler.encoder, self.runner)
            except Exception:  # whatever lies there, the engine starts
                _LOG.exception("the warm set is not used")
                return
            if self._events is not None:
                self._events.note_adopted(*loaded)
            _LOG.info("warm set: %d encoder outputs on the device and %d in the host tier in %.1f "
                      "s", len(loaded.device), len(loaded.host), self._clock() - began)  # fmt: skip

    def save_warm_set(self) -> None:
        """After the last step: what the next process may take over."""
        if self._warm is not None:
            began = self._clock()
            count = self._warm.save(self.scheduler.encoder, self.runner)
            _LOG.info("warm set: saved %d encoder outputs in %.1f s", count, self._clock() - began)

    def drain(self) -> None:
        """No new sessions from now on; frontends hear it with the next load report."""
        if not self.is_draining:
            self.is_draining = True
            self._note_at = self._clock()

    def close_sessions(self) -> None:
        """Says goodbye to every frontend; unfinished requests go on elsewhere."""
        self.flush()
        for fid in list(self.receiver.sessions):
            self.end_session(fid, "draining")

    def on_failure(self, error: Exception) -> None:
        """Frontends hear what the engine was doing when it failed."""
        death = self.record.death(is_own=not isinstance(error, RunnerLost) or error.is_own)
        for fid in list(self.receiver.sessions):
            self.end_session(fid, "engine_failed", death)

    # ---- the loop body --------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A step is wanted now, or one is under way."""
        return self.scheduler.has_work or self._under_way is not None

    @property
    def num_unfinished(self) -> int:
        """Requests here, those that still wait for values included."""
        return len(self.receiver.admission.requests)

    def oldest_wait_seconds(self) -> float:
        """Age of the oldest request that waits for values."""
        here = self.receiver.admission.requests
        for key, arrived in self._arrived.copy().items():  # another thread may ask
            if key in here:
                return self._clock() - arrived
        return 0.0

    def seconds_to_note(self) -> float | None:
        """When `flush` is due; None when there is nothing to tell anybody."""
        return None if self._note_at is None else max(self._note_at - self._clock(), 0.0)

    def step(self) -> None:
        """Runs one step if somebody wants one, then sends what there is to say."""
        if self.has_work:
            self.flush()  # nobody who is asked for a value waits for the step to end
            began = self._clock()
            plan, running = self._next_step()
            scheduled = self._clock()
            if running is not None:
                ahead = self.scheduler.plan_ahead(plan) if self._run_ahead else None
                if ahead is not None:
                    self._under_way = ahead, self._submit(ahead)
                self._take_in(plan, running, began, scheduled)
                self._interlude(self.scheduler.plan_streams(plan) if plan.slice_seconds else None)
                if ahead is not None:
                    self.scheduler.adopt(ahead)
            if self._values.recall():
                self._drop_aborted()
            self._start_ready()
        self.flush()

    def _next_step(self) -> tuple[StepPlan, RunningStep | None]:
        """The step that was submitted ahead, else a new one; None when it would do nothing."""
        if self._under_way is not None:
            found, self._under_way = self._under_way, None
            return found
        plan = self.scheduler.schedule()
        self._collect()
        streams, plan = self.scheduler.split(plan)
        self._interlude(streams)
        return plan, self._submit(plan) if plan.scheduled or plan.moves_something else None

    def _submit(self, plan: StepPlan, blamed: StepPlan | None = None) -> RunningStep:
        found = map(self.scheduler.get, [e.request_id for e in (blamed or plan).scheduled])
        self.record.begin(suspects_of([request for request in found if request is not None]))
        return self.runner.submit(
            plan, lambda: self._interlude(self.scheduler.plan_streams(plan), plan)
        )

    def _interlude(self, plan: StepPlan | None, under_way: StepPlan | None = None) -> None:
        """A step of streams alone, around or in the middle of one that encodes: who is in that one
        is to blame if the process dies."""
        if plan is not None:
            began = self._clock()
            self._take_in(plan, self._submit(plan, under_way), began, began, newest=True)
            self.flush()
            self.on_interlude()

    def _take_in(
        self, plan: StepPlan, running: RunningStep, began: float, scheduled: float, *,
        newest: bool = False,
    ) -> None:  # fmt: skip
        result = running.result()
        executed = self._clock()
        self.scheduler.update(plan, result)
        self._collect()
        observed = self.stats.observed
        observed.schedule_seconds.observe(scheduled - began)
        observed.execute_seconds.observe(executed - scheduled)
        observed.update_seconds.observe(self._clock() - executed)
        if self._events is not None:
            self._events.note_plan(plan, result)
        self._values.after_step(plan)
        self.record.end(newest=newest)

    def flush(self) -> None:
        """Sends outputs with the mirror's notes, notes that are urgent, and all that are due."""
        receiver, now, load = self.receiver, self._clock(), self._load()
        for fid, goodbye in receiver.take_ended():
            self.reports.forget(fid)
            self._send(fid, goodbye)
        due = self._note_at is not None and self._note_at <= now
        if self._outputs:
            outputs, self._outputs = self._outputs, {}
            for fid in [fid for fid in outputs if fid in receiver.sessions]:
                for part in in_messages(outputs[fid]):
                    self._send_down(fid, load, part)
            if self._note_at is None:
                self._note_at = now + NOTE_DELAY_SECONDS
        behind = self.reports.behind(receiver.sessions, load) if due else []
        turn = self.reports.whose_turn(behind, load, now)
        for fid in list(receiver.sessions):
            if fid in turn:
                self._send_down(fid, load, [])
            elif (due or receiver.wants_immediate_flush(fid)) and (message := receiver.down(fid)):
                self._send(fid, message)
        if due:
            self._note_at = now + NOTE_DELAY_SECONDS if len(behind) > len(turn) else None
        if self._events is not None:
            self._events.flush()

    def _send_down(self, fid: str, load: LoadSnapshot, entries: list[EngineOutput]) -> None:
        raw = codec.encode_outputs(Outputs(tuple(entries), self.reports.tell(fid, load)))
        if (message := self.receiver.down(fid, raw)) is not None:
            self._send(fid, message)

    def _load(self) -> LoadSnapshot:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + len(self.receiver.admission.queue)
        return LoadSnapshot(
            len(scheduler.running), waiting, int(scheduler.kv_usage * 1000), self.is_draining,
            self._controls.lora_version,
        )  # fmt: skip

    # ---- requests -------------------------------------------------------------------------------

    def _after_receiver(self) -> None:
        """Whatever the receiver made ready, gave up or was told to do."""
        self._drop_aborted()
        self._start_ready()
        self._prune_arrivals()
        for control in self.receiver.take_controls():
            self._controls.obey(control)
        if self._note_at is None:
            self._note_at = self._clock() + NOTE_DELAY_SECONDS

    def _drop_aborted(self) -> None:
        for key in self.receiver.take_aborted():
            if (request_id := self._ids.pop(key, None)) is not None:
                self.scheduler.abort(request_id)
            self.receiver.finish(*key)

    def _prune_arrivals(self) -> None:
        """Requests that ended before their values came must not stay here."""
        here = self.receiver.admission.requests
        if len(self._arrived) > 2 * len(here) + 64:
            self._arrived = {key: at for key, at in self._arrived.items() if key in here}

    def _start_ready(self) -> None:
        """Each request that ends may make room for others, so until nobody is ready."""
        while True:
            while (ready := self._values.take_ready()) or self.receiver.admission.lost:
                for entry in ready:
                    self._start(entry)
                self._drop_aborted()
            if not self._held or self._is_trying():
                return
            request = self._held.popleft()
            if (request.session, request.rid) not in self.receiver.admission.requests:
                continue
            if self._values.has_wrong(request):
                self.receiver.requeue(request.session, request.rid)
                continue
            try:
                self._add(request)
            except FovealError as error:
                self._refuse(request.session, request.rid, error)

    def _is_trying(self) -> bool:
        request = self.scheduler.get(self._trial)
        return request is not None and is_new(request)

    def _start(self, ready: ReadyRequest) -> None:
        """Splices a complete request and hands it to the scheduler, or says why not."""
        if self._values.refetch(ready):
            return
        key = (ready.fid, ready.rid)
        if (request_id := self._ids.get(key)) is not None:
            self._values.resume(request_id, ready)
            return
        if ready.bypassed and not self._warned_bypass:
            self._warned_bypass = True
            _LOG.warning(
                "a request's media are larger than the value cache and go past it: they are sent "
                "again each time (caches.ipc_bytes is %d)", self.receiver.store.capacity_bytes,
            )  # fmt: skip
        arrived = self._arrived.pop(key, now := self._clock())
        if ready.items:
            self.stats.observed.values_seconds.observe(now - arrived)
        try:
            body = codec.decode_body(ready.body, len(ready.items))
            self.receiver.refusals.check(body.key, time.time())  # its frontend may not know yet
            with self.record.during(body.key):
                request = self._build(ready, body, arrived)
                if not (request.on_trial and self._is_trying()):
                    self._add(request)
                    return
            self._held.append(request)
        except (codec.DecodeError, FovealError) as error:
            self._refuse(*key, error)

    def _add(self, request: Request) -> None:
        key = request.session, request.rid
        self._ids[key] = request.request_id
        if request.on_trial:
            self._trial = request.request_id
        self.scheduler.add(request)
        self._collect()

    def _refuse(self, fid: str, rid: RequestId, error: FovealError | codec.DecodeError) -> None:
        if isinstance(error, codec.DecodeError):
            error = InvalidRequest(str(error))
        self._ids.pop((fid, rid), None)
        output = EngineOutput(rid, finish="error", error=(error.code, error.message))
        self._outputs.setdefault(fid, []).append(output)
        self.receiver.finish(fid, rid)
        self.stats.finished["error"] += 1
        self.stats.errors[error.code] += 1

    def _build(self, ready: ReadyRequest, body: RequestBody, arrived_seconds: float) -> Request:
        lora_held = self._controls.hold_lora(body.lora)
        prompt, emitted = read_tokens(body, self._vocab_size)
        values = {mm_hash: memoryview(value.data) for mm_hash, value in ready.items.items()}
        items = read_items(values, self._vocab_size)
        longest = self.scheduler.limits.max_model_len - body.sampling.least_outputs
        for mm_hash, whole in ready.items.items():
            self.value_ghosts.query(mm_hash, len(whole.data))
        token_ids, inputs = splice(prompt, body.placements, items, max_tokens=longest)
        return Request(
            f"{ready.rid[0]}.{ready.rid[1]}-{next(self._serial)}",
            token_ids + emitted,
            body.sampling,
            num_prompt_tokens=len(token_ids),
            mm_inputs=inputs,
            values=tuple(values[entry.mm_hash] for entry in inputs),
            rid=ready.rid,
            session=ready.fid,
            priority=body.priority,
            cache_salt=body.cache_salt,
            lora=body.lora,
            lora_held=lora_held,
            read_prefix_cache=body.read_prefix_cache,
            echo_prompt=body.echo_prompt,
            num_mm_hits=ready.num_hits,
            arrival_seconds=arrived_seconds,
            key=body.key,
            on_trial=body.on_trial,
        )

    def _collect(self) -> None:
        """Takes the scheduler's outputs; a finished request's values are unpinned."""
        for request, output in self.scheduler.take_outputs():
            self._outputs.setdefault(request.session, []).append(output)
            if output.finish:
                self._ids.pop((request.session, request.rid), None)
                self.receiver.finish(request.session, request.rid)

    def check_integrity(self) -> None:
        """Asserts that scheduler, receiver, runner and this class agree on who is here."""
        self.scheduler.check_integrity()
        self.receiver.check_integrity()
        self.runner.check_integrity()
        scheduler = self.scheduler
        for ghosts in (self.value_ghosts, scheduler.block_ghosts, scheduler.encoder.ghosts):
            ghosts.check_integrity()
        assert len(self._ids) == self.scheduler.num_requests
        assert self._ids.keys() <= self.receiver.admission.requests.keys()
