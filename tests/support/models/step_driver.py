"""A scheduler of the simplest kind, to drive a runner in tests: it makes step plans.

First come first served, chunked prefill under a token budget, prefix reuse without eviction,
shared encoder outputs. It knows the rules for bidirectional groups. `image_keys=False` leaves the
items out of block hashes, which is the bug that the engine's prefix cache must not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foveal_runtime.engine.types.step import (
    EncoderInput,
    MMInput,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from foveal_runtime.model.runner.encoder import EncoderStore
from foveal_runtime.plan.sampling import SamplingParams


def embeds_on_device(store: EncoderStore) -> int:
    return sum(output.shape[1] for output in store._outputs.values())


@dataclass
class Job:
    """A request as the driver sees it."""

    request_id: str
    prompt: list[int]
    mm_inputs: tuple[MMInput, ...] = ()
    values: tuple[bytes, ...] = ()
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(max_tokens=6, temperature=0.0)
    )
    start_step: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    announced: bool = False
    embedding: bytes = b""
    lora: bytes = b""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.sampling.max_tokens or bool(self.embedding)


class StepDriver:
    def __init__(
        self,
        runner,
        num_blocks: int,
        budget: int = 17,
        *,
        reuse: bool = True,
        image_keys: bool = True,
        bidirectional: str | None = None,
    ) -> None:
        self.runner = runner
        self.size = runner.block_size
        self.budget = budget
        self.reuse = reuse
        self.image_keys = image_keys
        self.lora_keys = True
        self.rule = runner.traits.bidirectional if bidirectional is None else bidirectional
        self.free = list(range(num_blocks - 1, 0, -1))
        self.shared: dict[object, int] = {}
        self.encoded: set[bytes] = set()
        self.num_encodes = 0
        self.step = 0
        self.failed: dict[str, str] = {}
        self.results: list[StepResult] = []
        self.just_finished: list[str] = []

    def run(self, jobs: list[Job], preempt: dict[int, str] | None = None) -> None:
        """Runs all jobs to their end; `preempt` names a request to throw back at a step."""
        first = self.step
        while any(not job.done and job.request_id not in self.failed for job in jobs):
            now = self.step - first
            for job in jobs:
                if (preempt or {}).get(now) == job.request_id and not job.done:
                    job.computed, job.blocks, job.announced = 0, [], False
            self.one_step([j for j in jobs if j.start_step <= now])
            assert now < 500
        self.runner.check_integrity()

    def one_step(self, jobs: list[Job]) -> None:
        plan = StepPlan(self.step, finished=self.just_finished)
        left = self.budget
        taking: list[Job] = []
        for job in jobs:
            if job.done or job.request_id in self.failed or left <= 0:
                continue
            if not job.announced:
                self.announce(job, plan)
            count = self.clip(job, min(left, len(job.tokens) - job.computed))
            if count <= 0:
                continue
            end = job.computed + count
            while len(job.blocks) * self.size < end:
                job.blocks.append(self.free.pop())
            self.encode(job, end, plan)
            plan.scheduled.append(
                ScheduledRequest(
                    job.request_id, job.computed, count, list(job.blocks), end == len(job.tokens)
                )
            )
            job.computed = end
            taking.append(job)
            left -= count
        result = self.runner.execute(plan)
        self.update(taking, result)

    def announce(self, job: Job, plan: StepPlan) -> None:
        job.announced = True
        if self.reuse and job.sampling.reads_prefix:
            self.match(job)
        plan.new.append(
            NewRequest(
                job.request_id,
                list(job.tokens),
                len(job.prompt),
                job.mm_inputs,
                job.values,
                job.sampling,
                lora=job.lora,
            )
        )

    def match(self, job: Job) -> None:
        for number in range((len(job.tokens) - 1) // self.size):
            block = self.shared.get(self.key(job, number))
            if block is None:
                break
            job.blocks.append(block)
        hit = len(job.blocks) * self.size
        while cuts := [begin for begin, end in self.groups(job) if begin < hit < end]:
            hit = cuts[0] // self.size * self.size
        job.blocks = job.blocks[: hit // self.size]
        job.computed = job.num_cached = hit

    def key(self, job: Job, number: int) -> object:
        begin, end = number * self.size, (number + 1) * self.size
        extra = [
            (one.mm_hash, one.placeholder.offset)
            for one in job.mm_inputs
            if one.placeholder.offset < end
        ]
        lora = job.lora if self.lora_keys else b""
        return lora, tuple(job.tokens[:end]), tuple(extra) if self.image_keys else begin

    def groups(self, job: Job) -> list[tuple[int, int]]:
        if self.rule == "prompt":
            return [(0, len(job.prompt))]
        if self.rule == "item":
            return [(m.placeholder.offset, m.placeholder.end) for m in job.mm_inputs]
        return []

    def clip(self, job: Job, count: int) -> int:
        end = job.computed + count
        for begin, stop in self.groups(job):
            if begin < end < stop:
                end = begin
        return end - job.computed

    def encode(self, job: Job, end: int, plan: StepPlan) -> None:
        for one, value in zip(job.mm_inputs, job.values, strict=True):
            place = one.placeholder
            needed = place.offset < end and place.end > job.computed
            if needed and one.mm_hash not in self.encoded:
                self.encoded.add(one.mm_hash)
                self.num_encodes += 1
                plan.encode.append(EncoderInput(one.mm_hash, one.modality, place.num_embeds, value))

    def update(self, jobs: list[Job], result: StepResult) -> None:
        self.step += 1
        self.results.append(result)
        self.failed.update(result.failed)
        by_id = {job.request_id: job for job in jobs}
        for job in jobs:
            for number in range(job.computed // self.size):
                self.shared.setdefault(self.key(job, number), job.blocks[number])
        for pooled in result.pooled:
            by_id[pooled.request_id].embedding = pooled.values
        for sampled in result.sampled:
            by_id[sampled.request_id].tokens.append(sampled.token_id)
        self.just_finished = [j.request_id for j in jobs if j.done]
