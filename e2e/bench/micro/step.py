"""What a model step costs without scheduler and HTTP: decode by batch size, and prefill.

    python -m e2e.bench.micro.step [--model llava-small] [--dtype bfloat16] [--threads 1]

Limits: reading the decoder's weights once from memory (decode), the decoder's matrix products alone
(prefill: two operations a weight and token at the rate of one large product on this machine).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from e2e.bench.checkpoints import SHAPES, checkpoint
from e2e.bench.micro.common import best_cpu_seconds, best_seconds
from foveal_runtime.engine.types.step import NewRequest, ScheduledRequest, StepPlan
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.sampling import SamplingParams

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 640
BATCHES = [1, 4, 16, 32]
PREFILLS = [(48, 592), (640, 0), (2048, 0)]
"""(tokens computed, tokens that a prefix hit left out)."""


class Bench:
    """A runner and as many sequences as asked for, each with blocks of its own."""

    def __init__(self, runner: TorchRunner, longest_tokens: int, num_sequences: int) -> None:
        self.runner = runner
        self.num_sequences = num_sequences
        self.num_blocks = -(-longest_tokens // BLOCK_TOKENS) + 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        new = [
            NewRequest(str(i), [5 + i] * longest_tokens, longest_tokens, (), (), sampling)
            for i in range(num_sequences)
        ]
        runner.execute(StepPlan(0, new=new))

    def step(self, num_sequences: int, num_tokens: int, num_computed: int) -> None:
        """Positions [num_computed, num_computed + num_tokens) of each sequence; no sampling of
        state: the same step can be repeated."""
        self.mixed([(num_tokens, num_computed)] * num_sequences)

    def mixed(self, parts: Sequence[tuple[int, int]]) -> None:
        """Likewise, with (num_tokens, num_computed) of each sequence its own."""
        scheduled = []
        if (states := self.runner.states.pool) is not None:
            # Whatever the last step made of them.
            rest = len(states.ends) - len(parts)
            states.ends = [num_computed for _, num_computed in parts] + [0] * rest
        for i, (num_tokens, num_computed) in enumerate(parts):
            first = 1 + i * self.num_blocks
            used = -(-(num_computed + num_tokens) // BLOCK_TOKENS)
            blocks = list(range(first, first + used))
            scheduled.append(ScheduledRequest(str(i), num_computed, num_tokens, blocks, True))
        result = self.runner.execute(StepPlan(1, scheduled=scheduled))
        assert len(result.sampled) == len(parts)


Timer = Callable[[Callable[[], object]], float]


def product_rate(dtype: torch.dtype, timed: Timer) -> float:
    """Operations a second of one large matrix product."""
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return 2 * 1024**3 / timed(lambda: a @ b)


def read_rate(timed: Timer) -> float:
    """Bytes a second of summing an array larger than the caches."""
    large = torch.ones(48 * 1024**2)
    return large.nbytes / timed(large.sum)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llava-small")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not the clock's")
    parser.add_argument("--profile", action="store_true", help="operators of a decode step of 4")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timed = best_cpu_seconds if options.cpu_time else best_seconds
    model = checkpoint(options.model) if options.model in SHAPES else Path(options.model)
    runner = TorchRunner.load(str(model), dtype=options.dtype)
    longest = max(max(a + b for a, b in PREFILLS), CONTEXT_TOKENS) + 1
    num = max(BATCHES)
    runner.allocate_kv((-(-longest // BLOCK_TOKENS) + 1) * num + 1, num_sequences=num)
    bench = Bench(runner, longest, num)
    decoder = runner.loaded.decoder
    embedded = decoder.get_input_embeddings().weight.numel()
    num_weights = sum(p.numel() for p in decoder.parameters()) - embedded
    head = runner.loaded.model.get_output_embeddings().weight.numel()
    size = runner.loaded.dtype.itemsize
    reads, products = read_rate(timed), product_rate(runner.loaded.dtype, timed)
    print(f"{model.name} {options.dtype}, {options.threads} threads: reads {reads / 1e9:.1f} GB/s, "
          f"products {products / 1e9:.0f} Gop/s")  # fmt: skip
    for batch in BATCHES:
        seconds = timed(lambda: bench.step(batch, 1, CONTEXT_TOKENS - 1))  # noqa: B023
        limit = (num_weights + head) * size / reads
        print(f"decode {batch:>3} x context {CONTEXT_TOKENS}: {seconds * 1e3:8.1f} ms, "
              f"{seconds / limit:5.2f} x reading the weights", flush=True)  # fmt: skip
    for tokens, computed in PREFILLS:
        seconds = timed(lambda: bench.step(1, tokens, computed))  # noqa: B023
        limit = 2 * (num_weights * tokens + head) / products
        print(f"prefill {tokens:>4} after {computed:>3}:    {seconds * 1e3:8.1f} ms, "
              f"{seconds / limit:5.2f} x the products", flush=True)  # fmt: skip
    if options.profile:
        show_profile(bench)


def show_profile(bench: Bench) -> None:
    from torch.profiler import ProfilerActivity, profile

    for title, step in (("decode of 4", (4, 1, CONTEXT_TOKENS - 1)), ("prefill", (1, 640, 0))):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(5):
                bench.step(*step)
        print(title)
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18,
                                         max_name_column_width=40))  # fmt: skip


if __name__ == "__main__":
    main()
