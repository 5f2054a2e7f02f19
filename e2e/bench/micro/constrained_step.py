"""A whole step of 32 streams that follow grammars beside the same step without: the ratio.

    PYTHONPATH=runtime/src python -m e2e.bench.micro.constrained_step [--rounds 9] [--cpu-time]

A Llama of SmolLM2-135M's shape with random weights (no mask's cost depends on what weights say) and
a vocabulary of 49,152, through the engine's scheduler, runner and sampler, from the plan to the
outputs. Rounds with and without grammars alternate in one process; each gives the median time of
its steps in which all 32 decode, and each pair of rounds one ratio. The limit: 1.1.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from e2e.bench.micro.grammars import NUM_ROWS, SCHEMAS, compiled, train
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.sampling import SamplingParams

LIMIT = 1.1
BLOCK_TOKENS = 16
PROMPT_TOKENS = 32
NUM_OUTPUTS = 24
Clock = Callable[[], float]


def checkpoint(folder: str, vocab_size: int, num_layers: int) -> None:
    """Writes a checkpoint of random weights beside the tokenizer."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=576, intermediate_size=1536,
        num_hidden_layers=num_layers, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True, eos_token_id=0, bos_token_id=0, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def grammars() -> list[str]:
    """Of answers that do not end within the outputs of a round, one for each schema."""
    return [
        compiled(
            {"type": "array", "items": schema, "minItems": 60, "$defs": schema.get("$defs", {})}
        )
        for schema in SCHEMAS.values()
    ]


def requests(kinds: list[str], temperature: float, seed: int) -> list[Request]:
    """32 of one round; their grammars in turn."""
    drawn = np.random.default_rng(seed)
    made = []
    for number in range(NUM_ROWS):
        tokens = drawn.integers(300, 40_000, PROMPT_TOKENS).tolist()
        sampling = SamplingParams(
            max_tokens=NUM_OUTPUTS, temperature=temperature, seed=number, ignore_eos=True,
            grammar=kinds[number % len(kinds)],
        )  # fmt: skip
        made.append(
            Request(
                f"{seed}-{number}", tokens, sampling, num_prompt_tokens=PROMPT_TOKENS,
                mm_inputs=(), values=(), arrival_seconds=0.0,
            )
        )  # fmt: skip
    return made


def seconds_of_a_step(
    runner: TorchRunner, limits: SchedulerLimits, work: list[Request], clock: Clock
) -> float:
    """The median of the steps in which all decode."""
    scheduler = Scheduler(limits, runner.traits, clock=time.perf_counter)
    for request in work:
        scheduler.add(request)
    found, num_outputs = [], 0
    while scheduler.has_work:
        begin = clock()
        plan = scheduler.schedule()
        scheduler.update(plan, runner.submit(plan).result())
        for _, output in scheduler.take_outputs():
            assert output.error is None, output.error
            num_outputs += len(output.token_ids)
        tokens = [entry.num_scheduled_tokens for entry in plan.scheduled]
        if tokens == [1] * NUM_ROWS:
            found.append(clock() - begin)
    assert num_outputs == NUM_ROWS * NUM_OUTPUTS
    assert len(found) >= NUM_OUTPUTS - 2
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=30, help="fewer: a smaller model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not the clock's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = train(folder, 49_152)
        checkpoint(folder, vocab_size, options.layers)
        print(f"{vocab_size} tokens, {options.layers} layers, {options.dtype}, "
              f"{options.threads} threads")  # fmt: skip
        num_blocks = NUM_ROWS * -(-(PROMPT_TOKENS + NUM_OUTPUTS) // BLOCK_TOKENS) + 1
        runner = TorchRunner.load(
            folder, dtype=options.dtype, device=options.device, block_size=BLOCK_TOKENS,
            num_blocks=num_blocks,
        )  # fmt: skip
        for temperature in (0.0, 1.0):
            clock = time.process_time if options.cpu_time else time.perf_counter
            compare(runner, temperature, options.rounds, clock)
        runner.close()


def compare(runner: TorchRunner, temperature: float, num_rounds: int, clock: Clock) -> None:
    """Prints the ratio of a step with grammars to one without."""
    limits = SchedulerLimits(
        num_blocks=runner.num_blocks, block_size=BLOCK_TOKENS, max_num_batched_tokens=2048,
        max_num_seqs=NUM_ROWS, max_model_len=2048, encoder_compute_embeds=1,
        encoder_cache_embeds=1,
    )  # fmt: skip
    bound, pairs = grammars(), []
    for number in range(num_rounds + 1):
        kinds = ([""], bound) if number % 2 else (bound, [""])
        times = {
            len(kind): seconds_of_a_step(runner, limits, requests(kind, temperature, number), clock)
            for kind in kinds
        }
        pairs.append((times[1], times[len(bound)]))
    pairs = pairs[1:]  # the first compiles
    ratios = sorted(with_one / without for without, with_one in pairs)
    without, with_one = [statistics.median(one) * 1e3 for one in zip(*pairs, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"temperature {temperature:g}: a step of {NUM_ROWS} {without:.1f} ms, with grammars "
        f"{with_one:.1f} ms; {ratio:.3f} (of {len(ratios)} pairs {ratios[0]:.3f} to "
        f"{ratios[-1]:.3f}), {'within' if ratio <= LIMIT else 'BEYOND'} {LIMIT}", flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
