"""A runner and transformers' own model side by side, on one tiny checkpoint.

FOVEAL_DEVICE=cuda puts the runner on a GPU, with its attention there; FOVEAL_DTYPE=bfloat16 gives
it another precision. The reference computes in float32 on the CPU.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import Any

import torch

from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.model.checkpoint.loader import class_for, load_model, read_config
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.model.sampling.sampler import Sampler
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import pack_item
from tests.support.models.exact import exact_logits, float32_error, forward
from tests.support.models.step_driver import Job, StepDriver
from tests.support.models.tiny_checkpoints import CASES, IMAGE, Case, Prompt, make_prompt

DEVICE = os.environ.get("FOVEAL_DEVICE", "cpu")
DTYPE = os.environ.get("FOVEAL_DTYPE", "float32")
# A GPU sums in another order than the reference, which stays on the CPU.
GPU_TOLERANCE = 5e-4
SLACK = 2.0
"""Times the error of transformers' own float32 that ours may have, each beside float64."""
NUM_OUTPUTS = 6
NUM_BLOCKS = Case.num_blocks
NUM_SNAPSHOTS = 24


class RecordingSampler(Sampler):
    """Greedy, and keeps the logits of every output token by (request id, output index)."""

    def __init__(self) -> None:
        super().__init__(())
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.is_recording = True

    def launch(self, logits, sequences, device, guesses=()):
        if self.is_recording:
            for row, sequence in zip(logits, sequences, strict=True):
                index = len(sequence.output_token_ids)  # recorded steps use one buffer
                self.logits[sequence.request_id, index] = row.float().cpu().clone()
        return super().launch(logits, sequences, device, guesses)


def pack(item) -> bytes:
    fields = {}
    for name, tensor in item.fields.items():
        fields[name] = (str(tensor.dtype).removeprefix("torch."), tensor.numpy())
    return pack_item(item.modality, tuple(item.ids), item.embed_runs, fields)


