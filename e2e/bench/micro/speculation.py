"""What guessed tokens save, and cost, by kind of text and streams at a time.

    python -m e2e.bench.micro.speculation [--tokens 2,4] [--streams 1,4,8] [--rounds 3]

SmolLM2-135M-Instruct (the package of `tests/support/models/smollm2.py`) in float32, greedy, 96
tokens. Scheduler and runner in this process, on one thread, and its CPU time is the clock. Every
way gets the same requests, in turn, and must give the same tokens. Cells: tokens a second over
those without guesses (the median of rounds, lowest to highest), and the share of guessed tokens
that the model drew.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from transformers import AutoTokenizer

from e2e.bench.micro.gaps import Loop
from foveal_runtime.engine.types.request import Request
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.models import smollm2

NUM_OUTPUTS, NUM_BLOCKS = 96, 1200
_TEXT = (
    "The lighthouse at Cape Morrow was built in {year} by Ada Fenwick. It is {height} metres high, "
    "its lamp is seen from 30 kilometres away, and its keeper, Tom Brandt, writes the weather of "
    "every day into a blue book."
)
_CODE = (
    "def mean_{name}(values, weights):\n    total = 0\n"
    "    for value, weight in zip(values, weights):\n        total += value * weight\n"
    "    return total / sum(weights)\n"
)
KINDS = {
    "quotes": lambda n: (
        "Repeat this text word for word:\n\n" + _TEXT.format(year=1800 + n, height=20 + n)
    ),
    "code": lambda n: (
        "Add type hints to this function and print all of it:\n\n" + _CODE.format(name=f"of_{n}")
    ),
    "chat": lambda n: smollm2.prompts()[n],
}


def make_requests(kind: str, tokenizer: AutoTokenizer, count: int) -> list[Request]:
    found = []
    for number in range(count):
        message = {"role": "user", "content": KINDS[kind](number)}
        ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)["input_ids"]
        sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0)
        found.append(Request(f"r{number}", ids, sampling))
    return found


def measure(
    runner: TorchRunner, requests: list[Request], count: int, streams: int
) -> tuple[float, float, list[list[int]]]:
    """Tokens a second, the share of guesses that were right, and all tokens."""
    loop = Loop(runner, {"num_speculative_tokens": count}, requests)
    per_second = loop.run(streams).per_second
    made = [one.token_ids[one.num_prompt_tokens :] for one in requests]
    stats = loop.stats
    share = stats.num_accepted_tokens / max(stats.num_draft_tokens, 1)
    return per_second * sum(map(len, made)) / len(made), share, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default="2,4")
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = smollm2.folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    runner = TorchRunner.load(str(folder), dtype="float32", num_blocks=NUM_BLOCKS)
    counts = [int(one) for one in arguments.tokens.split(",")]
    print("kind".ljust(8), "streams", *(f"{count} tokens".rjust(28) for count in counts))
    for kind in KINDS:
        for streams in map(int, arguments.streams.split(",")):
            ratios: dict[int, list[float]] = {count: [] for count in counts}
            shares: dict[int, float] = {}
            for _ in range(arguments.rounds):
                usual, _, wanted = measure(
                    runner, make_requests(kind, tokenizer, max(streams, 4)), 0, streams
                )
                for count in counts:
                    requests = make_requests(kind, tokenizer, max(streams, 4))
                    speed, shares[count], made = measure(runner, requests, count, streams)
                    assert made == wanted, "a guess changed an answer"
                    ratios[count].append(speed / usual)
            cells = [
                f"{statistics.median(ratios[n]):.2f} ({min(ratios[n]):.2f} to "
                f"{max(ratios[n]):.2f}), {shares[n]:.0%}" for n in counts
            ]  # fmt: skip
            print(kind.ljust(8), str(streams).rjust(7), *(cell.rjust(28) for cell in cells))


if __name__ == "__main__":
    main()
