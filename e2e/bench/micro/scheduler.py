"""What one scheduling step costs: schedule + update for many running requests, no model.

    PYTHONPATH=runtime/src python e2e/bench/micro/scheduler.py [--running 1 32 256] [--prompt 2000]

Prints microseconds per step (minimum and median) for steady decode, a request's share of it, and
what admitting a long prompt costs. The runner is a stub that answers each sampling request with one
token. The limit: 1 ms a step at 256 running requests, growing no faster than they do.
"""

from __future__ import annotations

import argparse
import statistics
import time

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import Sampled, StepPlan, StepResult
from foveal_runtime.plan.sampling import SamplingParams


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [Sampled(e.request_id, 7) for e in plan.scheduled if e.sample])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    for num_running in args.running:
        measure(num_running, args.prompt, args.steps)


def measure(num_running: int, num_prompt: int, num_steps: int) -> None:
    limits = SchedulerLimits(
        num_blocks=num_running * (num_prompt + num_steps + 32) // 16 + num_running,
        block_size=16,
        max_num_batched_tokens=8192,
        max_num_seqs=num_running,
        max_model_len=num_prompt + num_steps + 64,
        encoder_compute_embeds=4096,
        encoder_cache_embeds=4096,
    )
    scheduler = Scheduler(limits, FAKE_TRAITS, clock=time.perf_counter)
    sampling = SamplingParams(max_tokens=num_steps + 50, ignore_eos=True)
    start = time.perf_counter()
    for number in range(num_running):
        tokens = [(number * 7919 + i) % 30_000 + 10 for i in range(num_prompt)]
        scheduler.add(Request(f"r{number}", tokens, sampling, arrival_seconds=start))
    added = time.perf_counter() - start
    while len(scheduler.running) < num_running or any(
        r.num_computed < r.num_prompt_tokens for r in scheduler.running
    ):
        plan = scheduler.schedule()
        scheduler.update(plan, answer(plan))
        scheduler.take_outputs()
    schedule, update = [], []
    for _ in range(num_steps // 2):
        t0 = time.perf_counter()
        plan = scheduler.schedule()
        t1 = time.perf_counter()
        result = answer(plan)
        t2 = time.perf_counter()
        scheduler.update(plan, result)
        scheduler.take_outputs()
        t3 = time.perf_counter()
        assert len(plan.scheduled) == num_running
        schedule.append(t1 - t0)
        update.append(t3 - t2)
    both = [a + b for a, b in zip(schedule, update, strict=True)]
    print(f"add, {num_prompt}-token prompt: {added / num_running * 1e6:.0f} us (with making it)")
    for name, times in (("schedule", schedule), ("update", update), ("both", both)):
        low, mid = min(times) * 1e6, statistics.median(times) * 1e6
        print(
            f"{name:9} {num_running} running: min {low:.0f} us, median {mid:.0f} us, "
            f"{low / num_running:.2f} us a request"
        )


if __name__ == "__main__":
    main()
