"""What smooth streams cost: gaps between tokens against first tokens and throughput.

    python -m e2e.bench.micro.gaps [--model llava-small] [--targets 75,150,300] [--growths 2.5,5.5]
        [--traces text@8,images@4] [--requests 16] [--rounds 3] [--plot FILE]

Scheduler and runner in this process, on one thread, and its CPU time is the clock: of requests, of
the pace, of slices. So neighbours on the cores change little, and milliseconds are longer than with
more threads. `tokens`: 256 tokens a step, as with --max-num-mixed-tokens 256; `2.5x`: so many
times what streams alone take, as the default does; numbers: --target-itl-ms. Every way
gets the same requests, in turn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from e2e.bench.checkpoints import SHAPES, checkpoint
from foveal_runtime.bench.stats import percentile
from foveal_runtime.engine.process.assemble import CPU_MIXED_GROWTH, CPU_SHORT_GROWTH
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import MMInput, StepPlan
from foveal_runtime.model import device
from foveal_runtime.model.runner import encoder
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import pack_item

BLOCK_TOKENS, NUM_BLOCKS, MIXED_TOKENS = 16, 1200, 256
TEXT_TOKENS, OUTPUT_TOKENS = 110, (24, 56)


class Figures(NamedTuple):
    """Milliseconds and requests, by the clock."""

    per_second: float
    ttft_p50: float
    itl_p50: float
    itl_p99: float
    longest: float


class Loop:
    """Conversations of one question each, so many at a time, through one scheduler."""

    def __init__(self, runner: TorchRunner, bounds: dict[str, Any], requests: list[Request]):
        limits = SchedulerLimits(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_TOKENS, max_num_batched_tokens=2048,
            max_num_seqs=64, max_model_len=2048, encoder_compute_embeds=2048,
            encoder_cache_embeds=4096, max_num_mixed_tokens=MIXED_TOKENS,
            prefix_caching=False, **bounds,
        )  # fmt: skip
        self._runner = runner
        self._scheduler = Scheduler(limits, runner.traits, clock=time.thread_time)
        self.stats = self._scheduler.stats
        self._left = requests[::-1]
        self._sent: dict[str, float] = {}
        self._came: dict[str, list[float]] = {}

    def run(self, num_at_once: int) -> Figures:
        began, count = time.thread_time(), len(self._left)
        while self._left or self._scheduler.num_requests:
            while self._left and self._scheduler.num_requests < num_at_once:
                request = self._left.pop()
                self._sent[request.request_id] = time.thread_time()
                self._scheduler.add(request)
            streams, plan = self._scheduler.split(self._scheduler.schedule())
            self._execute(streams)
            self._execute(plan)
            if plan.slice_seconds:
                self._execute(self._scheduler.plan_streams(plan))
        while self._scheduler.has_work:
            self._execute(self._scheduler.schedule())
        first = [1000 * (came[0] - self._sent[name]) for name, came in self._came.items()]
        gaps = [1000 * float(gap) for came in self._came.values() for gap in np.diff(came)]
        seconds = time.thread_time() - began
        return Figures(count / seconds, percentile(first, 50), percentile(gaps, 50),
                       percentile(gaps, 99), max(gaps))  # fmt: skip

    def _execute(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        running = self._runner.submit(
            plan, lambda: self._execute(self._scheduler.plan_streams(plan))
        )
        self._scheduler.update(plan, running.result())
        now = time.thread_time()
        for request, output in self._scheduler.take_outputs():
            assert output.error is None, output.error
            self._came.setdefault(request.request_id, []).append(now)


def make_requests(runner: TorchRunner, kind: str, count: int, seed: int) -> list[Request]:
    """Random words, and a random picture before them where `kind` says so."""
    rng = random.Random(seed)
    vision = runner.loaded.config.vision_config
    num_embeds = (vision.image_size // vision.patch_size) ** 2
    found = []
    for number in range(count):
        words = [rng.randrange(10, 4000) for _ in range(TEXT_TOKENS)]
        inputs: tuple[MMInput, ...] = ()
        values: tuple[bytes, ...] = ()
        if kind == "images":
            key = f"{seed}-{number}".encode().ljust(32, b".")
            noise = np.random.default_rng(seed * 1000 + number)
            shape = (1, 3, vision.image_size, vision.image_size)
            pixels = noise.standard_normal(shape, dtype=np.float32)
            placeholder = (runner.loaded.config.image_token_id,) * num_embeds
            fields = {"pixel_values": ("float32", pixels)}
            values = (bytes(pack_item(0, placeholder, ((0, num_embeds),), fields)),)
            inputs = (MMInput(key, 0, PlaceholderRange(4, num_embeds, ((0, num_embeds),))),)
            words[4:4] = placeholder
        sampling = SamplingParams(
            max_tokens=rng.randint(*OUTPUT_TOKENS), temperature=0.0, ignore_eos=True
        )
        found.append(Request(f"r{number}", words, sampling, num_prompt_tokens=len(words),
                             mm_inputs=inputs, values=values))  # fmt: skip
    return found


def ways(targets: str, growths: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"tokens": {}}
    for growth in growths.split(","):
        short, _, long = growth.partition("/")
        found[f"{growth}x"] = {
            "short_growth": float(short), "mixed_growth": float(long or short),
            "slices_encoding": True,
        }  # fmt: skip
    for target in map(int, targets.split(",")):
        found[str(target)] = {"target_itl_seconds": target / 1000, "slices_encoding": True}
    return found


def draw(found: dict[str, dict[str, Figures]], path: Path) -> None:
    """A line for each trace: the first token, and the requests a second, by the gaps' p99."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "foveal"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for trace, by_way in found.items():
        base = by_way["tokens"].per_second
        curve = sorted(by_way.items(), key=lambda pair: pair[1].itl_p99)
        places = [f.itl_p99 for _, f in curve]
        for axis, heights in (
            (axes[0], [f.ttft_p50 for _, f in curve]),
            (axes[1], [f.per_second / base for _, f in curve]),
        ):
            axis.plot(places, heights, marker="o", label=trace)
            for (way, _), x, y in zip(curve, places, heights, strict=True):
                axis.annotate(way, (x, y), fontsize=8, xytext=(3, 4), textcoords="offset points")
    axes[0].set_title("first token, p50 in ms", fontsize=10, loc="left")
    axes[1].set_title("requests a second, over `tokens`", fontsize=10, loc="left")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(marks := [50, 100, 200, 400, 800], [str(mark) for mark in marks])
        axis.set_xlabel("gap between tokens, p99 in ms (less is smoother)", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llava-small", choices=[*SHAPES])
    parser.add_argument("--targets", default="75,150,300")
    parser.add_argument("--growths", default=f"5.5,{CPU_SHORT_GROWTH:g}/{CPU_MIXED_GROWTH:g}")
    parser.add_argument("--traces", default="text@8,images@4")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = types.SimpleNamespace(perf_counter=time.thread_time)
    for module in (device, encoder):
        vars(module)["time"] = clock  # what the runner measures steps by
    path = str(checkpoint(arguments.model))
    runner = TorchRunner.load(path, dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_TOKENS)
    found: dict[str, dict[str, Figures]] = {}
    for trace in arguments.traces.split(","):
        kind, _, num_at_once = trace.partition("@")
        rounds: dict[str, list[Figures]] = {}
        for seed in range(arguments.rounds + 1):  # the first one warms up
            for way, bounds in ways(arguments.targets, arguments.growths).items():
                requests = make_requests(runner, kind, arguments.requests, seed)
                if seed or way == "tokens":
                    one = Loop(runner, bounds, requests[: None if seed else 4])
                    figures = one.run(int(num_at_once))
                    rounds.setdefault(way, []).extend([figures] if seed else [])
        found[trace] = {
            way: Figures(*map(statistics.median, zip(*every, strict=True)))
            for way, every in rounds.items()
        }
        base = rounds["tokens"]
        print(f"{trace:10} {'':8} requests  first token    gap p50      p99  longest")
        for way, f in found[trace].items():
            pairs = zip(rounds[way], base, strict=True)
            ratio = statistics.median(a.per_second / b.per_second for a, b in pairs)
            print(f"{'':10} {way:8} x {ratio:5.3f}  {f.ttft_p50:8.0f} ms  {f.itl_p50:6.0f} ms "
                  f"{f.itl_p99:5.0f} ms {f.longest:5.0f} ms", flush=True)  # fmt: skip
    if arguments.plot:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
