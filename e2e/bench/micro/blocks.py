"""What naming KV blocks costs, per 1,000 tokens, with and without a picture in the prompt.

    python -m e2e.bench.micro.blocks

Limit: BLAKE3 alone over the same bytes in the same pieces, as a block's name needs its parent's.
"""

from __future__ import annotations

from blake3 import blake3

from e2e.bench.micro.common import best_seconds, show
from foveal_runtime.engine.caches.prefix_cache import BlockHasher
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams

BLOCK_TOKENS = 16
LENGTHS = [1000, 8000, 32000]


def hash_all(num_tokens: int, inputs: tuple[MMInput, ...]) -> float:
    hasher = BlockHasher(BLOCK_TOKENS)
    tokens = [i % 30_000 for i in range(num_tokens)]
    values = [b""] * len(inputs)
    request = Request("r", tokens, SamplingParams(max_tokens=1), mm_inputs=inputs, values=values)

    def work() -> None:
        request.block_hashes.clear()
        request.hash_mm = 0
        hasher.extend(request, num_tokens)

    return best_seconds(work)


def chain(num_tokens: int) -> float:
    tokens = bytes(4 * BLOCK_TOKENS)

    def work() -> None:
        parent = bytes(32)
        for _ in range(num_tokens // BLOCK_TOKENS):
            parent = blake3(parent + tokens).digest()

    return best_seconds(work)


def main() -> None:
    for length in LENGTHS:
        picture = MMInput(b"p" * 32, 0, PlaceholderRange(10, 576, ((0, 576),)))
        limit = chain(length) / length * 1000
        for label, inputs in (("text", ()), ("with a picture", (picture,))):
            seconds = hash_all(length, inputs) / length * 1000
            show(f"1,000 tokens of {length}, {label}", seconds, "BLAKE3 of blocks", limit)


if __name__ == "__main__":
    main()
