"""What fused norms and MLPs and kept memory save: one model, both ways in turn.

    python -m e2e.bench.fusing_micro [--model llava-small] [--dtype bfloat16] [--repeats 20]

Ratios below 1: faster than with transformers' own forwards (`fused`), or than with glibc's own idea
of what to give back (`kept`, from a second process).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from e2e.bench.checkpoints import SHAPES, checkpoint
from e2e.bench.step_micro import BLOCK_TOKENS, CONTEXT_TOKENS, Bench

from foveal_runtime.model.runner import TorchRunner
from foveal_runtime.telemetry.allocator import keep_free_blocks

LONGEST = CONTEXT_TOKENS + 49
Work = Callable[[], object]


def works(bench: Bench) -> dict[str, Work]:
    tower = getattr(bench.runner.loaded.core, "vision_tower", None)
    found: dict[str, Work] = {
        "decode of 1": lambda: bench.step(1, 1, CONTEXT_TOKENS - 1),
        "decode of 4": lambda: bench.step(4, 1, CONTEXT_TOKENS - 1),
        "last 48 tokens of a prompt": lambda: bench.step(1, 48, CONTEXT_TOKENS - 48),
        "prompt of 640 tokens": lambda: bench.step(1, 640, 0),
    }
    if tower is not None:
        size = tower.config.image_size
        pixels = torch.zeros(1, 3, size, size, dtype=bench.runner.loaded.dtype)
        found["picture"] = torch.inference_mode()(lambda: tower(pixels))
    return found


class Switch:
    """Turns the forwards that fusing gave to modules on and off."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._fused = [(m, m.forward) for m in model.modules() if "forward" in vars(m)]

    def set(self, is_on: bool) -> None:
        for module, forward in self._fused:
            if is_on:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


def seconds(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llava-small")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--not-kept", action="store_true", help="glibc's own thresholds")
    options = parser.parse_args()
    if not options.not_kept:
        keep_free_blocks()
    model = checkpoint(options.model) if options.model in SHAPES else Path(options.model)
    runner = TorchRunner.load(str(model), dtype=options.dtype)
    runner.allocate_kv((-(-LONGEST // BLOCK_TOKENS) + 1) * 4 + 1)
    bench, switch = Bench(runner, LONGEST, 4), Switch(runner.loaded.model)
    for name, work in works(bench).items():
        ratios, times = [], []
        for one in range(options.repeats):
            taken = {}
            for is_on in (True, False) if one % 2 else (False, True):
                switch.set(is_on)
                taken[is_on] = seconds(work)
            ratios.append(taken[True] / taken[False])
            times.append(taken[True])
        switch.set(True)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            work()
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // 5
        low, _, high = statistics.quantiles(ratios, n=4)
        middle, ms = statistics.median(ratios), statistics.median(times) * 1e3
        print(f"{name:<28}{ms:8.1f} ms, fused {middle:.2f} (quartiles {low:.2f} to {high:.2f}), "
              f"{faults} page faults", flush=True)  # fmt: skip
    if not options.not_kept:
        print("without keep_free_blocks:", flush=True)
        again = [sys.executable, "-m", "e2e.bench.fusing_micro", *sys.argv[1:], "--not-kept"]
        subprocess.run(again, check=True)


if __name__ == "__main__":
    main()
