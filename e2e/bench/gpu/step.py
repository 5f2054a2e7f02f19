"""Decode steps of a whole model on a GPU against reading its weights once.

    python -m e2e.bench.gpu.step [--out FILE.json] [--profile] [--quantization int4] [--hybrid]

A Llama of 7 B parameters with random weights in bfloat16, made on the device, or quantised there;
or a hybrid of Qwen3.5-4B's sizes, first with transformers' operators for its gated delta rule.
Each case runs many steps as an engine does, and counts the wall clock: as they are, recorded (CUDA
graphs), and recorded with the next step submitted before the last one's tokens are read. The limit
is the time of reading the weights of a step, the keys and values of its contexts and the states of
its sequences once, and of writing the states, at the rate of copying. --profile also says which
kernels of a recorded step take the time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers

from e2e.bench.gpu.common import Results, copy_rate, parser
from foveal_runtime.engine.types.step import NewRequest, RunningStep, ScheduledRequest, StepPlan
from foveal_runtime.model.checkpoint.blocked import block_quantized
from foveal_runtime.model.checkpoint.dequantize import quantize_linears
from foveal_runtime.model.checkpoint.loader import adapter_for, prepare
from foveal_runtime.model.runner.graphs import CudaCapturer
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.models.rerun_capturer import RerunCapturer

PAGE = 16
BATCHES = [1, 2, 4, 8, 16, 64]
CONTEXT, NUM_STEPS = 1024, 64
SEVEN_B: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 28,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip

FOUR_B: dict[str, Any] = {
    "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
TINY_HYBRID: dict[str, Any] = {
    **TINY, "num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def make_runner(options: argparse.Namespace) -> TorchRunner:
    if options.hybrid:
        sizes = TINY_HYBRID if options.tiny else FOUR_B
        config = transformers.Qwen3_5TextConfig(**sizes)
    else:
        config = transformers.LlamaConfig(**(TINY if options.tiny else SEVEN_B))
    # Triton's interpreter cuts bfloat16 numbers off, too far for the trial of a hybrid's kernels.
    dtype = torch.float32 if options.tiny else torch.bfloat16
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    loaded = prepare(model.eval().requires_grad_(False), adapter_for(config))
    if options.quantization:
        quantize_linears(loaded.decoder, options.quantization)
        block_quantized(model, options.device)
    return TorchRunner(loaded, device=options.device, block_size=PAGE)


class Steps:
    """Sequences whose contexts are there (noise: nobody reads the text), decoding on and on."""

    def __init__(self, runner: TorchRunner, batch: int, context: int, most: int) -> None:
        self._runner = runner
        self._batch, self._context = batch, context
        self._width = -(-(context + most) // PAGE)
        sampling = SamplingParams(max_tokens=most, temperature=0.0)
        ids = [5] * context
        new = [NewRequest(str(i), ids, context, (), (), sampling) for i in range(batch)]
        runner.execute(StepPlan(0, new=new))
        if (states := runner.states.pool) is not None:
            states.ends = [context - 1] * len(states.ends)
        # The last prompt token of each, on top of keys that were never computed.
        self._runner.execute(self._plan(0))
        self._at = 1

    def _plan(self, at: int) -> StepPlan:
        scheduled = []
        for i in range(self._batch):
            blocks = list(range(1 + i * self._width, 1 + (i + 1) * self._width))
            scheduled.append(ScheduledRequest(str(i), self._context - 1 + at, 1, blocks, True))
        return StepPlan(at, scheduled=scheduled)

    def run(self, count: int, ahead: bool) -> float:
        """Seconds a step."""
        running: RunningStep | None = None
        start = time.perf_counter()
        for at in range(self._at, self._at + count):
            submitted = self._runner.submit(self._plan(at))
            if running is not None:
                running.result()
            running = submitted
            if not ahead:
                running.result()
                running = None
        if running is not None:
            running.result()
        self._at += count
        return (time.perf_counter() - start) / count

    def close(self) -> None:
        self._runner.execute(StepPlan(0, finished=[str(i) for i in range(self._batch)]))


def measure(options: argparse.Namespace) -> None:
    results = Results(options)
    context, num_steps = (20, 2) if options.tiny else (CONTEXT, NUM_STEPS)
    batches = [1, 3] if options.tiny else BATCHES
    copies = results.limit("copy_bytes_per_second", copy_rate(options.device, options.tiny))
    runner = make_runner(options)
    most = context + 3 * num_steps + 16
    runner.allocate_kv(max(batches) * (-(-most // PAGE) + 1) + 1, num_sequences=max(batches))
    if options.hybrid and options.tiny:
        runner.states.use_gpu_kernels()  # in the interpreter
    embedding = runner.loaded.decoder.get_input_embeddings().weight
    read_bytes = runner.weight_bytes - embedding.nbytes
    results.limit("weight_bytes", float(read_bytes))
    token_bytes = runner.kv_block_bytes // PAGE
    has_steps = runner.states.has_steps
    for way in ("by modules", "as it is", "recorded", "recorded, ahead")[not has_steps :]:
        runner.states.has_steps = has_steps and way != "by modules"
        if way == "recorded":
            capturer = CudaCapturer() if options.device == "cuda" else RerunCapturer()
            begin = time.perf_counter()
            is_recorded = runner.record_decoding(
                capturer, max_num_seqs=max(batches), max_model_len=most
            )
            results.row(case="recording", worked=is_recorded,
                        seconds=time.perf_counter() - begin)  # fmt: skip
        for batch in batches:
            steps = Steps(runner, batch, context, 3 * num_steps + 8)
            steps.run(4, ahead=False)
            seconds = min(steps.run(num_steps, ahead=way.endswith("ahead")) for _ in range(2))
            steps.close()
            weights = read_bytes / copies
            contexts = batch * (context + num_steps) * token_bytes / copies
            contexts += batch * 2 * runner.states.slot_bytes / copies  # read and written
            results.row(case=way, batch=batch, context=context, milliseconds=seconds * 1e3,
                        times_weights=seconds / weights,
                        times_limit=seconds / (weights + contexts),
                        tokens_per_second=batch / seconds)  # fmt: skip
            if options.profile and way == "recorded":
                profile(results, runner, batch, context)


def profile(results: Results, runner: TorchRunner, batch: int, context: int) -> None:
    """Rows of the kernels that take most of a step's time."""
    num_steps = 4
    steps = Steps(runner, batch, context, num_steps + 8)
    steps.run(4, ahead=False)
    with torch.profiler.profile() as found:
        steps.run(num_steps, ahead=False)
    steps.close()
    spent: dict[str, tuple[float, int]] = {}
    for event in found.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds, count = spent.get(event.name, (0.0, 0))
            spent[event.name] = seconds + event.device_time_total, count + 1
    for name, (microseconds, count) in sorted(spent.items(), key=lambda one: -one[1][0])[:14]:
        results.row(case="kernel", batch=batch, times=count / num_steps,
                    microseconds=microseconds / num_steps, kernel=name[:90])  # fmt: skip


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--profile", action="store_true", help="time kernels of recorded steps, too")
    made.add_argument("--quantization", default="", choices=["int8", "int4"],
                      help="of the decoder's linear layers")  # fmt: skip
    made.add_argument("--hybrid", action="store_true", help="a model with gated delta nets")
    measure(made.parse_args())
