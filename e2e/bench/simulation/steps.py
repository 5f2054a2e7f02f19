"""What steps of a real model cost: `python -m e2e.bench.simulation.steps ENGINE.json IMAGE.png`.

A process of its own: two of them at once slow each other down as two engines do. Real scheduler,
real runner. Prints an empty line when it has begun to measure and, once its input is at its end,
one JSON object with the CPU seconds of every step and what is in its plan.
"""

from __future__ import annotations

import logging
import random
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from e2e.bench.simulation.costs import Costs, Deployment, features
from e2e.bench.simulation.virtual import run
from e2e.bench.simulation.world import Ask, World, converse
from foveal_runtime.engine.types.step import DoneStep, ModelRunner, StepPlan
from foveal_runtime.plan.config import EngineConfig, load
from foveal_runtime.wire.item import meta_of, read_header

NUM_PLAYS = 3


class Steps(msgspec.Struct):
    """`rows`: FEATURES of a plan; `seconds`: what each took; `ends`: when, in s since 1970."""

    deployment: Deployment
    rows: list[list[float]]
    seconds: list[float]
    ends: list[float]


class Timed:
    """A runner whose steps are timed; nothing else is changed."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.rows: list[list[float]] = []
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> DoneStep:
        """What goes on in the middle of encoding is a step of its own."""
        away = 0.0

        def timed() -> None:
            nonlocal away
            assert between is not None
            left = time.process_time()
            between()
            away += time.process_time() - left

        began = time.process_time()
        result = self._runner.submit(plan, between and timed).result()
        if plan.scheduled or plan.encode:
            self.seconds.append(time.process_time() - began - away)
            self.rows.append(features(plan))
            self.ends.append(time.time())
        return DoneStep(result)


def _talks(rng: random.Random, deployment: Deployment, first_image: int) -> Iterator[list[Ask]]:
    """Texts short and long, with images and without."""
    for number in range(24):
        words = rng.choice((20, 60, 200, 600))
        tokens = [1, *(rng.randrange(100, 8000) for _ in range(words))]
        images: tuple[int, ...] = ()
        if number % 2:
            tokens.insert(1, deployment.placeholder)
            images = (first_image + rng.randrange(20),)
        yield [Ask(tokens, images, (5,) * rng.choice((8, 16, 32)))]


def measure(config: EngineConfig, picture: bytes) -> Steps:
    from foveal_runtime.frontend.media.processors import ItemProcessor
    from foveal_runtime.main.engine import load_engine

    processor = ItemProcessor(config.model.path, config.modalities)
    processor.examine(b"")
    item = processor.process(0, processor.decode(0, picture, {}), {})
    loaded = load_engine(config)
    header = read_header(item)
    deployment = Deployment(
        engine=config, traits=loaded.runner.traits, num_blocks=loaded.num_blocks,
        max_model_len=loaded.max_model_len, largest=dict(loaded.largest),
        largest_request_bytes=loaded.largest_request_bytes, item_bytes=len(item),
        placeholder=header.replacement[0], item_tokens=meta_of(header).num_tokens,
    )  # fmt: skip
    timed = Timed(loaded.runner)
    rng = random.Random(1)

    async def play(number: int) -> None:
        async with World(deployment, Costs(step={}), 1, 1, runner=timed, item=item) as world:
            await converse(
                world, list(_talks(rng, deployment, 100 * number)), (1, 3, 8)[number % 3]
            )

    run(play(0))  # what is loaded and compiled lazily
    for kept in (timed.rows, timed.seconds, timed.ends):
        kept.clear()
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    number = 0
    while number < NUM_PLAYS or not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        run(play(number))
    return Steps(deployment, timed.rows, timed.seconds, timed.ends)


def main() -> None:
    logging.disable(logging.WARNING)  # sessions end when they are done
    config = load(sys.argv[1], EngineConfig)
    assert isinstance(config, EngineConfig)
    from foveal_runtime.model.cpu import threads

    threads.configure(config.num_threads)
    found = measure(config, Path(sys.argv[2]).read_bytes())
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
