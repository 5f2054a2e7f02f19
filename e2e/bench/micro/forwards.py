"""What each way of computing otherwise than transformers' modules saves: both ways in turn.

    python -m e2e.bench.micro.forwards [fused one-call last-layer attention]
        [--model llava-small] [--dtype bfloat16] [--repeats 20] [--not-kept]

Ratios below 1: faster than without. `fused`: norms and MLPs, in steps that modules compute.
`one-call`: decode steps. `last-layer`: its sampled rows alone. `attention`: the prefill kernel,
against torch's. --not-kept leaves it to glibc what memory is given back after a step.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from e2e.bench.checkpoints import SHAPES, checkpoint
from e2e.bench.micro.step import BLOCK_TOKENS, CONTEXT_TOKENS, Bench
from foveal_runtime.model.checkpoint.loader import hand_on
from foveal_runtime.model.cpu.fusing import FusedNorm
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.telemetry.allocator import keep_free_blocks

LONGEST = CONTEXT_TOKENS + 1
DECODES = (1, 4, 8, 16, 32, 64)
MOST_SEQUENCES = max(DECODES)
Work = Callable[[], object]


def works(bench: Bench, what: str) -> dict[str, Work]:
    """What the switch `what` can make a difference to."""
    tower = getattr(bench.runner.loaded.core, "vision_tower", None)

    def decode(num: int) -> Work:
        return lambda: bench.step(num, 1, CONTEXT_TOKENS - 1)

    steps = {f"decode of {num}": decode(num) for num in DECODES}
    prompts: dict[str, Work] = {
        "last 48 tokens of a prompt": lambda: bench.step(1, 48, CONTEXT_TOKENS - 48),
        "last 83 of four prompts": lambda: bench.step(4, 83, CONTEXT_TOKENS - 83),
        "prompt of 640 tokens": lambda: bench.step(1, 640, 0),
    }
    if what == "one-call":
        return steps
    if what != "fused":
        return prompts
    found = {name: steps[name] for name in ("decode of 1", "decode of 4")} | prompts
    if tower is not None:
        size = tower.config.image_size
        pixels = torch.zeros(1, 3, size, size, dtype=bench.runner.loaded.dtype)
        found["picture"] = torch.inference_mode()(lambda: tower(pixels))
    return found


Switch = Callable[[bool], None]


def fused_switch(runner: TorchRunner) -> Switch:
    """Of the forwards that fusing gave to modules. Decode steps are the modules' from here on."""
    kinds = (FusedNorm, types.FunctionType)
    fused = [
        (m, m.forward)
        for m in runner.loaded.model.modules()
        if isinstance(vars(m).get("forward"), kinds) and m.forward is not hand_on
    ]
    runner.forward.decode_layers = None

    def turn(is_on: bool) -> None:
        for module, forward in fused:
            if is_on:
                module.forward = forward
            else:
                vars(module).pop("forward", None)

    return turn


def attribute_switch(holder: object, name: str, off: object) -> Switch:
    on = getattr(holder, name)
    if on == off:
        raise SystemExit(f"{name.strip('_')} is not there with this model on this machine")
    return lambda is_on: setattr(holder, name, on if is_on else off)


def attention_switch(runner: TorchRunner) -> Switch:
    backend: Any = runner.backend
    turn_kernel = attribute_switch(backend, "_prefill", None)

    def turn(is_on: bool) -> None:
        turn_kernel(is_on)
        backend._context = None  # the division of the last step was made for the other way

    return turn


SWITCHES: dict[str, Callable[[TorchRunner], Switch]] = {
    "one-call": lambda runner: attribute_switch(runner.forward, "decode_layers", None),
    "last-layer": lambda runner: attribute_switch(runner.forward, "has_short_last_layer", False),
    "attention": attention_switch,
    "fused": fused_switch,  # the last: it takes decode steps away from the kernel
}


def seconds(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(SWITCHES))
    parser.add_argument("--model", default="llava-small")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--not-kept", action="store_true", help="glibc's own thresholds")
    options = parser.parse_args()
    if unknown := set(options.what) - set(SWITCHES):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(SWITCHES)}")
    if not options.not_kept:
        keep_free_blocks()
    model = checkpoint(options.model) if options.model in SHAPES else Path(options.model)
    runner = TorchRunner.load(str(model), dtype=options.dtype)
    runner.allocate_kv((-(-LONGEST // BLOCK_TOKENS) + 1) * MOST_SEQUENCES + 1)
    bench = Bench(runner, LONGEST, MOST_SEQUENCES)
    for what in SWITCHES:
        if what in (options.what or SWITCHES):
            compare(what, SWITCHES[what](runner), works(bench, what), options.repeats)


def compare(what: str, switch: Switch, found: dict[str, Work], repeats: int) -> None:
    for name, work in found.items():
        ratios, times = [], []
        for one in range(repeats):
            taken = {}
            for is_on in (True, False) if one % 2 else (False, True):
                switch(is_on)
                taken[is_on] = seconds(work)
            ratios.append(taken[True] / taken[False])
            times.append(taken[True])
        switch(True)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            work()
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // 5
        low, _, high = statistics.quantiles(ratios, n=4)
        middle, ms = statistics.median(ratios), statistics.median(times) * 1e3
        print(f"{what:<12}{name:<28}{ms:8.1f} ms, {middle:.2f} (quartiles {low:.2f} to "
              f"{high:.2f}), {faults} page faults", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
