"""A scheduler and a fake runner, driven by hand: the engine without sockets, threads or clocks.

Used by tests, the simulator and the micro-benchmarks. Time is a counter; every step can check all
books.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.testing.fake_runner import (
    FAKE_TRAITS,
    FakeRunner,
    reference_embedding,
    reference_finish,
    reference_tokens,
)
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import MMInput, ModelTraits, RunningStep, StepPlan
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.messages import FirstOutput


class FakeClock:
    """Monotonic seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def image(name: str, offset: int, length: int, num_embeds: int = 0) -> tuple[MMInput, bytes]:
    """An item of `length` tokens whose last `num_embeds` (default all) take encoder outputs, and
    a value for it. Equal names are equal content."""
    runs = ((length - num_embeds, num_embeds),) if num_embeds else ((0, length),)
    key = name.encode().ljust(32, b".")
    return MMInput(key, 0, PlaceholderRange(offset, length, runs)), b"value of " + name.encode()


class Drive:
    """One engine's core under a hand crank.

    Args:
        limits: anything of SchedulerLimits; the defaults are small. num_blocks and
            num_window_blocks count those that requests can have.
        check: check all books after each step.
        costs: see FakeRunner.
        run_ahead: submit steps ahead of results wherever the scheduler plans them.
    """

    def __init__(
        self,
        *,
        traits: ModelTraits = FAKE_TRAITS,
        check: bool = True,
        run_ahead: bool = False,
        costs: tuple[float, float, float] = (0.0, 0.0, 0.0),
        **limits: object,
    ) -> None:
        settings: dict[str, object] = {
            "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8,
            "max_model_len": 200, "encoder_compute_embeds": 16, "encoder_cache_embeds": 32,
        }  # fmt: skip
        settings.update(limits)
        settings["num_blocks"] += 1  # type: ignore[operator]
        if settings.get("num_window_blocks"):
            settings["num_window_blocks"] += 1  # type: ignore[operator]
        self.limits = SchedulerLimits(**settings)  # type: ignore[arg-type]
        self.clock = FakeClock()
        self.scheduler = Scheduler(self.limits, traits, clock=self.clock)
        self.runner = FakeRunner(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            traits=traits,
            encoder_cache_embeds=self.limits.encoder_cache_embeds,
            costs=costs,
            num_window_blocks=self.limits.num_window_blocks,
            window=self.limits.window,
        )
        self.check = check
        self.run_ahead = run_ahead
        self.num_ahead = 0
        self._under_way: tuple[StepPlan, RunningStep] | None = None
        self.plans: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.embeddings: dict[str, bytes] = {}
        self.finish: dict[str, str] = {}
        self.first: dict[str, FirstOutput] = {}
        self.errors: dict[str, tuple[str, str]] = {}
        self.aborted: set[str] = set()

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        items: Sequence[tuple[MMInput, bytes]] = (),
        *,
        max_tokens: int = 4,
        sampling: SamplingParams | None = None,
        emitted: Sequence[int] = (),
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> Request:
        sampling = sampling or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            request_id,
            [*token_ids, *emitted],
            sampling,
            num_prompt_tokens=len(token_ids),
            mm_inputs=tuple(entry for entry, _ in items),
            values=tuple(value for _, value in items),
            priority=priority,
            cache_salt=cache_salt,
            arrival_seconds=self.clock(),
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.prompts[request_id] = list(request.token_ids)
        self.outputs[request_id] = []
        self._collect()
        return request

    def abort(self, request_id: str) -> Request | None:
        """None when it is unknown or already over."""
        aborted = self.scheduler.abort(request_id)
        if aborted is not None:
            self.aborted.add(request_id)
        return aborted

    def step(self) -> StepPlan:
        """Plans, runs and takes in one step (what was submitted ahead first); returns its plan."""
        running: RunningStep | None = None
        if self._under_way is not None:
            (plan, running), self._under_way = self._under_way, None
        else:
            streams, plan = self.scheduler.split(self.scheduler.schedule())
            self._interlude(streams)
            if plan.scheduled or plan.finished or plan.free_encoder or plan.drop_host_encoder:
                running = self.runner.submit(
                    plan, lambda: self._interlude(self.scheduler.plan_streams(plan))
                )
        self.clock.now += 0.01
        if running is not None:
            ahead = self.scheduler.plan_ahead(plan) if self.run_ahead else None
            if ahead is not None:
                self.num_ahead += 1
                self._under_way = ahead, self.runner.submit(ahead)
            self.scheduler.update(plan, running.result())
            if ahead is not None:
                self.scheduler.adopt(ahead)
        self._collect()
        self.plans.append(plan)
        if plan.slice_seconds:
            self._interlude(self.scheduler.plan_streams(plan))
        if self.check:
            self.scheduler.check_integrity()
        return plan

    def _interlude(self, plan: StepPlan | None) -> None:
        """See `EngineCore`."""
        if plan is not None:
            self.scheduler.update(plan, self.runner.submit(plan).result())
            self._collect()
            self.plans.append(plan)

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and self._under_way is None:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.running}")

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        items: Sequence[tuple[MMInput, bytes]] = (),
        **options: Any,
    ) -> int:
        """Runs one request to its end; the prompt tokens that it took from the cache."""
        request = self.add(name, prompt, items, **options)
        self.run()
        assert (self.outputs[name], self.finish[name]) == self.expected(name)
        return request.num_cached_tokens

    def expected(self, request_id: str) -> tuple[list[int], str]:
        """Tokens of a request without any cache, and how it ends. Of one that was aborted ("") or
        failed, as many as it had made."""
        request, sampling = self.requests[request_id], self.requests[request_id].sampling
        finish = "" if request_id in self.aborted else self.finish.get(request_id, "not at all")
        is_cut = finish in ("", "error")
        if sampling.pooling:
            return [], finish if is_cut else "stop"
        emitted = self.prompts[request_id][request.num_prompt_tokens :]
        room = self.limits.max_model_len - request.num_prompt_tokens
        most = min(sampling.max_tokens, room) - len(emitted)
        made = reference_tokens(
            self.prompts[request_id],
            request.mm_inputs,
            request.values,
            sampling,
            len(self.outputs[request_id]) if is_cut else max(most, 0),
            self.runner.traits,
        )
        if is_cut:
            return made, finish
        kept, finish = reference_finish([*emitted, *made], sampling, self.runner.traits)
        return kept[len(emitted) :], finish

    def expected_embedding(self, request_id: str) -> bytes:
        request = self.requests[request_id]
        return reference_embedding(
            self.prompts[request_id], request.mm_inputs, request.values, request.sampling.pooling
        )

    def assert_done(self) -> None:
        """Every request ended with the tokens or the embedding it must, and nothing leaked."""
        for request_id, tokens in self.outputs.items():
            finish = self.finish.get(request_id, "")
            assert (tokens, finish) == self.expected(request_id), request_id
            assert (finish == "error") == (request_id in self.errors), request_id
            is_pooled = bool(self.requests[request_id].sampling.pooling) and finish == "stop"
            found = self.embeddings.get(request_id)
            assert found == (self.expected_embedding(request_id) if is_pooled else None), request_id
        scheduler, runner = self.scheduler, self.runner
        assert not scheduler.num_requests
        assert scheduler.pool.num_used_blocks == 0
        assert scheduler.windows is None or scheduler.windows.pool.num_used_blocks == 0
        assert scheduler.encoder.num_used_embeds == 0
        snapshots = scheduler.snapshots
        assert snapshots is None or snapshots.pool.num_used_blocks == 0
        assert not runner.request_ids
        moves = scheduler.encoder.take_moves()
        assert not moves.encode
        assert not moves.load
        for mm_hash in moves.free:
            runner.device.pop(mm_hash, None)
        assert len(runner.device) == len(scheduler.encoder)
        for mm_hash in [*moves.store, *moves.drop_host]:
            runner.host.pop(mm_hash, None)
        kept = set(scheduler.encoder.host) - set(moves.store)
        assert set(runner.host) == kept

    def _collect(self) -> None:
        for request, output in self.scheduler.take_outputs():
            self.outputs[request.request_id].extend(output.token_ids)
            if output.first is not None:
                self.first[request.request_id] = output.first
            if output.embedding:
                self.embeddings[request.request_id] = output.embedding
            if output.finish:
                self.finish[request.request_id] = output.finish
            if output.error is not None:
                self.errors[request.request_id] = output.error


def assert_alike(fill: Callable[[Drive], None], usual: Drive, other: Drive) -> tuple[Drive, Drive]:
    """Both serve the requests that `fill` adds, to their ends, and say the same."""
    for drive in (usual, other):
        fill(drive)
        drive.run()
        drive.assert_done()
    assert other.outputs == usual.outputs
    assert other.finish == usual.finish
    assert other.errors == usual.errors
    return usual, other
