"""The engine's scheduler over the real runner, under pressure: tokens and logits stay the same.

Few KV blocks (preemption), an encoder cache of about one item (eviction, host tier, encoding
again) and a small odd token budget, several rounds of requests that share prompts and items.
"""

from __future__ import annotations

import pytest

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from tests.support.models.rerun_capturer import RerunCapturer
from tests.support.models.step_driver import embeds_on_device

SPARE_BLOCKS = 3
STREAM_BLOCKS = 9  # for two requests at a time


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


class Remembered:
    """Guesses for a request that was answered before: what it said then, but for one in five."""

    def __init__(self, job) -> None:
        self.tokens = list(job.tokens)
        for index in range(len(job.prompt) + 2, len(self.tokens), 5):
            self.tokens[index] = 0

    def propose(self, token_ids, count):
        return self.tokens[len(token_ids) :][:count]

    def count(self, num_accepted) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "host_bytes", "way"),
    [
        ("llama", 0, ""),
        ("llama", 0, "ahead"),
        ("llava", 0, ""),
        ("llava", 1 << 20, ""),
        ("idefics3", 0, ""),
        ("qwen2_vl", 0, ""),
        ("qwen2_vl", 0, "ahead"),
        ("qwen3_vl", 1 << 20, ""),
        ("llava", 0, "sliced"),
        ("qwen3_vl", 1 << 20, "sliced"),
        ("voxtral", 0, "sliced"),
        ("gemma3", 0, ""),
        ("paligemma", 0, ""),
        ("voxtral", 0, ""),
        ("gemma4", 0, ""),
        ("gemma4", 1 << 20, "ahead"),
        ("gemma4_large", 0, ""),
        ("lfm2", 0, "ahead"),
        ("nemotron_h", 0, "ahead"),
        ("falcon_h1", 0, ""),
        ("qwen3_5", 0, ""),
        ("qwen3_5", 0, "ahead"),
        ("qwen3_5", 0, "sliced"),
        ("llama", 0, "guessed"),
        ("llava", 0, "guessed"),
        ("qwen2_vl", 0, "guessed"),
        ("qwen2_vl", 0, "recorded"),
        ("mistral_sliding", 0, "recorded"),
        ("gemma3", 0, "guessed"),
        ("gemma4", 0, "guessed"),
    ],
)
def test_equals_transformers_under_pressure(name: str, host_bytes: int, way: str, bench) -> None:
    """As the engine's loop does it. "ahead": a step is submitted before the last one's result is
    taken; the runner reads the missing tokens from its last draw. "sliced": streams go on between
    the encoder's layers. "guessed": everything is asked twice, and the second time guesses of what
    was said are computed beside the last tokens; "recorded": in recorded steps, as on GPUs."""
    one = bench(name)
    is_sliced, run_ahead = way == "sliced", way == "ahead"
    is_guessed = way in ("guessed", "recorded")
    if way == "recorded":
        assert one.runner.record_decoding(RerunCapturer(), max_num_seqs=16, max_model_len=100)
    clock = iter(range(1, 10_000))
    kinds = list(one.case.items)[:1]
    rounds = [[(kind, 1) for kind in kinds], [(kind, 2) for kind in kinds], []]
    prompts = {f"{turn}-{i}": one.prompt(40 + i % 4, rounds[i % 3], num_text=14) for turn in (0, 1)
               for i in range(6)}  # fmt: skip
    if is_guessed:
        prompts.update({f"1-{i}": prompts[f"0-{i}"] for i in range(6)})
    largest = max((m.placeholder.num_embeds for p, prompt in prompts.items()
                   for m in one.job(p, prompt).mm_inputs), default=1)  # fmt: skip
    limits = SchedulerLimits(
        num_blocks=(max(len(p.ids) for p in prompts.values()) + 6) // 8
        + (STREAM_BLOCKS if is_sliced or is_guessed else SPARE_BLOCKS),
        block_size=8,
        max_num_batched_tokens=max(one.case.budget, 99 if is_guessed else 23),
        max_num_seqs=4,
        max_model_len=100,
        encoder_compute_embeds=largest,
        encoder_cache_embeds=largest,
        encoder_host_bytes=host_bytes,
        num_snapshots=6,
        snapshot_tokens=16,
        target_itl_seconds=1e-6 if is_sliced else 0.0,
        slices_encoding=is_sliced,
        num_speculative_tokens=3 if is_guessed else 0,
    )
    scheduler = Scheduler(limits, one.runner.traits, clock=lambda: float(next(clock)))
    jobs = {key: one.job(key, prompt, ignore_eos=True) for key, prompt in prompts.items()}
    moves = {"encode": 0, "load": 0, "free": 0}
    under_way, num_ahead, num_between = None, 0, 0

    def take_in(plan, running) -> None:
        scheduler.update(plan, running.result())
        for request, output in scheduler.take_outputs():
            assert output.error is None, output.error
            jobs[request.request_id].tokens.extend(output.token_ids)

    def between(under_way) -> None:
        nonlocal num_between
        if (streams := scheduler.plan_streams(under_way)) is not None:
            num_between += 1
            take_in(streams, one.runner.submit(streams))

    for turn in ("0", "1"):
        for key, job in jobs.items():
            if key.startswith(turn):
                submit(scheduler, job, 0.0)
                if is_guessed and turn == "1":
                    scheduler.get(key).drafts = Remembered(jobs[key.replace("1-", "0-")])
        while scheduler.has_work or under_way is not None:
            if under_way is None:
                streams, plan = scheduler.split(scheduler.schedule())
                if streams is not None:
                    take_in(streams, one.runner.submit(streams))
                under_way = plan, one.runner.submit(plan, lambda plan=plan: between(plan))
            plan, running = under_way
            ahead = scheduler.plan_ahead(plan) if run_ahead else None
            under_way = None if ahead is None else (ahead, one.runner.submit(ahead))
            moves["encode"] += len(plan.encode)
            moves["load"] += len(plan.load_encoder)
            moves["free"] += len(plan.free_encoder)
            take_in(plan, running)
            if plan.slice_seconds:
                between(plan)
            if ahead is not None:
                num_ahead += 1
                scheduler.adopt(ahead)
            scheduler.check_integrity()
            one.runner.check_integrity()
            assert embeds_on_device(one.runner.store) <= limits.encoder_cache_embeds
    assert scheduler.stats.num_preemptions > 0 or is_sliced or is_guessed
    assert (num_ahead > 0) == run_ahead
    assert (num_between > 0) == is_sliced
    stats = scheduler.stats
    assert (stats.num_draft_tokens > stats.num_accepted_tokens > 5) == is_guessed
    assert (one.runner.num_graph_steps > 5) == (way == "recorded")
    if one.runner.states.shapes and not is_sliced:  # its snapshots depend on how long layers take
        assert scheduler.stats.num_prefix_hit_tokens > 0
    for key, job in jobs.items():
        one.check(job, prompts[key])
    if kinds:
        assert moves["free"] > 0
        assert (moves["load"] > 0) == bool(host_bytes)
