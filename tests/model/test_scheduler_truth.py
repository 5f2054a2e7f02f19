"""The real scheduler drives the real model layer under pressure; tokens must not change.

Few KV blocks (preemption), small chunks, a small encoder cache with a host tier, shared prefixes
and pictures: each request's greedy tokens must equal those it makes alone without any cache.
"""

from __future__ import annotations

import random

import pytest

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.plan.sampling import SamplingParams

NUM_OUTPUTS = 24


def make_scheduler(one, **changes) -> Scheduler:
    settings = {
        "num_blocks": 128, "block_size": one.runner.block_size, "max_num_batched_tokens": 512,
        "max_num_seqs": 4, "max_model_len": 400, "encoder_compute_embeds": 512,
        "encoder_cache_embeds": 512,
    }  # fmt: skip
    return Scheduler(
        SchedulerLimits(**{**settings, **changes}), one.runner.traits, clock=lambda: 1.0
    )


def run(one, scheduler: Scheduler, jobs) -> dict[str, list[int]]:
    made = {}
    for job in jobs:
        made[job.request_id] = []
        sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
        scheduler.add(
            Request(
                job.request_id, list(job.prompt), sampling,
                num_prompt_tokens=len(job.prompt), mm_inputs=job.mm_inputs, values=job.values,
            )
        )  # fmt: skip
    for _ in range(2000):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule()
        scheduler.update(plan, one.runner.execute(plan))
        for request, output in scheduler.take_outputs():
            assert output.error is None, output.error
            made[request.request_id].extend(output.token_ids)
        scheduler.check_integrity()
    assert not scheduler.has_work
    one.runner.check_integrity()
    return made


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "idefics3", "gemma3"])
def test_pressure_does_not_change_tokens(bench, name) -> None:
    one = bench(name)
    jobs, rng = [], random.Random(3)
    for number in range(10):
        kinds = sorted(one.case.items)
        items = [(rng.choice(kinds), rng.randint(1, 3)) for _ in range(rng.randint(0, 2))]
        jobs.append(one.job(f"r{number}", one.prompt(number % 4, items, num_text=20)))
    alone = {}
    for job in jobs:
        alone.update(run(one, make_scheduler(one, prefix_caching=False), [job]))
    largest = max((sum(i.placeholder.num_embeds for i in j.mm_inputs) for j in jobs), default=1)
    longest = max(len(job.prompt) for job in jobs)
    budget = max(i.placeholder.length for j in jobs for i in j.mm_inputs) + 4
    scheduler = make_scheduler(
        one,
        num_blocks=6 + -(-(longest + NUM_OUTPUTS) // one.runner.block_size),
        max_num_batched_tokens=budget,
        encoder_cache_embeds=largest,
        encoder_compute_embeds=largest,
        encoder_host_bytes=one.runner.traits.embed_bytes * largest * 2,
    )
    together = run(one, scheduler, jobs)
    assert together == alone
    assert scheduler.stats.num_preemptions > 0
    for _ in range(2):  # all blocks are warm now: nearly everything is a hit
        assert run(one, scheduler, jobs[-1:]) == {jobs[-1].request_id: alone[jobs[-1].request_id]}
    assert scheduler.stats.num_prefix_hit_tokens > 0
    assert scheduler.pool.num_used_blocks == 0
