"""The engine's scheduler over the real runner, under pressure: tokens and logits stay the same.

Few KV blocks (preemption), an encoder cache of about one item (eviction, host tier, encoding
again) and a small odd token budget, several rounds of requests that share prompts and items.
"""

from __future__ import annotations

import pytest

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request

pytestmark = pytest.mark.model


SPARE_BLOCKS = 3


def submit(scheduler: Scheduler, job, seconds: float) -> None:
    scheduler.add(
        Request(
            job.request_id,
            list(job.prompt),
            job.sampling,
            num_prompt_tokens=len(job.prompt),
            mm_inputs=job.mm_inputs,
            values=job.values,
            arrival_seconds=seconds,
        )
    )


@pytest.mark.parametrize(
    ("name", "host_bytes", "run_ahead"),
    [
        ("llama", 0, False),
        ("llama", 0, True),
        ("llava", 0, False),
        ("llava", 1 << 20, False),
        ("idefics3", 0, False),
        ("qwen2_vl", 0, False),
        ("qwen2_vl", 0, True),
        ("qwen3_vl", 1 << 20, False),
        ("gemma3", 0, False),
        ("paligemma", 0, False),
        ("voxtral", 0, False),
        ("gemma4", 0, False),
        ("gemma4", 1 << 20, True),
        ("gemma4_large", 0, False),
        ("lfm2", 0, True),
        ("qwen3_5", 0, False),
        ("qwen3_5", 0, True),
    ],
)
def test_equals_transformers_under_pressure(
    name: str, host_bytes: int, run_ahead: bool, bench
) -> None:
    """`run_ahead`: as the engine's loop does it, a step is submitted before the last one's result
    is taken; the runner reads the missing tokens from its last draw."""
    one = bench(name)
    clock = iter(range(1, 10_000))
    kinds = list(one.case.items)[:1]
    rounds = [[(kind, 1) for kind in kinds], [(kind, 2) for kind in kinds], []]
    prompts = {f"{turn}-{i}": one.prompt(40 + i % 4, rounds[i % 3], num_text=14) for turn in (0, 1)
               for i in range(6)}  # fmt: skip
    largest = max((m.placeholder.num_embeds for p, prompt in prompts.items()
                   for m in one.job(p, prompt).mm_inputs), default=1)  # fmt: skip
    limits = SchedulerLimits(
        num_blocks=(max(len(p.ids) for p in prompts.values()) + 6) // 8 + SPARE_BLOCKS,
        block_size=8,
        max_num_batched_tokens=max(one.case.budget, 23),
        max_num_seqs=4,
        max_model_len=100,
        encoder_compute_embeds=largest,
        encoder_cache_embeds=largest,
        encoder_host_bytes=host_bytes,
        num_snapshots=6,
        snapshot_tokens=16,
    )
    scheduler = Scheduler(limits, one.runner.traits, clock=lambda: float(next(clock)))
    jobs = {key: one.job(key, prompt, ignore_eos=True) for key, prompt in prompts.items()}
    moves = {"encode": 0, "load": 0, "free": 0}
    under_way, num_ahead = None, 0
    for turn in ("0", "1"):
        for key, job in jobs.items():
            if key.startswith(turn):
                submit(scheduler, job, 0.0)
        while scheduler.has_work or under_way is not None:
            if under_way is None:
                plan = scheduler.schedule()
                under_way = plan, one.runner.submit(plan)
            plan, running = under_way
            ahead = scheduler.plan_ahead(plan) if run_ahead else None
            under_way = None if ahead is None else (ahead, one.runner.submit(ahead))
            moves["encode"] += len(plan.encode)
            moves["load"] += len(plan.load_encoder)
            moves["free"] += len(plan.free_encoder)
            scheduler.update(plan, running.result())
            if ahead is not None:
                num_ahead += 1
                scheduler.adopt(ahead)
            for request, output in scheduler.take_outputs():
                assert output.error is None, output.error
                jobs[request.request_id].tokens.extend(output.token_ids)
            scheduler.check_integrity()
            one.runner.check_integrity()
            assert one.runner.store.embeds_on_device() <= limits.encoder_cache_embeds
    assert scheduler.stats.num_preemptions > 0
    assert (num_ahead > 0) == run_ahead
    if one.runner.states.shapes:
        assert scheduler.stats.num_prefix_hit_tokens > 0
    for key, job in jobs.items():
        one.check(job, prompts[key])
    if kinds:
        assert moves["free"] > 0
        assert (moves["load"] > 0) == bool(host_bytes)