class Bench:
    """One runner, and transformers' own model beside it."""

    def __init__(
        self,
        name: str,
        path: Any,
        attention: str = "torch",
        room: Any = None,
        kv_dtype: str = "auto",
        plain: Any = None,
        num_window_blocks: int = 0,
        quantization: Any = "auto",
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.case = CASES[name]
        self.path = str(path)
        self.sampler = RecordingSampler()
        if DEVICE != "cpu":
            attention = "auto"
        self.runner = TorchRunner(
            load_model(self.path, DTYPE, DEVICE, quantization),
            device=DEVICE,
            block_size=8,
            kv_dtype=kv_dtype,
            attention=attention,
            sampler=self.sampler,
            room=room,
        )
        self.runner.allocate_kv(
            self.case.num_blocks, num_snapshots=NUM_SNAPSHOTS, num_window_blocks=num_window_blocks
        )
        self.driver = StepDriver(self.runner, self.case.num_blocks, self.case.budget, **options)
        plain = str(plain or path)  # what transformers can load of the same weights
        self.reference = class_for(read_config(plain)).from_pretrained(plain).eval()

    def prompt(self, seed: int, items: Any = (), **options: Any) -> Prompt:
        return make_prompt(self.case, seed, list(items), **options)

    def job(self, request_id: str, prompt: Prompt, start_step: int = 0, **sampling: Any) -> Job:
        values = tuple(pack(item) for item in prompt.items)
        inputs = tuple(
            MMInput(
                hashlib.sha256(value).digest(),
                item.modality,
                PlaceholderRange(offset, len(item.ids), item.embed_runs),
            )
            for value, item, offset in zip(values, prompt.items, prompt.offsets, strict=True)
        )
        params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, **sampling)
        return Job(request_id, prompt.ids, inputs, values, params, start_step)

    def staggered(self) -> tuple[dict[str, Prompt], dict[str, Job]]:
        """Two prompts share an item, one is text only, one has all kinds; b and c arrive while a
        runs."""
        kinds = list(self.case.items)
        mixed = [(kind, 7 + kind) for kind in kinds]
        prompts = {
            "a": self.prompt(11, mixed, num_text=9),
            "b": self.prompt(12, [*mixed[:1], *[(k, 30 + k) for k in kinds[:1]]]),
            "c": self.prompt(13, mixed[-1:], num_text=21),
            "d": self.prompt(14, [], num_text=30),
        }
        starts = {"a": 0, "b": 1, "c": 2, "d": 4}
        jobs = {name: self.job(name, prompt, starts[name]) for name, prompt in prompts.items()}
        return prompts, jobs

    @torch.inference_mode()
    def deviation(self, job: Job, prompt: Prompt) -> float:
        """Largest |difference| of any logit of the job's outputs; checks greedy tokens, too."""
        logits = forward(self.reference, *self.inputs(job, prompt))
        ours = self._logits(job)
        assert logits.shape == ours.shape
        self.spread = float(logits.std())
        self.mean_deviation = float((logits - ours).abs().mean())
        self.tokens_equal = logits.argmax(-1).tolist() == job.outputs
        return float((logits - ours).abs().max())

    def inputs(self, job: Job, prompt: Prompt) -> tuple[torch.Tensor, dict[str, Any], int]:
        """What a forward over the job's tokens needs, and the place of its first output."""
        whole = replace(prompt, ids=job.tokens[:-1])
        ids = torch.tensor([whole.ids])
        return ids, self.case.forward_kwargs(whole), len(prompt.ids) - 1

    def _logits(self, job: Job) -> torch.Tensor:
        return torch.stack([self.sampler.logits[job.request_id, i] for i in range(NUM_OUTPUTS)])

    def check(self, job: Job, prompt: Prompt) -> None:
        assert job.request_id not in self.driver.failed, self.driver.failed
        difference = self.deviation(job, prompt)
        if DTYPE == "float32":
            tolerance = self.case.tolerance if DEVICE == "cpu" else GPU_TOLERANCE
            if not difference <= tolerance:  # nor is NaN
                self._check_exact(job, prompt, tolerance)
            assert self.tokens_equal
        else:  # near ties may turn over, so a job is measured along its own tokens
            assert self.mean_deviation <= 0.1 * self.spread, (job.request_id, self.mean_deviation)
        assert self.spread > 0.2

    def _check_exact(self, job: Job, prompt: Prompt, tolerance: float) -> None:
        """Ours may be off from float64 by the tolerance, or by little more than transformers is."""
        inputs = self.inputs(job, prompt)
        exact = exact_logits(self.reference, *inputs)
        ours = float((self._logits(job) - exact).abs().max())
        theirs = float32_error(self.reference, *inputs, exact)
        assert ours <= max(tolerance, SLACK * theirs), (job.request_id, ours, theirs, self.spread)

    @torch.inference_mode()
    def hidden(self, prompt: Prompt) -> torch.Tensor:
        """transformers' hidden states (T, E) of the prompt, after the last norm."""
        name = self.runner.loaded.core_name
        core = getattr(self.reference, name) if name else self.reference
        kwargs = self.case.forward_kwargs(prompt)
        output = core(input_ids=torch.tensor([prompt.ids]), use_cache=False, **kwargs)
        return output.last_hidden_state[0]

    @property
    def is_exact(self) -> bool:
        """Whether tokens, too, must be those of transformers."""
        return DTYPE == "float32"

    @torch.inference_mode()
    def generate(self, prompt: Prompt) -> list[int]:
        kwargs = self.case.forward_kwargs(prompt)
        out = self.reference.generate(
            input_ids=torch.tensor([prompt.ids]),
            max_new_tokens=NUM_OUTPUTS,
            min_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            eos_token_id=-1,
            **{"attention_mask": torch.ones(1, len(prompt.ids), dtype=torch.long), **kwargs},
        )
        return out[0, len(prompt.ids) :].tolist()


def compare(case: str, stored: Any, plain: Any) -> Bench:
    """The runner's logits of a quantised checkpoint are those of its plain twin in transformers."""
    bench = Bench(case, stored, plain=plain)
    items = [(IMAGE, 1)] if bench.case.items else []
    prompts = [bench.prompt(seed, items, num_text=9 + 8 * seed) for seed in range(2)]
    jobs = [bench.job(str(seed), prompt) for seed, prompt in enumerate(prompts)]
    bench.driver.run(jobs)
    for job, prompt in zip(jobs, prompts, strict=True):
        bench.check(job, prompt)
    return bench
