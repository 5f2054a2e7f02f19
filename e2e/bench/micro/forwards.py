"""What each way of computing otherwise than transformers' modules saves: both ways in turn.

    python -m e2e.bench.micro.forwards [int8 int4 fused one-call last-layer attention towers]
        [--model llava-small|gemma3|...] [--dtype bfloat16] [--repeats 20] [--decodes 1 8 32]
        [--threads 1] [--cpu-time] [--not-kept]

Ratios below 1: faster than without. `fused`: norms and MLPs, in steps that modules compute.
`one-call`: steps of all kinds. `last-layer`: its sampled rows alone. `attention`: the prefill
kernel, against torch's; `towers`: the same in an image's encoding. `int8`, `int4`: decode steps and
prompts with weights quantised at load, against those of --dtype. --not-kept leaves it to glibc what
memory is given back after a step.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from e2e.bench.checkpoints import SHAPES, checkpoint
from e2e.bench.micro.step import BLOCK_TOKENS, CONTEXT_TOKENS, Bench
from foveal_runtime.model.attention.dense import DENSE_NAME, REPLACED_NAME
from foveal_runtime.model.checkpoint.loader import class_for, hand_on
from foveal_runtime.model.cpu.fusing import FusedNorm
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.config import Quantization
from foveal_runtime.telemetry.memory import keep_free_blocks

LONGEST = CONTEXT_TOKENS + 1
DECODES = (1, 4, 8, 16, 32, 64)
Work = Callable[[], object]
GEOMETRY = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 12,
            "linear_num_value_heads": 12,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention"] * 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
}
"""Text models of other families in `llava-small`'s geometry, with random weights."""


@contextlib.contextmanager
def family(name: str) -> Iterator[Path]:
    """A checkpoint of one of FAMILIES, which is gone afterwards."""
    kind, more = FAMILIES[name]
    config = AutoConfig.for_model(kind, **{**GEOMETRY, **more})
    with tempfile.TemporaryDirectory() as folder:
        class_for(config)._from_config(config).save_pretrained(folder)
        yield Path(folder)


def works(bench: Bench, what: str, decodes: Sequence[int]) -> dict[str, Work]:
    """What the switch `what` can make a difference to."""
    image = image_of(bench.runner)

    def decode(num: int) -> Work:
        return lambda: bench.step(num, 1, CONTEXT_TOKENS - 1)

    steps = {f"decode of {num}": decode(num) for num in decodes}
    prompts: dict[str, Work] = {
        "last 48 tokens of a prompt": lambda: bench.step(1, 48, CONTEXT_TOKENS - 48),
        "last 83 of four prompts": lambda: bench.step(4, 83, CONTEXT_TOKENS - 83),
        "prompt of 640 tokens": lambda: bench.step(1, 640, 0),
    }
    if what == "one-call":
        streams = [(1, CONTEXT_TOKENS - 1)] * 3
        beside: dict[str, Work] = {
            "256 of a prompt, 3 decoded": lambda: bench.mixed([(256, 256), *streams])
        }
        return steps | prompts | beside
    if what == "towers":
        return image
    if what in ("int8", "int4"):
        return steps | {"prompt of 640 tokens": prompts["prompt of 640 tokens"]}
    if what != "fused":
        return prompts
    return {f"decode of {num}": decode(num) for num in (1, 4)} | prompts | image


def image_of(runner: TorchRunner) -> dict[str, Work]:
    """The encoding of one, where the model has a tower for images of one size."""
    tower = getattr(runner.loaded.core, "vision_tower", None)
    if tower is None:
        return {}
    size = tower.config.image_size
    pixels = torch.randn(1, 3, size, size, dtype=runner.loaded.dtype)
    return {"image": torch.inference_mode()(lambda: tower(pixels))}


Switch = Callable[[bool], None]


def quantized_switch(bench: Bench, quantization: Quantization) -> Switch:
    """Of the model: the same one, its decoder quantised while it was loaded."""
    plain = bench.runner
    dtype = str(plain.loaded.dtype).removeprefix("torch.")
    runner = TorchRunner.load(plain.loaded.path, dtype=dtype, quantization=quantization)
    runner.allocate_kv(plain.num_blocks, num_sequences=bench.num_sequences)
    Bench(runner, LONGEST, bench.num_sequences)
    print(f"{plain.weight_bytes / 2**20:.0f} MiB of weights, {quantization} "
          f"{runner.weight_bytes / 2**20:.0f}")  # fmt: skip
    return lambda is_on: setattr(bench, "runner", runner if is_on else plain)


def fused_switch(runner: TorchRunner) -> Switch:
    """Of the forwards that fusing gave to modules. Decode steps are the modules' from here on."""
    kinds = (FusedNorm, types.FunctionType)
    fused = [
        (m, m.forward)
        for m in runner.loaded.model.modules()
        if isinstance(vars(m).get("forward"), kinds) and m.forward is not hand_on
    ]
    runner.forward.decoder_layers = None

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


def towers_switch(runner: TorchRunner) -> Switch:
    configs = [getattr(module, "config", None) for module in runner.loaded.core.modules()]
    found = [c for c in configs if getattr(c, "_attn_implementation", "") == DENSE_NAME]

    def turn(is_on: bool) -> None:
        for config in found:
            config._attn_implementation = DENSE_NAME if is_on else REPLACED_NAME

    return turn


SWITCHES: dict[str, Callable[[Bench], Switch]] = {
    "int8": lambda bench: quantized_switch(bench, "int8"),
    "int4": lambda bench: quantized_switch(bench, "int4"),
    "one-call": lambda bench: attribute_switch(bench.runner.forward, "decoder_layers", None),
    "last-layer": lambda bench: attribute_switch(
        bench.runner.forward, "has_short_last_layer", False
    ),
    "attention": lambda bench: attention_switch(bench.runner),
    "towers": lambda bench: towers_switch(bench.runner),
    # The last: it takes decode steps away from the kernel.
    "fused": lambda bench: fused_switch(bench.runner),
}


def seconds(work: Work, clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(SWITCHES))
    parser.add_argument("--model", default="llava-small")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--decodes", type=int, nargs="+", default=DECODES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, not the clock's")
    parser.add_argument("--not-kept", action="store_true", help="glibc's own thresholds")
    options = parser.parse_args()
    if unknown := set(options.what) - set(SWITCHES):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(SWITCHES)}")
    if not options.not_kept:
        keep_free_blocks()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    with contextlib.ExitStack() as stack:
        if options.model in FAMILIES:
            model = stack.enter_context(family(options.model))
        else:
            model = checkpoint(options.model) if options.model in SHAPES else Path(options.model)
        runner = TorchRunner.load(str(model), dtype=options.dtype)
    most = max(*options.decodes, 4)
    runner.allocate_kv((-(-LONGEST // BLOCK_TOKENS) + 1) * most + 1, num_sequences=most)
    bench = Bench(runner, LONGEST, most)
    for what in SWITCHES:
        if what in (options.what or SWITCHES):
            found = works(bench, what, options.decodes)
            compare(what, SWITCHES[what](bench), found, options.repeats, clock)
            bench.runner = runner


def compare(
    what: str, switch: Switch, found: dict[str, Work], repeats: int, clock: Callable[[], float]
) -> None:
    for name, work in found.items():
        ratios, times = [], []
        for one in range(repeats):
            taken = {}
            for is_on in (True, False) if one % 2 else (False, True):
                switch(is_on)
                taken[is_on] = seconds(work, clock)
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
