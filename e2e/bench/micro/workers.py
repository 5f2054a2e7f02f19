"""Preprocessing throughput of one frontend: two media workers against one, in turns.

    python -m e2e.bench.micro.workers [--rounds 5] [--pictures 80]

The real worker processes and the processor of `llava-small` (CLIP at 336 pixels), fed by the
frontend's own pool with new 1-megapixel JPEGs, four at a time for each worker. Both pools stay up;
rounds alternate and each ratio is of one round. The limit is the number of cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from e2e.bench.checkpoints import checkpoint
from foveal_runtime.bench.images import ImageKind, draw
from foveal_runtime.bench.stats import paired_ratio
from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.wire.namespace import model_namespace


async def pool(num_workers: int) -> MediaWorkers:
    folder = str(checkpoint("llava-small"))
    workers = MediaWorkers(
        WorkerSettings(
            model_path=folder,
            namespace=model_namespace(folder, ""),
            limits=ModalitiesConfig(),
            num_workers=num_workers,
        )
    )
    await workers.start()
    while workers.num_ready < num_workers:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return workers


async def per_second(workers: MediaWorkers, files: list[bytes], at_a_time: int) -> float:
    waiting = iter(files)

    async def client() -> None:
        for file in waiting:
            await workers.process(0, b"{}", file)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_a_time)))
    return len(files) / (time.perf_counter() - begin)


async def measure(num_rounds: int, num_pictures: int) -> None:
    kind = ImageKind.parse("1024x1024.jpeg")
    files = [draw(number, kind) for number in range(num_pictures)]
    pools = [await pool(1), await pool(2)]
    found: list[list[float]] = [[], []]
    for number in range(-1, num_rounds):  # the first round warms up
        for index in (0, 1) if number % 2 else (1, 0):
            rate = await per_second(pools[index], files, 4 * (index + 1))
            if number >= 0:
                found[index].append(rate)
    for one in pools:
        await one.close()
    for name, rates in zip(("one worker", "two workers"), found, strict=True):
        print(f"{name:12} {sorted(rates)[len(rates) // 2]:6.1f} pictures a second")
    print(f"two over one, paired: {paired_ratio(found[1], found[0])} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=80)
    options = parser.parse_args()
    asyncio.run(measure(options.rounds, options.pictures))


if __name__ == "__main__":
    main()
