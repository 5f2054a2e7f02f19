"""The engine's scheduler over a bench's runner, and prompts that go on from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from tests.support.models.bench import NUM_BLOCKS, NUM_SNAPSHOTS, Bench
from tests.support.models.step_driver import Job
from tests.support.models.tiny_checkpoints import Prompt


class Engine:
    """A scheduler with cold caches over a bench's runner."""

    def __init__(self, one: Bench, **limits) -> None:
        settings = {
            "num_blocks": NUM_BLOCKS, "block_size": 8, "max_num_batched_tokens": 29,
            "max_num_seqs": 6, "max_model_len": 600, "encoder_compute_embeds": 512,
            "encoder_cache_embeds": 512, "num_snapshots": NUM_SNAPSHOTS, "snapshot_tokens": 24,
        }  # fmt: skip
        self.one = one
        self.scheduler = Scheduler(
            SchedulerLimits(**{**settings, **limits}), one.runner.traits, clock=lambda: 1.0
        )

    def run(self, *jobs: Job) -> list[int]:
        """The prompt tokens that each job took from the cache."""
        requests = {}
        for job in jobs:
            requests[job.request_id] = Request(
                job.request_id, list(job.tokens), job.sampling, mm_inputs=job.mm_inputs,
                num_prompt_tokens=len(job.prompt), values=job.values,
            )  # fmt: skip
            self.scheduler.add(requests[job.request_id])
        by_name = {job.request_id: job for job in jobs}
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            self.scheduler.update(plan, self.one.runner.execute(plan))
            for request, output in self.scheduler.take_outputs():
                assert output.error is None, output.error
                by_name[request.request_id].tokens.extend(output.token_ids)
            self.scheduler.check_integrity()
            self.one.runner.check_integrity()
        return [request.num_cached_tokens for request in requests.values()]


def with_tail(one: Bench, prompt: Prompt, seed: int, count: int = 11) -> Prompt:
    """The same prompt, and `count` more tokens."""
    more = one.prompt(seed, [], num_text=count).ids[:count]
    return replace(prompt, ids=[*prompt.ids, *more])


def converse(engine: Engine, prompt: Prompt, cut: int) -> tuple[dict[str, int], int]:
    """Asks a prompt twice, then another question behind all but its last `cut` tokens, then the
    next turn after the first answer. Every answer's logits are compared with a cold run's.

    Returns the prompt tokens that each found in the cache, and how many tokens stood before the
    last of the first answer.
    """
    one, hits = engine.one, {}

    def ask(label: str, asked: Prompt) -> Job:
        job = one.job(label, asked, ignore_eos=True)
        (hits[label],) = engine.run(job)
        one.check(job, asked)
        return job

    first = ask("first", prompt)
    ask("again", prompt)
    ask("other question", with_tail(one, replace(prompt, ids=prompt.ids[:-cut]), 21))
    ask("next turn", with_tail(one, replace(prompt, ids=list(first.tokens)), 22))
    return hits, len(prompt.ids) + len(first.outputs) - 1


def goes_on_elsewhere(one: Bench, prompt: Prompt, make: Callable[[Bench], Engine]) -> None:
    """What a migration does: prompt and tokens so far arrive at an engine that has cold caches, and
    at one that has answered the prompt. Both end as the first engine did."""
    whole = one.job("whole", prompt, ignore_eos=True)
    make(one).run(whole)
    for label, engine in (("cold", make(one)), ("warm", make(one))):
        if label == "warm":
            engine.run(one.job("before", prompt, ignore_eos=True))
        rest = one.job(label, prompt, ignore_eos=True)
        rest.tokens = whole.tokens[:-3]
        engine.run(rest)
        assert rest.tokens == whole.tokens
